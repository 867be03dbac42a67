"""scripts/vllm_answers.py asks what `kvsketch eval` asks, and scores as it does. Transformers stand in for vLLM."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvsketch import models
from kvsketch_lab import records
from kvsketch_lab.evaluation import lines
from scripts import vllm_answers
from tests.helpers import tiny
from tests.helpers.experiments import run_experiment

ASKED = ["lines", "--lines", "5", "--texts", "2", "--questions", "3", "--max-new-tokens", "6"]
COMPARED = ("sample", "answer", "score", "expected", "prompt_tokens", "text_sha256", "model", "max_new_tokens")


class LLM:
    """Greedy tokens of transformers for each prompt; remembers what it was asked."""

    made: list[LLM]

    def __init__(self, **options: Any) -> None:
        self.options, self.batches = options, list[list[tuple[tuple[int, ...], Any]]]()
        self.model, _ = models.load(options["model"], device="cpu")
        LLM.made.append(self)

    def generate(self, prompts: list[dict[str, Any]], params: list[Any], use_tqdm: bool) -> list[Any]:
        self.batches.append([(tuple(each["prompt_token_ids"]), own) for each, own in zip(prompts, params, strict=True)])
        result = []
        for ids, own in self.batches[-1]:
            tokens: list[int] = []
            while len(tokens) < own.max_tokens and not (tokens and tokens[-1] in own.stop_token_ids):
                tokens.append(int(self.model(torch.tensor([[*ids, *tokens]])).logits[0, -1].argmax()))
            result.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)], num_cached_tokens=16))
        return result


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("vllm")
    module.__spec__ = ModuleSpec("vllm", None)
    module.LLM, module.SamplingParams, module.__version__ = LLM, SimpleNamespace, "0.32.0"
    monkeypatch.setitem(sys.modules, "vllm", module)
    for name, value in vllm_answers.SETTINGS.items():
        monkeypatch.setenv(name, value)
    LLM.made = []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_tiny_model(tmp_path_factory.mktemp("model"))


def ask(contenders: str, folder: Path, out: Path, *more: str) -> int:
    common = ["--contenders", contenders, "--model", str(folder), "--device", "cpu", "--out", str(out)]
    return vllm_answers.main([*common, "--", *ASKED, *more])


def data_of(out: Path) -> list[dict[str, Any]]:
    return [record["data"] for record in records.read(out / "lines.jsonl")]


def test_questions_prompts_and_scores_are_those_of_the_experiment(folder: Path, tmp_path: Path) -> None:
    assert ask("bf16", folder, tmp_path / "vllm") == 0
    options = ["--model", str(folder), "--device", "cpu", "--out", str(tmp_path / "eval"), "--methods", "full"]
    assert run_experiment(lines.Lines, [*options, *ASKED[1:], "--question", "unseen"]) == 0
    ours, theirs = data_of(tmp_path / "vllm"), data_of(tmp_path / "eval")
    assert [[each[name] for name in COMPARED] for each in ours] == [
        [each[name] for name in COMPARED] for each in theirs
    ]
    assert len({each["answer"] for each in ours}) > 1, "answers that are all the same would compare nothing"
    assert {(each["method"], each["question"], each["vllm"]) for each in ours} == {("vllm-bf16", "unseen", "0.32.0")}


def test_a_cache_that_stores_every_token_reads_a_text_before_its_questions(folder: Path, tmp_path: Path) -> None:
    assert ask("fp8", folder, tmp_path) == 0
    (llm,) = LLM.made
    assert llm.options["kv_cache_dtype"] == "fp8" and llm.options["enable_prefix_caching"]
    texts, questions = llm.batches
    assert [own.max_tokens for _, own in texts] == [1, 1] and [own.max_tokens for _, own in questions] == [6] * 6
    for number, (ids, own) in enumerate(questions):
        text = texts[number // 3][0]
        assert ids[: len(text)] == text and len(ids) > len(text)
        assert own.stop_token_ids == [llm.model.generation_config.eos_token_id]
    longest = max(len(ids) for ids, _ in questions) + 6
    assert llm.options["max_model_len"] == longest <= llm.options["max_num_batched_tokens"]


def test_a_method_that_drops_tokens_sees_the_question(folder: Path, tmp_path: Path) -> None:
    assert ask("rehearse:budget=64", folder, tmp_path) == 0
    (llm,) = LLM.made
    assert llm.options["additional_config"] == {"kvsketch": "rehearse:budget=64"}
    assert llm.options["attention_backend"] == "CUSTOM" and not llm.options["enable_prefix_caching"]
    assert [len(batch) for batch in llm.batches] == [6]
    assert {(each["method"], each["question"]) for each in data_of(tmp_path)} == {("vllm-rehearse:budget=64", "seen")}


def test_what_has_a_record_is_not_asked_again(folder: Path, tmp_path: Path) -> None:
    assert ask("bf16", folder, tmp_path) == 0
    path = tmp_path / "lines.jsonl"
    whole = path.read_text()
    path.write_text("".join(whole.splitlines(keepends=True)[:-2]))
    assert ask("bf16", folder, tmp_path) == 0
    assert [len(batch) for batch in LLM.made[1].batches] == [1, 2], "one text and the two questions without a record"
    again = sorted(each["sample"] for each in data_of(tmp_path))
    assert len(again) == len(set(again)) == 6
    assert ask("bf16", folder, tmp_path) == 0 and len(LLM.made) == 2
    assert ask("fp8", folder, tmp_path) == 0 and len(data_of(tmp_path)) == 12, "another contender has none yet"


def test_each_contender_has_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    commands: list[list[str]] = []

    def run(command: list[str]) -> Any:
        commands.append(command)
        return SimpleNamespace(returncode=int("fp8" in command))

    monkeypatch.setattr(subprocess, "run", run)
    assert ask("bf16,fp8,full:bits=4", Path("smollm2-135m"), tmp_path, "--seeds", "3") == 1
    assert [command[command.index("--contenders") + 1] for command in commands] == ["bf16", "fp8", "full:bits=4"]
    asked = [*ASKED, "--seeds", "3"]
    assert all(command[-len(asked) - 1 :] == ["--", *asked] for command in commands)
    assert "failed: fp8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contenders", "int4"], "--contenders int4 is no cache of vLLM's own"),
        (["--", "nothing"], "-- nothing: no experiment has that name"),
        (["--"], "no experiment has that name"),
        (["--", "lines", "--lines", "x"], "--lines x is not possible"),
        (["--", "lines", "--turns", "2"], "--turns 2 asks after earlier answers"),
        (["--", "perplexity"], "No such option"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        vllm_answers.main(arguments)
    assert message in capsys.readouterr().err


def test_without_options_the_questions_are_those_of_the_committed_records() -> None:
    """So answers are compared question by question."""
    options = SimpleNamespace(model=vllm_answers.MODEL, device="cuda", out="results/vllm_answers")
    for line in vllm_answers.HELD_OUT:
        experiment = vllm_answers.experiment_of(line.split(), options)  # type: ignore[arg-type]
        fields = {
            "question",
            "dtype",
            "max_new_tokens",
            *({"lines", "primed"} if line[0] == "l" else {"task", "length"}),
        }
        path = Path(__file__).parents[2] / "results" / "eval" / f"{experiment.kind()}.jsonl"
        known = {
            (record["seed"], record["data"]["sample"], *(record["data"].get(name) for name in sorted(fields)))
            for record in records.read(path)
            if record["data"]["method"] == "full" and record["data"]["model"] == vllm_answers.MODEL
        }
        asked = [(cell.seed, cell.sample, *(cell[name] for name in sorted(fields))) for cell in experiment.cells()]
        assert len(asked) >= 120 and set(asked) <= known
