"""Without a GPU the Triton kernels run in Triton's interpreter, which must be chosen before Triton is imported.

The interpreter replaces the functions of triton.language for each launch, and then again for each call of one device
function by another, tl.sum among them: the latter takes a millisecond, changes nothing and is left out here.

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

LONGEST = ("test_compile.py",)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


def replace_the_language_once_per_launch() -> None:
    from triton.runtime import interpreter

    patch, language = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    known: dict[Any, set[Any]] = {}
    replaced: set[Any] = set()

    def patch_once(fn: Any) -> Any:
        if fn not in known:
            known[fn] = {module for module in language if any(value is module for value in fn.__globals__.values())}
        modules = known[fn]
        if modules <= replaced:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        restore = scope.restore
        replaced.update(modules)
        scope.restore = lambda: (replaced.clear(), restore())
        return scope

    interpreter._patch_lang = patch_once


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    with contextlib.suppress(ImportError, AttributeError):
        replace_the_language_once_per_launch()
settings.register_profile("repeatable", derandomize="KVSKETCH_FUZZ" not in os.environ)
settings.load_profile("repeatable")
if os.environ.get("KVSKETCH_NAN") == "1":
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
