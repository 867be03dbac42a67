"""Questions that choose a threshold of doubt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvsketch
from kvsketch.compare import doubt
from kvsketch.models import texts
from tests.helpers.tiny import save_tiny_model

TEXT = " ".join(f"In {year} the harbour was rebuilt." for year in range(1900, 1940))
METHOD = "h2o:budget=64:sinks=2:recent=8"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder: Path = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def test_pieces_come_from_each_text_by_turns(loaded: tuple[Any, Any]) -> None:
    texts = ["a" * 2 * doubt.PIECE, "b" * 3 * doubt.PIECE, "too short"]
    assert [each[0] for each in doubt.pieces(loaded[1], texts, 4)] == ["a", "b", "a", "b"]
    assert [len(each) for each in doubt.pieces(loaded[1], texts, 9)] == [doubt.PIECE] * 5


def test_answers_and_doubts_are_those_of_a_user_who_asks(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doubt, "NEW_TOKENS", 3)
    monkeypatch.setattr(doubt, "PIECE", 1200)
    told = doubt.ask(*loaded, [TEXT, "No ten sentences."], methods=[METHOD, "full"])
    assert len(told) == 20 and not any(each.lost for each in told[10:])
    cache = kvsketch.CompressedCache(loaded[0], METHOD)
    hidden = texts.codes_document(loaded[1], 1200, 0, TEXT)
    kvsketch.read(*loaded, cache, hidden.text)
    door = doubt.DOORS[4]
    answer = kvsketch.ask(*loaded, cache, doubt.ASKED.format(door=door), max_new_tokens=3)
    assert told[4].doubt == pytest.approx(cache.doubt()[0], abs=1e-4)
    # Where an answer is in the text at the place of a code, it is right.
    monkeypatch.setattr(
        texts, "codes_document", lambda *_: texts.CodesDocument(hidden.text, {**hidden.codes, door: answer})
    )
    again = doubt.ask(*loaded, [TEXT], methods=[METHOD])
    assert again[4].right and not again[4].lost
