"""The needle: where it lies, that depths share a text, and what counts as found."""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path
from typing import Any

import pytest

from kvsketch import models
from kvsketch.models import texts
from kvsketch_lab import records
from kvsketch_lab.evaluation import needle
from tests.helpers import tiny
from tests.helpers.experiments import run_experiment

SENTENCES = [f"Sentence number {chr(97 + i)} of the message. " for i in range(26)] * 40


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> needle.Needle:
    """The experiment on a tiny model with a byte tokenizer and invented text."""
    monkeypatch.setattr(texts, "sentences", lambda characters, chance, among: SENTENCES[chance.randrange(9) :])
    monkeypatch.setattr(texts, "speeches", lambda: ("1990-Nobody-1", "1992-Nobody-1"))
    folder = tiny.save_tiny_model(tmp_path / "model")
    options = needle.NeedleOptions(
        model=str(folder),
        device="cpu",
        lengths="700",
        depths="0,0.5,1",
        repeats=2,
        methods="full,snapkv",
        budgets="1/2",
    )
    result = needle.Needle(options)
    result.tokenizer = models.load(folder, device="cpu")[1]
    return result


def test_depths_share_a_text_and_repeats_do_not(asked: needle.Needle) -> None:
    cells = [cell for cell in asked.cells() if cell.method == "full"]
    prompts = {cell.sample: asked.tokenizer.decode(asked.ask(cell).ids) for cell in cells}
    assert len(prompts) == 6
    rests, places = set(), []
    for cell in cells:
        question = asked.ask(cell)
        hidden = texts.HIDDEN_SENTENCE.format(passkey=question.expected)
        prompt = prompts[cell.sample]
        assert 600 < len(question.ids) <= 700 and hidden.strip() in prompt
        rests.add(re.sub(r"\s+", "", prompt.replace(hidden.strip(), "")))
        places.append(prompt.index(hidden.strip()) / len(prompt))
        asked_text = asked.tokenizer.decode(question.ids[-question.asked :])
        assert asked_text.strip() == texts.QUESTION
    assert len(rests) == 2, "the text of a repeat is the same at all depths"
    assert all(places[i] < places[i + 2] < places[i + 4] for i in (0, 1))
    assert len({asked.ask(cell).expected for cell in cells}) == 2


def test_all_depths_of_a_length_are_read_together(asked: needle.Needle) -> None:
    groups = list(asked.groups())
    assert [len(group) for group in groups] == [6, 6], "full is asked after compression, snapkv sees the question"


def test_all_numbers_of_a_text_are_asked_of_one_cache(asked: needle.Needle) -> None:
    together = needle.Needle(dataclasses.replace(asked.options, together=True, methods="full"))
    together.tokenizer = asked.tokenizer
    cells = [cell for cell in together.cells() if cell.sample.endswith("repeat=0")]
    result = [together.ask(cell) for cell in cells]
    texts_read = {question.ids[: -question.asked] for question in result}
    assert len(cells) == 3 and len(texts_read) == 1 and len({question.expected for question in result}) == 3
    read = together.tokenizer.decode(texts_read.pop())
    places = [read.index(f" is {question.expected}. ") / len(read) for question in result]
    assert places == sorted(places) and all(600 < len(question.ids) <= 700 for question in result)
    for question in result:
        name = re.search(rf"The ([a-z ]+) is {question.expected}", read)
        assert name and f"What is the {name[1]}?" in together.tokenizer.decode(question.ids[-question.asked :])


def test_decoys_are_hidden_beside_the_passkey() -> None:
    text = "".join(SENTENCES[:30])
    result = needle.with_decoys(text, 3, random.Random(0))
    assert len(set(re.findall(r"The ([a-z ]+) is \d{5}\. ", result)) & set(needle.DECOYS)) == 3
    assert re.sub(r"The [a-z ]+ is (\d{5})\. Remember it: \1 is the [a-z ]+\. ", "", result) == text


@pytest.mark.parametrize(
    ("answer", "score"),
    [("The pass key is 12345.", 1), ("12345", 1), ("123456", 0), ("54321 or 12345", 0), ("1234", 0), ("none", 0)],
)
def test_the_first_number_counts(asked: needle.Needle, answer: str, score: int) -> None:
    assert asked.score(answer, "12345") == score


def test_the_command(asked: needle.Needle, tmp_path: Path) -> None:
    options: Any = asked.options
    line = ["--model", options.model, "--device", "cpu", "--lengths", "700", "--depths", "0,1", "--repeats", "1",
            "--methods", "full,snapkv", "--budgets", "1/2", "--max-new-tokens", "4"]  # fmt: skip
    line += ["--out", str(tmp_path)]
    assert run_experiment(needle.Needle, [*line, "--needles", "3"]) == 0
    data = [record["data"] for record in records.read(tmp_path / "needle.jsonl")]
    assert [(each["method"], each["depth"]) for each in data] == [
        ("full", 0.0), ("full", 1.0), ("snapkv", 0.0), ("snapkv", 1.0)]  # fmt: skip
    assert all(each["needles"] == 3 and each["tokens_stored"] > 0.4 * each["prompt_tokens"] for each in data)
    with pytest.raises(ValueError, match="--needles 9"):
        run_experiment(needle.Needle, [*line, "--needles", "9"])
    with pytest.raises(ValueError, match="--depths deep is not possible"):
        run_experiment(needle.Needle, [*line, "--depths", "deep"])
