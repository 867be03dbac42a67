"""The benchmark of vLLM, without vLLM: what engines tell becomes rows, and what they get wrong has no speed."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvsketch.integrations.vllm.settings import servable
from kvsketch.methods import parse_method
from kvsketch_lab import records
from kvsketch_lab.benchmark import vllm
from kvsketch_lab.benchmark.runner import FAILED
from kvsketch_lab.benchmark.runner import run as run_benchmark
from kvsketch_lab.benchmark.vllm_engine import Engine, Job
from kvsketch_lab.report import vllm as report

METHOD = "rehearse:budget=16384:bits=4"


def told(job: Job, tokens: list[int]) -> dict[str, Any]:
    """What an engine says."""
    if not job.batches:
        return {"tokens": [tokens]}
    rows = [{"batch": b, "step_times_ms": [3.0, 1.0, 2.0], "tokens_per_s": 500.0 * b} for b in job.batches]
    return {"vllm": "0.32.0", "start_s": 60.0, "rows_that_fit": 160, "timed": rows}


def measured(monkeypatch: pytest.MonkeyPatch, eager_tokens: list[int], **options: Any) -> list[dict[str, Any]]:
    jobs: list[Job] = []

    def run(job: Job) -> dict[str, Any]:
        jobs.append(job)
        return told(job, eager_tokens if job.eager else [1, 2, 3])

    monkeypatch.setattr(vllm, "run", run)
    benchmark = vllm.Vllm(contenders=METHOD, batches="1,16", **options)
    rows = list(benchmark.measure(METHOD))
    assert all(job.longest >= max(job.prompts) + job.new_tokens for job in jobs)
    return rows


def test_steps_of_each_batch_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = measured(monkeypatch, [1, 2, 3])
    assert [(row["batch"], row["step_ms"], row["p99_ms"]) for row in rows] == [(1, 2.0, 3.0), (16, 2.0, 3.0)]
    assert all(row["contender"] == METHOD and row["rows_that_fit"] == 160 for row in rows)


def test_a_method_with_other_tokens_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = measured(monkeypatch, [1, 2, 4])
    assert "other tokens" in row[FAILED] and "step_ms" not in row


def test_an_engine_that_tells_nothing_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "run", lambda job: {FAILED: "the engine ended with 1 and told nothing"})
    (row,) = vllm.Vllm(contenders="fp8").measure("fp8")
    assert row[FAILED] == "the engine ended with 1 and told nothing"


def test_what_an_engine_logs_is_shown(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(vllm, "WORKER", "this")  # a module that prints, and tells nothing
    assert vllm.run(Job()) == {FAILED: "the engine ended with 0 and told nothing"}
    assert "Beautiful is better than ugly." in capfd.readouterr().err


def test_the_check_is_short_enough_to_be_rehearsed() -> None:
    short = vllm._shortened(METHOD)
    assert short == "rehearse:bits=4:budget=48:wait=64"
    method = servable(parse_method(short))
    assert vllm.CHECKED.new_tokens > method.most_waiting  # type: ignore[attr-defined]
    assert vllm._shortened("snapkv:window=8:budget=2048") == "snapkv:window=8:budget=48"
    assert vllm._shortened("full:bits=4") == "full:bits=4"


@pytest.mark.parametrize(("contender", "rows"), [("bf16", 9.6), ("full:bits=4", 9.6), ("snapkv:budget=2048", 149)])
def test_rows_that_fit_are_those_of_token_blocks_or_of_pages(contender: str, rows: float) -> None:
    cache = SimpleNamespace(num_gpu_blocks=150, block_size=64)
    engine = Engine.__new__(Engine)
    engine.document = []
    engine.job = Job(contender=contender, longest=1000)
    engine.engine = SimpleNamespace(vllm_config=SimpleNamespace(cache_config=cache))
    assert engine.rows_that_fit() == rows


class Pretended:
    """An engine that answers each request with as many tokens as it asks for, one in a step."""

    def __init__(self, found: int) -> None:
        self.left: dict[str, int] = {}
        self.found, self.asked = found, dict[str, Any]()

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        self.left[name], self.asked[name] = params.max_tokens, (prompt["prompt_token_ids"], params)

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Any]:
        self.left = {name: count - 1 for name, count in self.left.items()}
        outputs = [
            SimpleNamespace(
                request_id=name, finished=not count, num_cached_tokens=self.found,
                outputs=[SimpleNamespace(token_ids=[7])],
            )
            for name, count in self.left.items()
        ]  # fmt: skip
        self.left = {name: count for name, count in self.left.items() if count}
        return outputs


def pretending(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine without vLLM, which finds 50 tokens of each prompt."""
    params = lambda **given: SimpleNamespace(**given)  # noqa: E731
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=params))  # type: ignore[arg-type]
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA=0))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)  # type: ignore[arg-type]
    engine = Engine.__new__(Engine)
    engine.random, engine.vocabulary, engine.engine = random.Random(0), 100, Pretended(50)
    return engine


