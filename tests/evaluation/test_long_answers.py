"""The full cache's answers, fed token by token: what is fed, what it costs, what is held, what is measured again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvsketch import CompressedCache, prefill
from kvsketch.models import encode_chat
from kvsketch_lab import records
from kvsketch_lab.evaluation import long_answers, protected
from kvsketch_lab.evaluation.abreast import Abreast
from kvsketch_lab.evaluation.experiment import end_tokens
from tests.helpers import tiny, zoo
from tests.helpers.experiments import run_experiment

RULES = "kvsketch_lab.evaluation.protected"
PROMPT, WAIT = 96, 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{"question": f"What is {n} and {n}?" + " Say it." * (n % 3), "answer": f"#### {2 * n}"} for n in range(6)]
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arguments(data: Path, model: Path, *more: str) -> list[str]:
    given = ["--data", str(data), "--model", str(model), "--device", "cpu", "--texts", "3", "--batch", "2"]
    return [*given, "--max-new-tokens", "60", "--out", str(data.parent), *more]


def measured(data: Path) -> list[dict[str, Any]]:
    return [record["data"] for record in records.read(data.parent / "long_answers.jsonl")]


def test_a_full_cache_costs_nothing_beyond_itself(data: Path, model: Path) -> None:
    methods = "full:bits=16,h2o:budget=4096,streamingllm:budget=40"
    assert run_experiment(long_answers.LongAnswers, arguments(data, model, "--methods", methods)) == 0
    by = {(each["method"], each["sample"]): each for each in measured(data)}
    assert len(by) == 4 * 3
    for (method, sample), each in by.items():
        assert each["answer_tokens"] == by["full", sample]["answer_tokens"] > 2
        if method == "full:bits=16":
            assert each["cost"] == each["late_cost"] == 0 and each["same"] == 1
        if method == "h2o":
            assert abs(each["cost"]) < 1e-5 and each["same"] == 1
        if method == "streamingllm":
            assert each["cost"] > 0.01 and each["nll"] == pytest.approx(each["full_nll"] + each["cost"], abs=2e-6)


def test_what_is_fed_is_what_the_full_cache_said(data: Path, model: Path) -> None:
    """The oracle is the model alone."""
    options = long_answers.LongAnswersOptions(
        data=str(data), model=str(model), device="cpu", texts=2, batch=2, max_new_tokens=40, methods="full:bits=16",
        out=str(data.parent),
    )  # fmt: skip
    experiment = long_answers.LongAnswers(options)
    experiment.open()
    outcomes = [pair for group in experiment.groups() for pair in experiment.measure(group)]
    said = {cell.sample: outcome for cell, outcome in outcomes if cell.method == "full"}
    fed = {cell.sample: outcome for cell, outcome in outcomes if cell.method != "full"}
    prompts = experiment.aligned(
        [encode_chat(experiment.tokenizer, experiment.prompt(sample))["input_ids"][0].tolist() for sample in said]
    )
    assert len(set(map(len, prompts))) == 1
    for own, (sample, outcome) in zip(prompts, said.items(), strict=True):
        ids = torch.tensor([own])
        whole = experiment.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False
        )  # fmt: skip
        answer = whole[0, ids.shape[1] :].tolist()
        assert outcome["answer_ids"] == answer and outcome["prompt_tokens"] == ids.shape[1]
        with torch.no_grad():
            told = experiment.model(whole).logits[0, ids.shape[1] : -1].double().log_softmax(-1)
        nll = -told.gather(1, whole[0, ids.shape[1] + 1 :, None]).mean()
        assert fed[sample]["full_nll"] == pytest.approx(float(nll), abs=1e-4)
        assert fed[sample]["tokens_scored"] == len(answer) - 1
        assert answer[-1] in end_tokens(experiment.model) or len(answer) == 40


@pytest.mark.parametrize("method", ["h2o:bits=4:budget=40", "rehearse:wait=16:budget=40", "full"])
def test_caches_abreast_read_what_each_reads_alone(method: str) -> None:
    model, ids = zoo.build("llama"), zoo.tokens(2, PROMPT + 40)
    caches = {name: CompressedCache(model, name) for name in ("full", method, "streamingllm:budget=30")}
    alone = CompressedCache(model, method)
    with torch.no_grad():
        for cache in (*caches.values(), alone):
            prefill(model, ids[:, :PROMPT], cache)
        abreast = Abreast([*caches.values()])
        for at in range(PROMPT, PROMPT + 40):
            token = ids[:, at : at + 1]
            both = model(token.repeat(len(caches), 1), past_key_values=abreast, use_cache=True).logits
            own = model(token, past_key_values=alone, use_cache=True).logits
            part = list(caches).index(method)
            assert torch.allclose(both[2 * part : 2 * part + 2], own, atol=1e-4)
    assert caches[method].tokens_seen == alone.tokens_seen
    assert caches[method].tokens_stored == alone.tokens_stored
    one = CompressedCache(model)
    model(ids[:, :1], past_key_values=one, use_cache=True)
    with pytest.raises(ValueError, match=r"have read as many tokens, not \[1, 136\]"):
        Abreast([alone, one])


@pytest.mark.parametrize("method", ["full", "h2o:bits=4:budget=40", "streamingllm:budget=40", "rehearse:budget=40"])
def test_bytes_are_those_of_a_model_of_16_bits(method: str) -> None:
    held = []
    for dtype in (torch.float32, torch.bfloat16):
        model, ids = zoo.build("llama").to(dtype), zoo.tokens(1, PROMPT)
        cache = CompressedCache(model, method)
        with torch.no_grad():
            prefill(model, ids, cache)
        held.append((long_answers.half_bytes(cache), cache.device_bytes))
    assert held[0][0] == held[1][0] == held[1][1] <= held[0][1]


def test_bytes_are_those_of_the_caches(data: Path, model: Path) -> None:
    methods = f"h2o:bits=4,{RULES}:Window:bits=4"
    run_experiment(long_answers.LongAnswers, arguments(data, model, "--methods", methods, "--bytes", "1/2"))
    for each in (each for each in measured(data) if each["method"] != "full"):
        # Of a model of 16 numbers in a head, what is beside the codes is half of it.
        assert 0.2 < each["share_after"] < 0.52 and each["share_after"] <= each["share_during"] + 0.02
        assert each["budget_tokens"] < each["prompt_tokens"] + each["answer_tokens"]


def held_tokens(method: str, steps: int = 64) -> tuple[CompressedCache, set[int]]:
    """The tokens that any head of the first layer holds after a prompt and so many tokens behind it."""
    model, ids = zoo.build("llama"), zoo.tokens(1, PROMPT + steps)
    cache = CompressedCache(model, method)
    with torch.no_grad():
        prefill(model, ids[:, :PROMPT], cache)
        for at in range(PROMPT, PROMPT + steps):
            model(ids[:, at : at + 1], past_key_values=cache, use_cache=True)
    index = cache.slot_layers[0].table.index_slots()
    every = [set(head[head >= 0].tolist()) for head in index.flatten(0, 1)]
    return cache, set.intersection(*every)


@pytest.mark.parametrize("rule", ["Window:budget=112", f"Prompt:wait={WAIT}:budget=128:refit=none:recent=16"])
def test_the_prompt_stays(rule: str) -> None:
    _, held = held_tokens(f"{RULES}:{rule}")
    assert set(range(PROMPT)) <= held and PROMPT + 63 in held
    _, plain = held_tokens("streamingllm:budget=112")
    assert not set(range(PROMPT)) <= plain


@pytest.mark.parametrize("rule", ["rehearse", *(f"{RULES}:{rule}" for rule in ("Even", "Values", "Random"))])
def test_what_a_rule_holds_is_within_its_budget(rule: str) -> None:
    cache, held = held_tokens(f"{rule}:wait={WAIT}:budget=64:refit=none")
    last, sinks = range(PROMPT + 64 - 32, PROMPT + 64), range(4)
    assert {*last, *sinks} <= held
    slots = [int(layer.table.used_slots().sum()) for layer in cache.slot_layers]
    heads = sum(layer.table.shape[1] for layer in cache.slot_layers)
    assert sum(slots) <= 64 * heads + WAIT * heads


def test_the_largest_values_stay() -> None:
    cache, _ = held_tokens(f"{RULES}:Values:wait={WAIT}:budget=64:refit=none", steps=1)
    full, _ = held_tokens("full", steps=1)
    for layer, whole in zip(cache.slot_layers, full.slot_layers, strict=True):
        norms = whole.table.value_slots()[0, :, :PROMPT].norm(dim=-1)
        best = norms.topk(int(protected.LARGEST * PROMPT), dim=1).indices
        for head, wanted in enumerate(best.tolist()):
            assert set(wanted) <= set(layer.table.index_slots()[0, head].tolist())


def test_scores_that_are_random_are_those_of_the_seed() -> None:
    first, again = (held_tokens(f"{RULES}:Random:wait={WAIT}:budget=64:refit=none")[1] for _ in range(2))
    assert first == again


def test_a_run_goes_on_where_it_stopped(data: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers are those that the full cache gave first, and nobody makes them again."""
    options = arguments(data, model, "--methods", "streamingllm", "--bytes", "1/2")
    assert run_experiment(long_answers.LongAnswers, options) == 0
    before = measured(data)
    path = data.parent / "long_answers.jsonl"
    lines = path.read_text().splitlines()
    gone = next(line for line in lines if '"streamingllm"' in line and '"sample"' in line)
    path.write_text("".join(f"{line}\n" for line in lines if line != gone))
    monkeypatch.setattr(long_answers.Prefilled, "generate", lambda *a, **k: pytest.fail("the answer is known"))
    assert run_experiment(long_answers.LongAnswers, options) == 0
    after = measured(data)
    assert len(after) == len(before)
    key = "sample"
    for one, other in zip(sorted(before, key=str), sorted(after, key=str), strict=True):
        assert one[key] == other[key] and one["cost"] == pytest.approx(other["cost"], abs=1e-5)
    assert run_experiment(long_answers.LongAnswers, options) == 0 and len(measured(data)) == len(before)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--methods", "none"], "unknown method 'none'"),
        (["--bytes", "40"], "--bytes 40 is no share"),
        (["--max-new-tokens", "1"], "--max-new-tokens 1"),
        (["--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--methods", f"{RULES}:Even:wait=2"], "wait=2 is not valid"),
    ],
)
def test_a_wrong_argument_is_named(data: Path, model: Path, given: list[str], said: str) -> None:
    with pytest.raises((ValueError, OSError), match=said):
        run_experiment(long_answers.LongAnswers, arguments(data, model, *given))
    assert not (data.parent / "long_answers.jsonl").exists()


def test_a_method_that_does_not_fit_fails_alone(data: Path, model: Path) -> None:
    options = arguments(data, model, "--methods", "streamingllm,rehearse:wait=64", "--bytes", "1/6", "--limit", "1")
    assert run_experiment(long_answers.LongAnswers, options) == 1
    by = {each["method"]: each for each in measured(data)}
    assert "no budget fits" in by["rehearse:wait=64"]["failed"] and by["streamingllm"]["tokens_scored"] > 1
