"""The runner measures every cell once, whatever stops it, and keeps failures as records."""

from __future__ import annotations

import copy
import json
import multiprocessing
import pickle
import signal
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvsketch.cli import app
from kvsketch.compare import budgets
from kvsketch.compare.shared_prefill import shared_prefill
from kvsketch.methods import METHODS
from kvsketch.models import identity
from kvsketch_lab import records
from kvsketch_lab.evaluation import experiment
from kvsketch_lab.evaluation.experiment import Cell, Experiment, ExperimentOptions, failure, methods_option
from kvsketch_lab.options import option
from tests.helpers import tiny, zoo
from tests.helpers.experiments import run_experiment
from tests.helpers.waiting import wait_for

calls: list[str] = []


@dataclass
class ToyOptions(ExperimentOptions):
    methods: str = methods_option("full,snapkv")
    samples: int = option(6, "samples", least=1)
    bad: int = option(-1, "a sample that fails")
    explode: int = option(-1, "a sample that fails with its whole group")
    hang: int = option(0, "after so many cells the run waits for its end; 0: never")


class Toy(Experiment):
    """Scores the number of a sample."""

    name = "toy-example"
    options: ToyOptions

    def open(self) -> None:
        calls.append("open")

    def origin(self) -> dict[str, Any]:
        return {"model_sha256": "0"}

    def cells(self) -> list[Cell]:
        return [
            Cell(method, budget, f"sample={sample}", seed, (("half", sample >= 3),))
            for seed in self.seeds
            for sample in range(self.options.samples)
            for method, budget in self.contenders
        ]

    def alike(self, cell: Cell) -> Hashable:
        return cell.sample, cell.seed

    def measure(self, cells: list[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
        for cell in cells:
            number = int(cell.sample[len("sample=") :])
            calls.append(cell.key)
            if len(calls) == 1 + self.options.hang > 1:
                signal.pause()
            if number == self.options.explode:
                raise RuntimeError("out of\nluck")
            yield cell, failure(ValueError("bad sample")) if number == self.options.bad else {"score": number / 2}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    calls.clear()
    monkeypatch.setattr("kvsketch_lab.records.files.SECONDS_BETWEEN_WRITES", 0.0)


def run(out: Path, *arguments: str, code: int | None = 0) -> list[dict[str, Any]]:
    assert run_experiment(Toy, ["--out", str(out), "--budgets", "1/4,64", *arguments]) == code
    return list(records.read(out / "toy_example.jsonl"))


def keys(result: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(r["seed"], r["data"]["sample"], r["data"]["method"], r["data"]["budget"]) for r in result]


def test_records_say_what_was_measured_and_are_made_once(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert len(result) == len(set(keys(result))) == 6 * 3
    assert result[0]["kind"] == "toy_example"
    expected = {"method": "full", "budget": "", "sample": "sample=0", "half": False, "score": 0.0, "model_sha256": "0"}
    assert result[0]["data"] == expected
    calls.clear()
    assert run(tmp_path) == result
    assert calls == [], "a complete file needs neither the model nor a measurement"
    more = run(tmp_path, "--seeds", "0,4-5")
    assert more[:18] == result and len(set(keys(more))) == 18 * 3


def test_what_a_group_has_measured_is_written_before_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(records.Writer, "end_group", lambda writer: ended.append(len(calls)))
    run(tmp_path)
    assert len(ended) == 6 and ended == sorted(set(ended)), "once for each sample"


def test_a_killed_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "toy_example.jsonl"
    child = multiprocessing.get_context("fork").Process(target=run, args=(tmp_path, "--hang", "8"))
    child.start()
    wait_for(lambda: path.exists() and len(path.read_bytes().splitlines()) >= 5, "five lines")
    assert child.pid is not None
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    before = list(records.read(path))
    assert 4 <= len(before) < 18
    with path.open("ab") as file:
        file.write(json.dumps(before[0]).encode()[:200])  # a line that the kill cut short
    result = run(tmp_path)
    assert result[: len(before)] == before
    assert sorted(keys(result)) == sorted(set(keys(result))) and len(result) == 18
    assert len(calls) == 1 + 18 - len(before)


def test_failures_are_records_until_they_are_retried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(tmp_path, "--bad", "1", "--explode", "4", code=1)
    failed = [record["data"] for record in result if "failed" in record["data"]]
    assert len(result) == 18 and len(failed) == 6
    assert {data["failed"] for data in failed} == {"ValueError: bad sample", "RuntimeError: out of luck"}
    assert all("score" not in data for data in failed)
    output = capsys.readouterr()
    assert "18 records" in output.out and "6 of them failed" in output.out
    assert "failed: snapkv 1/4 sample=4: RuntimeError: out of luck" in output.err
    assert run(tmp_path, code=1) == result
    again = run(tmp_path, "--retry-failed")
    assert again[:18] == result and sorted(keys(again[18:])) == sorted(
        keys([r for r in result if "failed" in r["data"]])
    )
    assert all("score" in record["data"] for record in again[18:])
    assert run(tmp_path, "--retry-failed") == again
    assert "failed" not in capsys.readouterr().out.splitlines()[-1]


def test_a_limit_takes_the_first_samples_of_each_setting(tmp_path: Path) -> None:
    result = run(tmp_path, "--limit", "2")
    assert {record["data"]["sample"] for record in result} == {"sample=0", "sample=1", "sample=3", "sample=4"}
    assert len(run(tmp_path)) == 18
    with pytest.raises(ValueError, match="--limit 0 is not possible"):
        run(tmp_path, "--limit", "0")


def test_an_outcome_that_is_no_number_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Toy, "measure", lambda self, cells: ((cell, {"score": float("nan")}) for cell in cells))
    result = run(tmp_path, "--samples", "1", code=1)
    assert ["ValueError" in record["data"]["failed"] for record in result] == [True] * 3


def test_a_lost_device_stops_the_run_after_what_lost_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: Toy, cells: list[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
        for cell in cells:
            bad = cell.budget == "1/4"
            yield cell, failure(RuntimeError("CUDA error: illegal address")) if bad else {"score": 1.0}

    monkeypatch.setattr(Toy, "measure", lost)
    with pytest.raises(RuntimeError, match="snapkv 1/4 left the GPU unusable"):
        run(tmp_path, "--samples", "1")
    result = list(records.read(tmp_path / "toy_example.jsonl"))
    assert [("failed" in r["data"], r["data"]["budget"]) for r in result] == [(False, ""), (True, "1/4")]
    assert [record["data"]["budget"] for record in run(tmp_path, "--samples", "1", code=1)] == ["", "1/4", "64"]


def test_an_experiment_that_forgets_a_cell_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Toy, "measure", lambda self, cells: iter([(cells[0], {"score": 1.0})]))
    result = run(tmp_path, "--samples", "1", code=1)
    assert [record["data"].get("failed") for record in result] == [None] + 2 * [
        "RuntimeError: the experiment gave no outcome"
    ]


def test_options_travel_to_other_processes() -> None:
    options = ToyOptions()
    there = Toy(pickle.loads(pickle.dumps(options)))
    assert there.cells() == Toy(copy.deepcopy(options)).cells()
    assert next(experiment.measure_group(there, there.cells()[:1]))[1]["data"]["score"] == 0.0


def test_out_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"toy\.jsonl is a file; name the folder"):
        run(tmp_path / "toy.jsonl")
    assert not list(tmp_path.iterdir())


def test_lists_of_numbers() -> None:
    assert experiment.parse_numbers("0,2-4,2", "--seeds") == [0, 2, 3, 4]
    for wrong in ("", "a", "3-1", "1-"):
        with pytest.raises(ValueError, match="--cases"):
            experiment.parse_numbers(wrong, "--cases")


def test_contenders() -> None:
    assert budgets.contenders("full,snapkv:window=8,quest:budget=64", "1/8,1/4") == [
        ("full", ""),
        ("snapkv:window=8", "1/8"),
        ("snapkv:window=8", "1/4"),
        ("quest", "64"),
    ]
    assert {method.partition(":")[0] for method, _ in budgets.contenders("all", "1/8")} == set(budgets.METHODS)
    with pytest.raises(ValueError, match="did you mean 'snapkv'"):
        budgets.contenders("snapvk", "1/8")
    with pytest.raises(ValueError, match="--budgets='many'"):
        budgets.contenders("full", "many")


def test_the_model_hash_follows_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSKETCH_HOME", str(tmp_path / "home"))
    folder = tiny.save_tiny_model(tmp_path / "model")
    first = identity.model_sha256.__wrapped__(str(folder))
    monkeypatch.setattr(identity, "sha256_of", lambda file: pytest.fail("the hash of a file was not remembered"))
    assert identity.model_sha256.__wrapped__(str(folder)) == first
    monkeypatch.undo()
    monkeypatch.setenv("KVSKETCH_HOME", str(tmp_path / "home"))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\1\2\3")
    assert identity.model_sha256.__wrapped__(str(folder)) != first


def _hash_when_told(folder: Path, start: Any) -> None:
    start.wait()
    identity.model_sha256.__wrapped__(str(folder))


def test_processes_started_at_once_note_the_same_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSKETCH_HOME", str(tmp_path / "home"))
    folder = tiny.save_tiny_model(tmp_path / "model")
    context = multiprocessing.get_context("fork")
    start = context.Barrier(8)
    processes = [context.Process(target=_hash_when_told, args=(folder, start)) for _ in range(8)]
    for each in processes:
        each.start()
    for each in processes:
        each.join()
    assert [each.exitcode for each in processes] == [0] * 8


def test_a_folder_that_cannot_hold_notes_costs_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVSKETCH_HOME", str(tmp_path / "file" / "home"))
    folder = tiny.save_tiny_model(tmp_path / "model")
    assert len(identity.model_sha256.__wrapped__(str(folder))) == 64


def test_models_in_folders_of_the_same_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSKETCH_HOME", str(tmp_path / "home"))
    settings = []
    for name in ("a", "b"):
        folder = tiny.save_tiny_model(tmp_path / name / "model")
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-4] + name.encode() * 4)
        settings.append(dict(Toy(ToyOptions(model=str(folder))).setting))
    assert settings[0]["model"] == settings[1]["model"] == "model"
    assert settings[0]["weights"] != settings[1]["weights"]
    built_in = dict(Toy(ToyOptions()).setting)
    assert "weights" not in built_in, "a built-in name pins its weights, and a complete file needs no model"