@pytest.mark.parametrize("contender", ["fp8", METHOD])
def test_questions_follow_the_texts_that_were_read(contender: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = pretending(monkeypatch)
    engine.job = Job(contender=contender, prompts=(50,), texts=2, questions=3, new=5, answer=4)
    told = engine.asked()
    asked = engine.engine.asked
    assert len(asked) == 2 + 2 * 3 and told["found"] == 6 * 50
    for number in range(2):
        text, params = asked[f"text {number}"]
        assert len(text) == 50 and params.max_tokens == 1
        stored = {"kv_transfer_params": {"kvsketch_store": f"text {number}"}}
        assert params.extra_args == (None if contender == "fp8" else stored)
        behind = [asked[f"{number}-{question}"] for question in range(3)]
        assert all(prompt[:50] == text and len(prompt) == 55 and own.max_tokens == 4 for prompt, own in behind)
        assert len({(*prompt,) for prompt, _ in behind}) == 3
    assert told["first_s"] <= told["latest_s"] <= told["answers_s"]


def test_turns_and_questions_are_rows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []
    monkeypatch.setattr(vllm, "run", lambda job: jobs.append(job) or {"timed": [{"answers_s": 1.0}]})
    rows = [*vllm.Vllm(contenders="fp8", questions=4, batches="3", prompt=100, new=8, chunk=64).measure("fp8")]
    assert rows[0]["answers_s"] == 1.0 and "timed" not in rows[0]
    assert rows[0]["texts"] == 3 and rows[0]["questions"] == 4 and rows[0]["chunk"] == 64
    (job,) = jobs
    assert (job.rows, job.texts, job.chunk, job.reuses, job.documents) == (12, 3, 64, True, 0)
    assert job.longest >= 100 + 8 + job.answer and job.times
    assert Job(contender=METHOD, questions=4, texts=3).documents == 3
    assert not Job(contender=METHOD, questions=4, texts=3).reuses
    assert Job(contender=METHOD, question=4).documents == 1
    measured: Any = [{"kind": "vllm", "data": {"contender": "fp8", "batch": 1, "prompt": 9, "questions": 4}}]
    assert report.measured(measured) == []


def test_chats_of_each_number_are_rows_of_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []

    def tellings(job: Job) -> Iterator[dict[str, Any]]:
        jobs.append(job)
        timed = [{"chats": chats, "chats_s": 2.0 * chats} for chats in job.chats[:2]]
        for count in (1, 2):
            yield {"start_s": 9.0, "timed": timed[:count]}
        yield {"start_s": 9.0, "timed": timed} | ({} if len(job.chats) == 2 else {FAILED: "no memory"})

    monkeypatch.setattr(vllm, "tellings", tellings)
    rows = [*vllm.Vllm(contenders="fp8", turns=3, batches="2,4", prompt=100, new=8, answer=5).measure("fp8")]
    assert [(row["chats"], row["chats_s"], row["turns"], row["start_s"]) for row in rows] == [
        (2, 4, 3, 9),
        (4, 8, 3, 9),
    ]
    (job,) = jobs
    assert job.chats == (2, 4) and job.rows == 4 and job.reuses and job.longest >= 100 + 3 * (8 + 5) + 5
    *_, failed = vllm.Vllm(contenders="fp8", turns=3, batches="1,2,4").measure("fp8")
    assert failed[FAILED] == "no memory" and failed["chats"] == 4


def test_chats_that_were_timed_before_an_engine_is_stopped_have_records(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = 0

    def tellings(job: Job) -> Iterator[dict[str, Any]]:
        nonlocal asked
        asked += 1
        yield {"timed": [{"chats": 2, "chats_s": 1.0}]}
        if asked == 1:
            raise KeyboardInterrupt
        yield {"timed": [{"chats": 2, "chats_s": 1.0}, {"chats": 4, "chats_s": 3.0}]}

    monkeypatch.setattr(vllm, "tellings", tellings)
    monkeypatch.setattr(vllm.Vllm, "check_options", lambda self: None)
    commit = {"hash": "a", "dirty": False}
    monkeypatch.setattr("kvsketch_lab.records.commit", lambda: commit)
    monkeypatch.setattr("kvsketch_lab.records.stamp.commit", lambda: commit)
    out = tmp_path / "chats.jsonl"
    benchmark = vllm.Vllm(contenders="fp8", turns=1, batches="2,4", device="cpu", out=str(out))
    with pytest.raises(KeyboardInterrupt):
        run_benchmark(benchmark)
    assert [record["data"]["chats"] for record in records.read(out)] == [2]
    for _ in range(2):  # what was broken off is measured again, and then no more
        assert run_benchmark(benchmark) == 0
    assert [record["data"]["chats"] for record in records.read(out)] == [2, 2, 4] and asked == 2


def test_chats_go_on_with_their_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = pretending(monkeypatch)
    engine.job = Job(contender="fp8", prompts=(50,), chats=(2, 3), turns=2, new=5, answer=4)
    engine.rows_that_fit = lambda: 9.0  # type: ignore[method-assign]
    told = [*engine.measured()]
    assert [row["chats"] for row in told] == [2, 3]
    first, second, third = (engine.engine.asked[f"1-{turn}"][0] for turn in range(3))
    assert second[:54] == [*first, 7, 7, 7, 7] and len(second) == 59 and third[:59] == second and len(third) == 68
    assert told[1]["found"] == 3 * 3 * 50 and told[1]["first_turns_s"] <= told[1]["chats_s"]


def test_what_cannot_run_is_told_before_an_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'kvsketch\[vllm\]'"):
        vllm.Vllm().check_options()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match="two runs"):
        vllm.Vllm(turns=2, questions=2).check_options()
    with pytest.raises(ValueError, match=r"--trace t\.json is of the chats of one contender"):
        vllm.Vllm(turns=2, contenders="bf16,fp8", trace="t.json").check_options()
    with pytest.raises(ValueError, match=r"--host-gb 8 is for chats"):
        vllm.Vllm(host_gb=8).check_options()
    with pytest.raises(ValueError, match="did you mean 'snapkv'"):
        vllm.Vllm(contenders="bf16,snapvk:budget=2048").check_options()
