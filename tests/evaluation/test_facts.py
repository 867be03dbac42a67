"""The experiment on facts of texts of seven kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvsketch import models
from kvsketch.decode.asking import chat_frame, document_ids
from kvsketch_lab import records
from kvsketch_lab.evaluation import doubt, promise, text_kinds
from kvsketch_lab.evaluation.experiment import Experiment
from kvsketch_lab.evaluation.facts import Facts, FactsOptions
from tests.helpers.experiments import run_experiment
from tests.helpers.tiny import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def run(model: Path, out: Path, *more: str) -> int:
    given = ["--model", str(model), "--texts", "2", "--tokens", "400", "--questions", "3", "--kinds", "keys,logs"]
    return run_experiment(Facts, [*given, "--out", str(out), *more])


def test_every_method_is_asked_the_same_facts_after_compression(model: Path, tmp_path: Path) -> None:
    methods = ["full", "full:bits=8", "snapkv", "uniform"]
    assert run(model, tmp_path, "--methods", ",".join(methods), "--budgets", "1/4") == 0
    read = [record["data"] for record in records.read_folder(tmp_path)]
    assert len(read) == len(methods) * 2 * 2 * 3
    asked = {(each["text_kind"], each["sample"]): each["text_sha256"] for each in read}
    assert len(set(asked.values())) == len(asked) == 12
    for each in read:
        assert asked[each["text_kind"], each["sample"]] == each["text_sha256"]
        assert each["score"] in (0.0, 1.0) and each["nll"] > 0 and each["prompt_tokens"] <= 400
        small = each["method"] in ("snapkv", "uniform")
        assert (each["device_bytes"] <= each["full_bytes"] / 4) == small
    full, near = (
        {each["sample"]: each["nll"] for each in read if each["method"] == name} for name in ("full", "full:bits=8")
    )
    assert full != near
    assert all(abs(full[sample] - near[sample]) < 0.2 for sample in full)


def test_the_full_cache_says_what_the_model_says_of_the_whole_prompt(model: Path, tmp_path: Path) -> None:
    assert run(model, tmp_path, "--methods", "full") == 0
    loaded, tokenizer = models.load(str(model))
    options = FactsOptions(model=str(model), tokens=400, questions=3)
    for record in records.read_folder(tmp_path):
        data, parts = record["data"], dict(word.split("=") for word in record["data"]["sample"].split())
        text = options.made(tokenizer, parts["kind"], record["seed"], int(parts["text"]))
        ask = text.asks[int(parts["question"])]
        behind = tokenizer(ask.question + chat_frame(tokenizer).after + ask.opening, add_special_tokens=False)
        answer = tokenizer(ask.answer, add_special_tokens=False)["input_ids"]
        ids = [*document_ids(tokenizer, text.text)[0].tolist(), *behind["input_ids"], *answer]
        with torch.no_grad():
            logits = loaded(torch.tensor([ids])).logits[0, -len(answer) - 1 : -1].double()
        wanted = torch.nn.functional.cross_entropy(logits, torch.tensor(answer))
        assert data["nll"] == pytest.approx(float(wanted), abs=1e-4)
        assert data["score"] == float(logits.argmax(-1).tolist() == answer)


def test_a_run_that_was_stopped_measures_the_rest_alone(model: Path, tmp_path: Path) -> None:
    assert run(model, tmp_path, "--methods", "uniform", "--budgets", "1/4") == 0
    whole = {record["data"]["sample"]: record for record in records.read_folder(tmp_path)}
    path = tmp_path / "facts.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-2]))
    assert run(model, tmp_path, "--methods", "uniform", "--budgets", "1/4") == 0
    again = {record["data"]["sample"]: record for record in records.read_folder(tmp_path)}
    assert again.keys() == whole.keys()
    # A random method draws for a text what it drew before, whichever of its questions are left.
    assert all(again[name]["data"]["nll"] == whole[name]["data"]["nll"] for name in whole)


def test_a_method_that_fails_leaves_the_others(model: Path, tmp_path: Path) -> None:
    run(model, tmp_path, "--methods", "full,snapkv", "--budgets", "1/4000")
    read = [record["data"] for record in records.read_folder(tmp_path)]
    assert {each["method"] for each in read if "failed" in each} == {"snapkv"}
    assert sum("nll" in each for each in read) == 12


@pytest.mark.parametrize("experiment", [Facts, promise.Promises, doubt.Doubts])
def test_more_questions_than_a_text_has_facts_are_refused(
    experiment: type[Experiment], model: Path, tmp_path: Path
) -> None:
    given = ["--model", str(model), "--tokens", "300", "--questions", "50", "--kinds", "code", "--out", str(tmp_path)]
    more = ["--threshold", "0.2"] if experiment is doubt.Doubts else []
    with pytest.raises(ValueError, match=r"--tokens 300 hold \d+ facts of code, and --questions 50 asks for more"):
        run_experiment(experiment, [*given, *more])
    assert not list(tmp_path.glob("*.jsonl"))


def test_a_text_holds_as_many_facts_as_fit() -> None:
    made = text_kinds.fill("turns", 3, 1, 900, len)
    assert 890 < len(made.text) <= 900 or len(text_kinds.make("turns", 3, 1, len(made.asks) + 1).text) > 900
