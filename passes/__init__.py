"""The passes, one a file, and the order in which they run."""

if __name__ == "passes":
    raise ImportError("import this package as megatrain.passes, not as passes")

from megatrain.passes.causal import Causal
from megatrain.passes.differentiate import Differentiate
from megatrain.passes.emit import Emit
from megatrain.passes.fuse_loss import FuseLoss
from megatrain.passes.hoist import Hoist
from megatrain.passes.partition import Partition
from megatrain.passes.plan import BudgetError, Plan
from megatrain.passes.prefetch import Prefetch
from megatrain.passes.prune import Prune
from megatrain.passes.simplify import Simplify

DEFAULT = (
    Hoist(), Simplify(), Causal(), FuseLoss(), Partition(), Differentiate(), Plan(), Emit(), Prefetch(), Prune(),
)  # fmt: skip
"""The compiler, in order."""

ALL = (Hoist, Simplify, Causal, FuseLoss, Partition, Differentiate, Plan, Emit, Prefetch, Prune)

__all__ = [
    "ALL",
    "DEFAULT",
    "BudgetError",
    "Causal",
    "Differentiate",
    "Emit",
    "FuseLoss",
    "Hoist",
    "Partition",
    "Plan",
    "Prefetch",
    "Prune",
    "Simplify",
]
