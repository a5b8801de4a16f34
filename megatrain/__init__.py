"""megatrain: train models that are too large for the GPU in front of you, by compiling the step into a schedule."""

from megatrain.api import compile, plan, schedule, stats
from megatrain.clip import clip_grad_norm_, synchronize
from megatrain.optim import SGD, AdamW, Lion
from megatrain.order import place_waits
from megatrain.passes import DEFAULT as DEFAULT_PASSES
from megatrain.pipeline import Pass
from megatrain.program import Program
from megatrain.schedule import Op, Schedule
from megatrain.show import show
from megatrain.text import parse_schedule as parse
from megatrain.verify import verify_schedule as verify

__version__ = "0.1.0"
__all__ = [
    "DEFAULT_PASSES",
    "SGD",
    "AdamW",
    "Lion",
    "Op",
    "Pass",
    "Program",
    "Schedule",
    "clip_grad_norm_",
    "compile",
    "parse",
    "place_waits",
    "plan",
    "schedule",
    "show",
    "stats",
    "synchronize",
    "verify",
]
