"""Without a GPU the Triton kernels run in Triton's interpreter, which must be chosen before Triton is imported.

Hypothesis tries the same inputs in every run; KVSKETCH_FUZZ asks for so many new ones.

KVSKETCH_NAN=1 fills memory that nobody has written with NaN, or with the largest number of its type: a test that reads
it then fails on every machine. torch does so in its deterministic mode only. Operations without a deterministic kind
warn there and run as ever.

Files whose few tests take minutes come first, so that no process works on them alone at the end.
"""

import contextlib
import os
from typing import Any

import torch
from hypothesis import settings

from tests.helpers.interpreter import hasten

LONGEST = ("test_compile.py",)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    with contextlib.suppress(ImportError, AttributeError):
        hasten()
settings.register_profile("repeatable", derandomize="KVSKETCH_FUZZ" not in os.environ)
settings.load_profile("repeatable")
if os.environ.get("KVSKETCH_NAN") == "1":
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
