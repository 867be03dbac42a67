"""The commands behind docs/papers can be given: their options exist, and their methods have those parameters."""

from __future__ import annotations

import shlex

import pytest
from typer.testing import CliRunner

from kvsketch.cli import app
from kvsketch.methods import parse_method
from scripts.paper_records import commands, speeds

ALL = [*commands("data"), *speeds()]


@pytest.mark.parametrize("command", sorted({tuple(shlex.split(line)[1:3]) for line in ALL}), ids="-".join)
def test_every_option_exists(command: tuple[str, str]) -> None:
    known = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "300"}).output
    lines = [shlex.split(line) for line in ALL if tuple(shlex.split(line)[1:3]) == command]
    assert {word for line in lines for word in line if word.startswith("--") and word not in known} == set()


@pytest.mark.parametrize("line", ALL)
def test_every_method_can_be_made(line: str) -> None:
    words = shlex.split(line)
    assert all(map(parse_method, words[words.index("--methods") + 1].split(",")))
