"""A run on a Ray cluster of two nodes leaves the records of a run without it, whatever happens to its workers."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvsketch_lab import records
from kvsketch_lab.evaluation import distributed
from kvsketch_lab.evaluation.experiment import (
    FAILED,
    Cell,
    Experiment,
    ExperimentOptions,
    budgets_option,
    methods_option,
)
from kvsketch_lab.options import option
from tests.helpers.experiments import run_experiment


@dataclass
class FragileOptions(ExperimentOptions):
    methods: str = methods_option("full,snapkv")
    budgets: str = budgets_option("1/4,64")
    samples: int = option(6, "samples", least=1)
    deadly: str = option("", "samples that kill, and how often; open: the model cannot be opened")


class Fragile(Experiment):
    """Scores the number of a sample. Some samples kill the process that measures them, so many times."""

    name = "fragile"
    options: FragileOptions

    def open(self) -> None:
        if self.options.deadly == "open":
            raise ValueError("the model cannot be opened")
        self.model = self.options.model

    def origin(self) -> dict[str, Any]:
        return {"model_sha256": f"hash of {self.model}"}

    def cells(self) -> list[Cell]:
        return [
            Cell(method, budget, f"sample={sample}", seed, self.setting)
            for seed in self.seeds
            for sample in range(self.options.samples)
            for method, budget in self.contenders
        ]

    def alike(self, cell: Cell) -> Hashable:
        return cell.sample

    def measure(self, cells: list[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
        for cell in cells:
            number = int(cell.sample.removeprefix("sample="))
            if cell.method == "snapkv":
                self._die_of(number)
            yield cell, {"score": number / 7, "tokens_stored": number}

    def _die_of(self, number: int) -> None:
        deaths = dict(map(int, pair.split(":")) for pair in self.options.deadly.split(",") if pair)
        # Relative to the folder that the run was started in.
        counter = Path(f"died_of_{number}")
        if len(counter.read_text() if counter.exists() else "") < deaths.get(number, 0):
            with counter.open("a") as file:
                file.write("x")
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def _ray() -> Iterator[None]:
    """A cluster of two nodes on this machine."""
    ray = pytest.importorskip("ray", reason="not installed: make test-ray")
    from ray.cluster_utils import Cluster

    # Workers cannot import this file.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes.add_node(num_cpus=1)
    with distributed.cluster(ray, nodes.address):
        yield
    nodes.shutdown()


def run(out: Path, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    assert run_experiment(Fragile, ["--out", str(out), *arguments]) == code
    return list(records.read(out / "fragile.jsonl"))


def comparable(result: list[dict[str, Any]]) -> list[str]:
    """Records without their time and their line, in an order of their own."""
    return sorted(str({key: value for key, value in each.items() if key not in ("time", "place")}) for each in result)


@pytest.mark.usefixtures("_ray")
def test_same_records_as_a_serial_run_though_workers_die(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    complete = run(tmp_path / "serial")
    assert len(complete) == 18
    # Half of it is there: sample 0, 1 and a part of 2.
    records.append("fragile.jsonl", *complete[:8])
    kept = Path("fragile.jsonl").read_text()
    # One worker dies of sample 3; all workers that try die of sample 5.
    deadly = ("--deadly", "3:1,5:2")
    result = run(Path(), "--ray", "--ray-workers", "2", *deadly, code=1)
    assert Path("died_of_3").read_text() == "x" and Path("died_of_5").read_text() == "xx"
    assert Path("fragile.jsonl").read_text().startswith(kept) and len(result) == len(complete)
    failed = [record for record in result if FAILED in record["data"]]
    assert [record["data"]["sample"] for record in failed] == ["sample=5"] * 3
    assert all("2 workers died" in record["data"][FAILED] for record in failed)
    assert "failed: snapkv 1/4 sample=5: WorkerDied" in capsys.readouterr().err
    healthy = [record for record in complete if record["data"]["sample"] != "sample=5"]
    assert comparable([record for record in result if record not in failed]) == comparable(healthy)
    # A run without Ray goes on from there.
    again = run(Path(), "--retry-failed", *deadly)
    assert comparable(again[18:]) == comparable([r for r in complete if r not in healthy])


@pytest.mark.usefixtures("_ray")
def test_a_model_that_cannot_be_loaded_is_the_same_error(tmp_path: Path) -> None:
    for arguments in ([], ["--ray"]):
        with pytest.raises(ValueError, match="the model cannot be opened"):
            run(tmp_path, "--deadly", "open", *arguments)
    assert not list(records.read(tmp_path / "fragile.jsonl"))


def test_an_address_where_nobody_listens_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="not installed: make test-ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with (
        pytest.raises(ValueError, match=r"--ray localhost:1: no Ray cluster answers .*leave the address out"),
        distributed.cluster(ray, "localhost:1"),
    ):
        pass


def test_without_ray_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"install kvsketch\[ray\], or leave --ray out"):
        run(tmp_path, "--ray")


@pytest.mark.parametrize(
    ("cluster", "device", "workers", "expected"),
    [
        ({"CPU": 1.0, "node:1": 1.0, "node:__internal_head__": 1.0}, None, None, (1, 0, 1)),
        ({"CPU": 64.0, "node:1": 1.0, "node:2": 1.0}, None, None, (2, 0, 1)),
        ({"CPU": 64.0, "GPU": 8.0, "node:1": 1.0}, None, None, (8, 1, 1)),
        ({"CPU": 64.0, "GPU": 8.0, "node:1": 1.0}, "cpu", None, (1, 0, 1)),
        ({"CPU": 64.0, "GPU": 2.0, "node:1": 1.0}, None, 3, (3, 0.5, 1)),
        ({"CPU": 2.0, "node:1": 1.0}, None, 3, (3, 0, 0)),
        ({"CPU": 64.0, "GPU": 100.0, "node:1": 1.0}, None, None, (10, 1, 1)),
    ],
)
def test_a_worker_for_each_gpu_else_for_each_machine(
    cluster: dict[str, float], device: str | None, workers: int | None, expected: tuple[Any, ...]
) -> None:
    options = ExperimentOptions(device=device, ray_workers=workers)
    assert distributed.share_of(cluster, options, groups=10)[:3] == expected


def test_no_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="--ray-workers 0"):
        ExperimentOptions(ray_workers=0)
