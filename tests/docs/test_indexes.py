"""The docstring of a package is its index: it names every file in it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ROOMS = ("src/kvsketch", "lab/kvsketch_lab")
LARGE = 5  # files from which on a package has an index
# Where the index is elsewhere, or the names say it.
ELSEWHERE = {
    "src/kvsketch": "CONTRIBUTING.md",
    "src/kvsketch/cli": "a file for each command",
    "src/kvsketch/ops/weighted_attention": "src/kvsketch/ops/__init__.py",
    "lab/kvsketch_lab/benchmark": "lab/kvsketch_lab/commands.py names those with a command",
    "lab/kvsketch_lab/evaluation": "lab/kvsketch_lab/commands.py names those with a command",
}


def files(folder: Path) -> list[str]:
    """Modules and packages of a package."""
    modules = [path.stem for path in folder.glob("*.py") if not path.stem.startswith("__")]
    return sorted([*modules, *(path.parent.name for path in folder.glob("*/__init__.py"))])


def missing(names: list[str], text: str) -> list[str]:
    """Names that a text does not have as words."""
    return [name for name in names if not re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text)]


def packages() -> Iterator[tuple[str, Path]]:
    for room in ROOMS:
        for init in sorted((ROOT / room).rglob("__init__.py")):
            if len(files(init.parent)) >= LARGE:
                yield str(init.parent.relative_to(ROOT)), init


@pytest.mark.parametrize(("name", "init"), [each for each in packages() if each[0] not in ELSEWHERE])
def test_an_index_names_all_files(name: str, init: Path) -> None:
    index = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
    assert missing(files(init.parent), index) == [], f"the docstring of {name} does not say what these files are"


@pytest.mark.parametrize("name", ["src/kvsketch", "lab/kvsketch_lab"])
def test_contributing_names_what_lies_in_a_room(name: str) -> None:
    assert missing(files(ROOT / name), (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")) == []


def test_packages_without_an_index_exist() -> None:
    assert {*ELSEWHERE} <= {name for name, _ in packages()}


def test_a_file_that_is_not_named_is_found() -> None:
    assert missing(["layer", "layers", "text"], "layers.py   layers of a model, read as text") == ["layer"]
