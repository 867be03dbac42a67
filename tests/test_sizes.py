"""No class, function or kernel that a reader has to take in parts."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvsketch

ROOT = Path(__file__).parent.parent
METHODS, LINES, PARAMETERS = 45, 120, 40
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# What a class has with its bases inside kvsketch: a class that was cut in two is as large as before.
FIELDS = 25
# Classes that have more. They may only become smaller; one that fits leaves the list.
LARGER = {
    "Fitting": 64, "Rehearse": 63, "ReplayedMethod": 56, "KVzip": 56, "Expected": 52, "WaitingMethod": 52,
    "ClusterKV": 49, "InfiniGen": 49, "Quest": 48, "RecallingMethod": 46,
}  # fmt: skip


def too_large(source: str) -> Iterator[str]:
    """Names in a file of code. A kernel may have as many lines as it needs."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and sum(isinstance(each, FUNCTIONS) for each in node.body) > METHODS:
            yield node.name
        if isinstance(node, FUNCTIONS):
            is_kernel = node.name.endswith("_kernel")
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if (lines > LINES and not is_kernel) or (is_kernel and len(node.args.args) > PARAMETERS):
                yield node.name


@pytest.mark.parametrize("folder", ["src", "lab", "scripts"])
def test_nothing_is_too_large(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert [f"{file.relative_to(ROOT)}: {name}" for file in files for name in too_large(file.read_text())] == []


def test_what_is_too_large_is_named() -> None:
    methods = "".join(f"    def m{number}(self): ...\n" for number in range(METHODS + 1))
    names = ", ".join(f"p{number}" for number in range(PARAMETERS + 1))
    lines = "    pass\n" * LINES
    source = f"class Large:\n{methods}def f():\n{lines}def a_kernel({names}): ...\ndef b_kernel():\n{lines}"
    assert list(too_large(source)) == ["Large", "f", "a_kernel"]


def size_with_bases(kind: type) -> tuple[int, int]:
    """Methods and fields of a class, those of its bases in this package included; a name counts once."""
    own = [base for base in kind.__mro__ if base.__module__.split(".")[0] == kind.__module__.split(".")[0]]
    callables = (property, classmethod, staticmethod, functools.cached_property)
    names = {
        name
        for base in own
        for name, value in vars(base).items()
        if not name.startswith("__") and (inspect.isfunction(value) or isinstance(value, callables))
    }
    return len(names), len(dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else 0


def classes() -> Iterator[type]:
    """Those of the installed package that are defined in a module that can be imported here."""
    for module in pkgutil.walk_packages(kvsketch.__path__, "kvsketch."):
        if module.name.endswith(("__main__", ".kernel")) or ".vllm" in module.name:
            continue
        made = importlib.import_module(module.name)
        yield from (each for each in vars(made).values() if inspect.isclass(each) and each.__module__ == module.name)


def test_no_class_is_too_large_with_its_bases() -> None:
    sizes = {kind.__name__: size_with_bases(kind) for kind in classes()}
    assert sizes["SlotTable"][0] > 20  # they are really counted
    large = {name: size for name, size in sizes.items() if size[0] > LARGER.get(name, METHODS) or size[1] > FIELDS}
    assert not large, f"methods and fields of a class with its bases; give a part of it an object of its own: {large}"
    fits = [name for name in LARGER if sizes[name][0] <= METHODS]
    assert not fits, f"these are small enough; take them from the list: {fits}"


def test_bases_count() -> None:
    first = type("First", (), {"one": lambda self: None, "both": lambda self: None, "__module__": "kvsketch.slots"})
    second = type("Second", (first,), {"both": lambda self: None, "own": property(), "__module__": "kvsketch.cache"})
    assert size_with_bases(second) == (3, 0)