def test_what_cannot_be_written_is_said_before_it_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        run(tmp_path / "file" / "results")

    def unnamed(self: Toy) -> dict[str, Any]:
        raise OSError("no such weights")

    monkeypatch.setattr(Toy, "origin", unnamed)
    with pytest.raises(OSError, match="no such weights"):
        run(tmp_path)
    assert calls == []


def test_records_that_lack_a_field_are_measured_again(tmp_path: Path) -> None:
    whole = run(tmp_path)
    path = tmp_path / "toy_example.jsonl"
    lacking: list[dict[str, Any]] = [copy.deepcopy(each) for each in whole[:3]]
    del lacking[0]["seed"], lacking[1]["data"]["sample"], lacking[2]["data"]["score"]
    path.unlink()
    records.append(path, *lacking, *whole[3:])
    result = run(tmp_path)
    assert len(calls) == 2 + 18 + 3
    assert sorted(keys(result[-3:])) == sorted(keys(whole[:3]))
    path.write_text('{"kind": "toy_example"}\n' + path.read_text())
    with pytest.raises(ValueError, match=r"toy_example\.jsonl, line 1 is not a record \(its run is not described"):
        run(tmp_path)


def test_again_measures_what_another_commit_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = run(tmp_path)
    monkeypatch.setattr(records, "commit", lambda: {"hash": "new", "dirty": False})
    monkeypatch.setattr("kvsketch_lab.records.stamp.commit", records.commit)
    assert len(run(tmp_path)) == 18
    new = run(tmp_path, "--again", "--methods", "snapkv")[18:]
    assert len(new) == 12 and all(each["again"] and each["commit"]["hash"] == "new" for each in new)
    assert len(run(tmp_path, "--again", "--methods", "snapkv")) == 30, "a second start goes on where the first stopped"
    counts = [
        each["commit"] == old[0]["commit"] for each in records.latest(records.read(tmp_path / "toy_example.jsonl"))
    ]
    assert sum(counts) == 6 and len(counts) == 18


