"""What every benchmark shares: its options, the check that comes before any number, records, resuming, progress, table.

    @dataclass
    class Decode(Benchmark):
        name, kind, columns = "decode", "decode", "batch:d | method | ms=step_ms:.2f"
        batches: tuple[int, ...] = option("1,8", "batch sizes, separated by commas", least=1)
        def wrong(self): ...              # what is wrong with our results, one line each
        def cells(self): ...              # the inputs: fields that their rows share, such as {"batch": 8}
        def measure(self, batch): ...     # yields a row for each contender

A row is the data of one record. The rows of a cell are written together when they are measured. So a stopped run
continues when the same command is given at the same commit; `--again` measures everything again.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from typer.core import TyperCommand

from kvsketch import ops
from kvsketch_lab import columns, records
from kvsketch_lab.benchmark.device import Device
from kvsketch_lab.options import Options, option
from kvsketch_lab.options import command as make_command

Fields = dict[str, Any]
FAILED, OUT_OF_MEMORY = records.FAILED, "out of memory"
OutOfMemory = torch.OutOfMemoryError
WIDTH_IN_FILES = 160


class Measured(ABC):
    """What is measured: inputs, a row for each contender, and the check that comes first."""

    def wrong(self) -> Iterable[str]:
        """What is wrong with our results, one line each; nothing is measured then."""
        return ()

    @abstractmethod
    def cells(self) -> Iterable[Fields]:
        """The inputs, each as the fields that all its rows share."""

    @abstractmethod
    def measure(self, *_: Any, **cell: Any) -> Iterator[Fields]:
        """The rows of a cell, one for each contender."""


@dataclass
class Benchmark(Options, Measured):
    """Base of all benchmarks; a benchmark is a dataclass of its options."""

    name: ClassVar[str]
    kind: ClassVar[str]  # of its records
    title: ClassVar[str] = ""
    columns: ClassVar[str]  # of its table, as `kvsketch_lab.columns` reads them
    operation: ClassVar[str] = ""  # whose kernel is measured; without it there is nothing to measure on a GPU

    seed: int = option(0, "chooses the random inputs")
    device: str = option("cuda", "cuda; cpu to try the benchmark with small shapes")
    out: str = option("", "file that the records are added to; build/bench/NAME.jsonl unless given")
    again: bool = option(False, "measure again what this command has measured at this commit")

    @property
    def on(self) -> Device:
        return Device(self.device)

    def check_options(self) -> None:
        """Raises ValueError for options that do not fit each other; called before anything runs."""

    @property
    def least_rows(self) -> int:
        """Of a cell: with fewer it was broken off, and is measured again."""
        return 1

    def headline(self, rows: list[Fields]) -> str:
        return self.title

    def shown(self, row: Fields, rows: list[Fields]) -> Fields:
        """Fields that the table shows beside those of a record, which may compare it with the others."""
        return {}


def command(benchmark: type[Benchmark]) -> TyperCommand:
    """The command of a benchmark; its module's docstring is the help."""
    return make_command(benchmark.name, benchmark, run, sys.modules[benchmark.__module__].__doc__ or "")


@torch.no_grad()
def run(benchmark: Benchmark) -> int:
    """Checks, measures what has no record yet, and prints the table. 1: results are wrong, or a measurement failed."""
    _require_device(benchmark)
    benchmark.check_options()
    path = Path(benchmark.out or f"build/bench/{benchmark.name}.jsonl")
    if path.is_dir():
        raise ValueError(
            f"--out {path} is a folder; name the file of the records, such as {path / benchmark.name}.jsonl"
        )
    cells = list(benchmark.cells())
    if wrong := list(benchmark.wrong()):
        print("\n".join(["Nothing is reported: our results differ from the reference.", *wrong]), file=sys.stderr)
        return 1
    rows, skipped = _measured(benchmark, path, cells)
    Console(width=None if sys.stdout.isatty() else WIDTH_IN_FILES).print(table(benchmark, rows))
    failed = [row[FAILED] for row in rows if row.get(FAILED)]
    said = [f"{len(rows)} records in {path}"]
    said += [f"{len(failed)} of them failed"] if failed else []
    said += [f"{skipped} of {len(cells)} cells were measured before; --again repeats them"] if skipped else []
    print(", ".join(said))
    return 1 if any(reason != OUT_OF_MEMORY for reason in failed) or (failed and len(failed) == len(rows)) else 0


