"""One runner for all benchmarks: it checks before it reports, writes every cell once, and names mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvsketch.cli import app
from kvsketch.serve.requests import Request
from kvsketch_lab import records
from kvsketch_lab.benchmark import runner, serve
from kvsketch_lab.benchmark.operations import OPERATIONS, layers
from kvsketch_lab.benchmark.runner import Benchmark, Fields
from kvsketch_lab.commands import BENCHMARKS
from kvsketch_lab.options import option
from tests.helpers.tiny import save_tiny_model

SMALL = {
    **{
        f"operations --only {name}": "--batches 1 --slots 128 --tokens 256 --chunks 9 --queries 9 --budgets 128 "
        "--keys normal --repeats 1 --prefill-ms 100"
        for name in OPERATIONS
    },
    "prefill": "--model tiny --methods streamingllm:budget=16 --length 32 --repeats 1",
    "rehearse": "--model tiny --methods rehearse:bits=16 --length 80 --repeats 1",
    "decode": "--shape tiny --methods streamingllm:budget=16 --prompt 32 --batches 1,2 --steps 2 --check-tokens 2",
    "step-profile": "--shape tiny --layers 1 --prompt 32 --methods streamingllm:budget=16 --batches 1",
    "offload": "--shape tiny --layers 3 --prompt 64 --methods quest:budget=32 --locality 0 --steps 15 --check-tokens 2",
    "serve": "--shape tiny --layers 1 --methods streamingllm:budget=16 --prompt 40 --rows 2 --steps 2 --chunk 20",
    "stream": "--model tiny --methods streamingllm:budget=16 --tokens 20,40 --chunk 10 --steps 1",
}


def bench(*args: str) -> Any:
    return CliRunner().invoke(app, ["bench", *args])


@pytest.mark.parametrize("name", list(SMALL))
def test_every_benchmark_runs_on_a_cpu_with_small_shapes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "WORDS", 256)
    out = tmp_path / "records.jsonl"
    done = bench(*name.split(), "--device", "cpu", "--out", str(out), *SMALL[name].split())
    assert done.exit_code == 0, done.output
    result = list(records.read(out))
    assert result and not any(record["data"].get("failed") for record in result)


def test_requests_share_one_document(tmp_path: Path) -> None:
    """A row holds its tail, and the document is counted by itself."""
    out = tmp_path / "records.jsonl"
    options = "--shape tiny --layers 1 --prompt 300 --rows 3 --steps 2 --chunk 64 --tail 8 --device cpu"
    done = bench("serve", "--out", str(out), "--methods", "rehearse:budget=50%", *options.split())
    assert done.exit_code == 0, done.output
    (result,) = [record["data"] for record in records.read(out)]
    assert not result.get("failed") and (result["rows"], result["tail"]) == (3, 8)
    assert 0 < result["document_bytes"] < result["device_bytes"] and result["tokens_per_s"] > 0
    done = bench("serve", "--methods", "snapkv:budget=32", *options.split())
    assert done.exit_code != 0 and "rows of snapkv:budget=32 copy their documents" in done.output


def test_chats_go_on_in_their_caches(tmp_path: Path) -> None:
    out = tmp_path / "records.jsonl"
    options = "--shape tiny --layers 1 --prompt 90 --rows 2 --turns 2 --new 70 --answer 4 --chunk 64 --device cpu"
    done = bench("serve", "--out", str(out), "--methods", "rehearse:budget=50%", *options.split())
    assert done.exit_code == 0, done.output
    kept, anew, whole = [record["data"] for record in records.read(out)]
    assert [row["chats"] for row in (kept, anew, whole)] == ["kept", "turn by turn", "one prompt"]
    assert kept["same"] and anew["same"] and len(kept["turns_s"]) == 3
    assert (kept["read_tokens"], anew["read_tokens"]) == (2 * (90 + 2 * 78), 2 * (90 + 164 + 238))
    done = bench("serve", "--methods", "rehearse", "--turns", "2", "--tail", "3", "--device", "cpu")
    assert done.exit_code != 0 and "chats share no document" in done.output


def test_a_method_that_cannot_be_served_says_so_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def served(_: Any, method: Any) -> Fields:
        ticket = serve.Ticket(Request((1,), 1))
        ticket.finish(*(("error", MemoryError("no room")) if method.name == "h2o" else ("length",)))
        serve.wait_for("an answer", lambda: ticket.finish_reason == "length", [ticket])
        return {"tokens_per_s": 1.0}

    monkeypatch.setattr(serve, "check_tokens", lambda *_: None)
    monkeypatch.setattr(serve.Serve, "_serve", served)
    out = tmp_path / "records.jsonl"
    options = f"--shape tiny --layers 1 --methods h2o:budget=16,snapkv:budget=16 --device cpu --out {out}"
    assert bench("serve", *options.split()).exit_code == 1
    rows = [record["data"] for record in records.read(out)]
    assert [row["failed"] for row in rows] == ["MemoryError: no room", None]


def test_a_stored_document_gives_the_first_token_of_one_read_again(tmp_path: Path) -> None:
    model, text, out = save_tiny_model(tmp_path / "tiny"), tmp_path / "text.txt", tmp_path / "records.jsonl"
    text.write_text("The harbour was rebuilt in 1921. " * 9)
    options = f"--model {model} --text {text} --tokens 200 --methods h2o:budget=64 --repeats 1 --device cpu --out {out}"
    assert (done := bench("document", *options.split())).exit_code == 0, done.output
    rows = [record["data"] for record in records.read(out)]
    assert [row["cache"] for row in rows] == ["read again", "from its file", "held ready"]
    assert not any(row.get("failed") for row in rows) and rows[0]["cache_bytes"] < rows[0]["file_bytes"]


def test_a_cpu_takes_turns_with_the_full_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvsketch_lab.benchmark import cpu

    model, text, out = save_tiny_model(tmp_path / "tiny"), tmp_path / "text.txt", tmp_path / "records.jsonl"
    text.write_text("The harbour was rebuilt in 1921. " * 9)
    options = f"--model {model} --text {text} --tokens 100 --methods full:bits=4 --repeats 2 --steps 3 --out {out}"
    assert (done := bench("cpu", *options.split())).exit_code == 0, done.output
    (row,) = [record["data"] for record in records.read(out)]
    assert len(row["times"]) == 2 and row["read_ratio"] > 0 and row["step_ratio"] > 0
    assert row["step_ms"] == pytest.approx(1e3 * sum(own[1] for _, own in row["times"]) / 2)
    told = iter([torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([[3.0, 1.0, 1.5]])])
    monkeypatch.setattr(cpu.Cpu, "_logits", lambda self, tokens, cache: next(told))
    assert bench("cpu", *options.split(), "--again").exit_code == 1
    assert "differ from those of the references" in [record["data"] for record in records.read(out)][-1]["failed"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks the answer without a GPU")
@pytest.mark.parametrize("name", sorted(BENCHMARKS.keys() - {"hit-rate", "document", "cpu", "fit"}))
def test_without_a_gpu_every_benchmark_says_what_it_needs(name: str, tmp_path: Path) -> None:
    done = bench(name, "--out", str(tmp_path / "records.jsonl"))
    assert (done.exit_code, done.stdout, list(tmp_path.iterdir())) == (2, "", [])
    assert len(done.stderr.splitlines()) == 1 and f"the {name} benchmark needs an NVIDIA GPU" in done.stderr


MISTAKES = {
    "batches": (["decode", "--batches", "1,a"], "--batches a is not possible; use a whole number of 1 or more"),
    "repeats": (["operations", "--repeats", "0"], "--repeats 0 is not possible"),
    "keys": (["operations", "--keys", "square"], "use one of normal, clustered, rotated"),
    "device": (["operations", "--device", "abacus"], "use cuda or cpu"),
    "methods": (["prefill", "--methods", "snapvk", "--device", "cpu"], "did you mean 'snapkv'"),
    "prefill": (
        ["operations", "--device", "cpu", "--only", "linear,mass"],
        "where no prefill is measured, for mass; use",
    ),
    "budgets": (
        ["operations", "--budgets", "512", "--tokens", "256", "--device", "cpu", "--only", "pages"],
        "--budgets 512 is more",
    ),
    "only": (["operations", "--only", "kernels"], "--only kernels is not possible; use one of attention, linear"),
    "name": (["speed"], "choose one of: decode, step-profile"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_written(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args, told = MISTAKES[mistake]
    monkeypatch.chdir(tmp_path)
    done = bench(*args)
    assert (done.exit_code, done.stdout, list(tmp_path.iterdir())) == (2, "", [])
    assert len(done.stderr.splitlines()) == 1 and told in done.stderr


def test_help_lists_the_benchmarks_and_their_options() -> None:
    assert all(name in bench("--help").stdout for name in BENCHMARKS)
    shown = " ".join(bench("decode", "--help").stdout.split())
    assert "--batches" in shown and "default: 1,8" in shown and "captured and eager" in shown


@dataclass
class Toy(Benchmark):
    name, kind, columns = "toy", "toy", "size:d | kilo=time/1e3:.1f"
    sizes: tuple[int, ...] = option("1,2,3", "sizes", least=1)
    bad: int = option(0, "a size that fails")
    broken: bool = option(False, "the check fails")

    def wrong(self) -> list[str]:
        return ["all of it"] if self.broken else []

    def cells(self) -> Iterator[Fields]:
        return ({"size": size} for size in self.sizes)

    def measure(self, size: int) -> Iterator[Fields]:
        if size == 9:
            raise torch.OutOfMemoryError("no")
        for contender in ("ours", "torch"):
            failed = {"failed": "unlucky"} if size == self.bad else {"time": 1000.0 * size}
            yield {"size": size, "contender": contender, **failed}


def run(out: Path, code: int = 0, **options: Any) -> list[Fields]:
    assert runner.run(Toy(device="cpu", out=str(out), **options)) == code
    return [record["data"] for record in records.read(out)]


def test_nothing_is_reported_when_the_check_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "toy.jsonl", code=1, broken=True) == [] and not list(tmp_path.iterdir())
    assert capsys.readouterr().err.endswith("our results differ from the reference.\nall of it\n")


def test_failures_are_counted_and_running_out_of_memory_is_a_result(tmp_path: Path, capsys: Any) -> None:
    assert len(run(tmp_path / "a", code=1, bad=2)) == 6
    assert "6 records" in (shown := capsys.readouterr().out) and "2 of them failed" in shown and "unlucky" in shown
    assert run(tmp_path / "b", sizes="1,9")[-1] == {"size": 9, "failed": "out of memory"}
    assert run(tmp_path / "c", code=1, sizes="9") == [{"size": 9, "failed": "out of memory"}]


def test_the_same_command_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out, commit = tmp_path / "toy.jsonl", {"hash": "a", "dirty": False}
    monkeypatch.setattr("kvsketch_lab.records.commit", lambda: commit)
    monkeypatch.setattr("kvsketch_lab.records.stamp.commit", lambda: commit)
    assert len(run(out, sizes="1,2")) == 4 and len(run(out)) == 6
    shown = capsys.readouterr().out
    assert "2 of 3 cells were measured before" in shown and shown.count("3.0") == 2
    assert len(run(out, again=True)) == 12
    commit["dirty"] = True
    assert len(run(out)) == 18, "changed code is measured again"


def test_checks_see_what_is_no_number() -> None:
    exact = torch.ones(3)
    assert runner.relative_error(exact, exact) == 0
    assert runner.too_far("it", runner.relative_error(exact / 0, exact), 0.1) == ["it: relative error inf"]
    assert runner.too_far("it", float("nan"), 0.1) == ["it: relative error nan"]