def test_every_sample_has_a_cache_seed_of_its_own() -> None:
    cells = [Cell("uniform", "1/4", f"question={n}", seed) for n in range(50) for seed in (0, 1)]
    assert len({cell.cache_seed for cell in cells}) == 100
    assert cells[0].cache_seed == Cell("snapkv", "1/2", "question=0", 0).cache_seed, "the same for all methods"


def test_the_summary_shows_failures_and_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = {"method": "a", "budget": "1/4", "seed": 0}
    data = [{**cell, "sample": f"text {i}", "size": i % 2, "score": float(i > 3)} for i in range(8)]
    data += [{"method": "a", "budget": "1/4", "size": 1, "failed": "no"}]
    monkeypatch.setattr(Toy, "by", "size")
    table = Toy(ToyOptions()).table(data)
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells[:2] == ["a", "1/4"] and cells[4] == "0.50 [0.12, 0.88]"
    assert cells[5:7] == ["8", "1"]


def test_all_methods_are_compared_at_equal_bytes() -> None:
    """No bounded method of `--methods all` stores less than two thirds of what snapkv does at the same budget."""
    prefilled = shared_prefill(zoo.build("llama"), zoo.tokens(1, 400))
    held = {
        method: prefilled.cache(f"{method}:budget=120").device_bytes
        for method, _ in budgets.contenders("all", "1/8")
        if METHODS[method.partition(":")[0]].family in ("evict", "summarise") and method != "rehearse"
    }
    assert held.keys() >= {"snapkv", "uniform", "subgen"}
    assert min(held.values()) > 0.66 * held["snapkv"], held