def _measured(benchmark: Benchmark, path: Path, cells: list[Fields]) -> tuple[list[Fields], int]:
    """The rows of all cells, and how many cells this command has measured before."""
    known, rows, skipped = [] if benchmark.again else _recorded(benchmark, path), [], 0
    for cell in tqdm(cells, unit="cell", desc=benchmark.name, mininterval=0.2 if sys.stderr.isatty() else 30.0):
        result = [row for row in known if cell.items() <= row.items()]
        if len(result) >= benchmark.least_rows:
            skipped += 1
        else:
            result = []
            for row in _rows(benchmark, cell):
                # At once: what breaks off later rows leaves those before them.
                records.append(path, records.make_record(benchmark.kind, row, benchmark.seed))
                result.append(row)
        rows += result
    return rows, skipped


def _rows(benchmark: Benchmark, cell: Fields) -> Iterator[Fields]:
    try:
        yield from benchmark.measure(**cell)
    except OutOfMemory:
        yield {**cell, FAILED: OUT_OF_MEMORY}


def _require_device(benchmark: Benchmark) -> None:
    device = benchmark.device
    if device.split(":")[0] not in ("cuda", "cpu"):
        raise ValueError(f"--device {device} is not possible; use cuda or cpu")
    if benchmark.on.is_gpu and not torch.cuda.is_available():
        raise ValueError(
            f"the {benchmark.name} benchmark needs an NVIDIA GPU, and torch sees none here; "
            "--device cpu tries it with small shapes"
        )
    if (
        benchmark.on.is_gpu
        and benchmark.operation
        and ops.kernel_for(benchmark.operation, torch.device(device)) is None
    ):
        raise ValueError("the kernels are turned off; unset KVSKETCH_KERNELS and install triton")


def _recorded(benchmark: Benchmark, path: Path) -> list[Fields]:
    """The rows that the same command has written at the same commit, on such a machine."""
    commit = records.commit()
    if commit is None or commit["dirty"]:
        return []
    own = (benchmark.kind, records.command().replace(" --again", ""), commit, records.machine())
    names = ("kind", "command", "commit", "machine")
    return [r["data"] for r in records.read(path) if tuple(r.get(name) for name in names) == own]


def table(benchmark: Benchmark, rows: list[Fields]) -> Table:
    """A line for each row: the fields that the columns name; what a row does not have stays empty."""
    result = Table(title=benchmark.headline(rows) if rows else benchmark.title)
    shown = columns.parse(benchmark.columns + (" | failed" if any(row.get(FAILED) for row in rows) else ""))
    for column in shown:
        result.add_column(column.heading, justify="right" if column.form else "left", overflow="fold")
    for row in rows:
        seen = row if row.get(FAILED) else row | benchmark.shown(row, rows)
        result.add_row(*(column.of(seen) for column in shown))
    return result


# what checks and contenders are made of


def by_reference(call: Callable[[], Any]) -> Any:
    """The result of a call without kernels: with the references of the operations, in plain torch."""
    before = os.environ.get("KVSKETCH_KERNELS")
    os.environ["KVSKETCH_KERNELS"] = "reference"
    try:
        return call()
    finally:
        os.environ.pop("KVSKETCH_KERNELS")
        if before is not None:
            os.environ["KVSKETCH_KERNELS"] = before


def relative_error(out: Any, exact: Any) -> float:
    """|out - exact| / |exact|; NaN when a number is."""
    return float((out.float() - exact.float()).norm() / exact.float().norm())


def too_far(what: str, error: float, tolerance: float) -> list[str]:
    """A line of `Benchmark.wrong` if an error is too large or not a number."""
    return [] if error < tolerance else [f"{what}: relative error {error:.2e}"]


def differs(what: str, call: Callable[[], Any], tolerance: float) -> list[str]:
    """A line of `Benchmark.wrong` if the result of a call is too far from that of the references."""
    return too_far(what, relative_error(call(), by_reference(call)), tolerance)


def target_text(row: Fields) -> str | None:
    """`10% met`, for a row that is judged by a share."""
    if row.get("target") is None:
        return None
    return f"{row['target']:.0%} {'met' if row['within_target'] else 'MISSED'}"
