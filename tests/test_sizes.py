"""No class, function or kernel that a reader has to take in parts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
METHODS, LINES, PARAMETERS = 30, 120, 40
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


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