MISTAKES = {
    "lengths": (["needle", "--lengths", "0"], "--lengths 0 is not possible; use a whole number of 1 or more"),
    "depths": (["needle", "--depths", "0,5"], "--depths 5 is not possible; use a number from 0 to 1"),
    "repeats": (["needle", "--repeats", "0"], "--repeats 0 is not possible"),
    "lines": (["lines", "--lines", "0,200"], "--lines 0 is not possible"),
    "batch": (["lines", "--batch", "-3"], "--batch -3 is not possible"),
    "budgets": (["lines", "--budgets", "lots"], "25%"),
    "two budgets": (["lines", "--bytes", "1/8", "--budgets", "1/4"], "--bytes 1/8 and --budgets 1/4 both set"),
    "bytes": (["lines", "--bytes", "1/8,5"], "--bytes 5 is no share of the full cache's bytes; use such as 1/4,1/8"),
    "methods": (["lines", "--methods", "snapvk"], "did you mean 'snapkv'"),
    "texts": (["perplexity", "--texts", "1790-Washing-1"], "from 1790-Washington-1 to"),
    "model": (["needle", "--model", "smollm3"], "smollm2-135m"),
    "layers": (["recall", "--layers", "70"], "not among the full-attention layers"),
    "seeds": (["needle", "--seeds", "one"], "0-9"),
    "dtype": (["needle", "--dtype", "int3"], "one of float32, bfloat16, float16"),
    "short": (
        ["needle", "--lengths", "30", "--methods", "full"],
        "--lengths 30 with --needles 1: 30 tokens cannot hold",
    ),
    "name": (["speed"], "choose one of: attention-error, lines"),
}


@pytest.mark.real_model
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_written(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, told = MISTAKES[mistake]
    done = CliRunner().invoke(app, ["eval", *arguments])
    assert (done.exit_code, done.stdout, list(tmp_path.iterdir())) == (2, "", [])
    assert told in done.stderr.splitlines()[-1]
