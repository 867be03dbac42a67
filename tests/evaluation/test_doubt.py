"""Questions that choose a threshold of doubt, and others that judge it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvsketch
from kvsketch.compare import doubt
from kvsketch.doubt_threshold import Told
from kvsketch.models import texts
from kvsketch_lab import records
from kvsketch_lab.evaluation.doubt import DoubtOptions, Doubts
from tests.helpers.experiments import run_experiment
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


def test_it_asks_on_until_enough_answers_are_lost(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    lost, kept = Told(0.5, right=False, full_right=True), Told(0.1, right=True, full_right=True)
    each = [[kept, lost], [kept], [lost, lost], [lost]]
    monkeypatch.setattr(doubt, "_of_piece", lambda model, tokenizer, piece, number, methods: each[number])
    counted: list[tuple[int, int]] = []

    def asked(first: int | None, fewest: int) -> int:
        counted.clear()
        return len(doubt.ask(*loaded, ["piece"] * 4, first=first, fewest_lost=fewest, progress=record_of(counted)))

    assert asked(2, 1) == 3 and counted == [(1, 2), (2, 2)], "one is lost in the first two"
    assert asked(2, 2) == 5 and counted[-1] == (3, 4)
    assert asked(2, 9) == asked(None, 0) == 6 and counted[-1] == (4, 4)


def record_of(counted: list[tuple[int, int]]) -> Any:
    return lambda done, of: counted.append((done, of))


def test_the_experiment_judges_a_threshold_by_questions_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_model(tmp_path / "tiny")
    options = ["--model", str(folder), "--kinds", "turns", "--texts", "1", "--questions", "2", "--tokens", "600"]
    options += ["--methods", "full,h2o:sinks=2:recent=8", "--bytes", "1/4", "--max-new-tokens", "3", "--seeds", "100"]
    monkeypatch.setenv("KVSKETCH_HOME", str(tmp_path / "home"))
    with pytest.raises(ValueError, match=r"has no threshold of doubt; run `kvsketch fit .* such as --threshold 0\.2"):
        run_experiment(Doubts, [*options, "--out", str(tmp_path)])
    assert run_experiment(Doubts, [*options, "--out", str(tmp_path), "--threshold", "0"]) == 0
    read = [record["data"] for record in records.read_folder(tmp_path)]
    assert sorted(data["method"] for data in read) == ["full", "full", "h2o:sinks=2:recent=8", "h2o:sinks=2:recent=8"]
    assert {(data["threshold"], data["text_kind"]) for data in read} == {(0.0, "turns")}
    assert all(0 < data["doubt"] < 1 and len(data["expected"]) == 5 for data in read)
    assert "0 of 0 lost answers are caught and 2 of 2 asked again" in capsys.readouterr().out
    experiment = Doubts(DoubtOptions(model=str(folder), tokens=600, questions=99, threshold=0.1))
    experiment.open()
    with pytest.raises(ValueError, match="hold 8 facts of turns, and --questions 99 asks for more"):
        experiment.made("turns", 100, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": "rehearse"}, "--methods rehearse lacks full, which tells what was lost"),
        ({"threshold": 1.5}, r"a threshold of doubt must be from 0 to 1, not 1\.5"),
    ],
)
def test_options_that_measure_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Doubts(DoubtOptions(**options))
