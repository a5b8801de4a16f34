"""The environment variables of megatrain, read nowhere else."""

from __future__ import annotations

import os
import re
from pathlib import Path

UNITS = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


def dump_dir() -> Path | None:
    """MEGATRAIN_DUMP: the folder that receives the program after every pass."""
    value = os.environ.get("MEGATRAIN_DUMP", "")
    return Path(value) if value else None


def verify_level() -> int:
    """MEGATRAIN_VERIFY: 0 verifies nothing, 1 (default) each program that a pass returns, 2 also measures every
    body."""
    value = os.environ.get("MEGATRAIN_VERIFY", "1")
    if value not in ("0", "1", "2"):
        raise ValueError(
            f"MEGATRAIN_VERIFY={value}: use 0 (off), 1 (verify after each pass) or 2 (also measure bodies)"
        )
    return int(value)


def cache_dir() -> Path:
    """MEGATRAIN_CACHE: the folder for what is measured once; `~/.cache/megatrain` unless given."""
    given = os.environ.get("MEGATRAIN_CACHE")
    found = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "megatrain"
    return found.expanduser()


def parse_bytes(value: str | int | None, name: str = "memory") -> int:
    """Bytes from `"24GiB"`, `"500 MB"` or a number; 0 for None (no limit).  Raises ValueError on anything else."""
    if value is None:
        return 0
    if isinstance(value, int):
        if value <= 0:
            raise ValueError(f"{name}={value}: a byte count must be positive; leave it out for no limit")
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    unit = found and (found[2] or "B").upper()
    if not found or unit not in UNITS or not float(found[1]):
        raise ValueError(f"{name}={value!r} is not a size: write it as '24GiB', '500MiB' or a number of bytes")
    return int(float(found[1]) * UNITS[unit])  # type: ignore[index]
