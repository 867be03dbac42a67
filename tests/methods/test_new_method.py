"""A new method touches two files, its own and the index; everything else comes from the class."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvsketch
from kvsketch import methods
from kvsketch.cli import app
from kvsketch.cli.methods import describe
from kvsketch_lab.report import docs, palette
from tests.cache import test_contract

ROOT = Path(__file__).parents[2]
SOURCE = '''
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvsketch.methods.evict import EvictingMethod
from kvsketch.methods.parameters import option
from kvsketch.slots import SlotTable


@dataclass(frozen=True)
class Longest(EvictingMethod):
    """Keeps the tokens with the longest keys."""

    name: ClassVar[str] = "longest"
    look: ClassVar[tuple[str, ...]] = ("#123456", "P")
    power: float = option(2.0, "exponent of the norm")

    def scores(self, table: SlotTable, queries: Tensor) -> Tensor:
        return table.key_slots().float().norm(dim=-1) ** self.power
'''


@pytest.fixture
def longest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[methods.Method]:
    """The two files: a module in methods/, and its class in the index."""
    (tmp_path / "longest.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    result: type[methods.Method] = importlib.import_module("kvsketch.methods.longest").Longest
    monkeypatch.setitem(kvsketch.METHODS, "longest", result)
    return result


def test_a_method_in_the_index_is_everywhere(longest: type[methods.Method]) -> None:
    method = kvsketch.parse_method("longest:budget=128:power=3")
    assert isinstance(method, longest) and str(method) == "longest:budget=128:power=3.0"
    listed = json.loads(CliRunner().invoke(app, ["methods", "--json"]).stdout)
    assert listed[-1] == json.loads(json.dumps(describe(longest)))
    assert listed[-1]["idea"] == "Keeps the tokens with the longest keys."
    explained = CliRunner().invoke(app, ["methods", "longest"]).stdout.split("\n")
    assert any(line.split() == ["power", "2.0", "exponent", "of", "the", "norm"] for line in explained)
    test_contract.test_budget_and_bytes_hold_at_every_step("longest", "llama")
    test_contract.test_sinks_and_recent_tokens_stay("longest")
    test_contract.test_a_row_alone_equals_that_row_in_a_left_padded_batch("longest")


def test_pages_and_colours_come_from_the_class(longest: type[methods.Method]) -> None:
    described = [describe(cls) for cls in kvsketch.METHODS.values()]
    numbers = docs.Numbers(ROOT, described)
    assert "\n| longest | evict | bounded | Keeps the tokens with the longest keys. |  |" in numbers.words(
        "method_index"
    )
    assert '"longest": ["evict", "#123456", "P"]' in palette.look_file(described)
