"""The C compiler of this machine, for the programs of `ops` that run on a CPU. Does not import torch."""

from __future__ import annotations

import os
import shutil

COMPILERS = ("cc", "gcc", "clang")


def compiler() -> str | None:
    """$CC, or the first one that is there; None without one."""
    return os.environ.get("CC") or next(filter(None, map(shutil.which, COMPILERS)), None)
