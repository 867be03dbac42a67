"""What every benchmark shares: its options, the check that comes before any number, records, resuming, progress, table.

    @dataclass
    class Decode(Benchmark):
        name, kind, columns = "decode", "decode", "batch:d | method | ms=step_ms:.2f"
        batches: tuple[int, ...] = option("1,8", "batch sizes, comma-separated", least=1)
        def wrong(self): ...              # what is wrong with our results, one line each
        def cells(self): ...              # the inputs: fields that their rows share, such as {"batch": 8}
        def measure(self, batch): ...     # yields a row for each contender

A row is the data of one record. The rows of a cell are written together when they are measured. So a stopped run
continues when the same command is given at the same commit; `--again` measures everything again.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from typer.core import TyperCommand

from kvsketch import ops
from kvsketch_lab import records
from kvsketch_lab.benchmark.device import Call, Device, Timing
from kvsketch_lab.options import Options, option
from kvsketch_lab.options import command as make_command

Fields = dict[str, Any]
FAILED, OUT_OF_MEMORY = records.FAILED, "out of memory"
OutOfMemory = torch.OutOfMemoryError
WIDTH_IN_FILES = 160
COLUMN = re.compile(r"(?P<heading>[^=:]+)(=(?P<field>\w+)(/(?P<divisor>1e\d))?)?(:(?P<form>.+))?")
# Errors of a launch that does not compile or asks for more than a multiprocessor has.
DOES_NOT_FIT = ("OutOfResources", "PassManagerError", "CompilationError")


class Trial(NamedTuple):
    """Launch sizes to be timed: fields of their records, and the calls for each of them."""

    setting: Fields
    launches: Iterable[Any]
    calls_of: Callable[[Any], Sequence[Call]]
    timing: dict[str, Any] = {}  # noqa: RUF012


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

    def trials(self) -> Generator[Trial, list[Any], None]:
        """Yields launch sizes to time, and receives those of a trial back, the fastest first."""
        yield from ()


@dataclass
class Benchmark(Options, Measured):
    """Base of all benchmarks; a benchmark is a dataclass of its options."""

    name: ClassVar[str]
    kind: ClassVar[str]  # of its records
    title: ClassVar[str] = ""
    columns: ClassVar[str]  # by |: heading=field/divisor:format, of which a field of the same name needs only itself
    operation: ClassVar[str] = ""  # whose kernel is measured; without it there is nothing to measure on a GPU
    tuning_kind: ClassVar[str] = ""  # of the records of `trials`

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
    def tunes(self) -> bool:
        """Whether launch sizes of the kernels are timed instead."""
        return bool(getattr(self, "tune", False))

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
    cells = [] if benchmark.tunes else list(benchmark.cells())
    if wrong := list(benchmark.wrong()):
        print("\n".join(["Nothing is reported: our results differ from the reference.", *wrong]), file=sys.stderr)
        return 1
    if benchmark.tunes:
        rows, skipped, columns = _tuned(benchmark, path), 0, "setting | launch | µs=median_us:,.2f"
    else:
        rows, skipped = _measured(benchmark, path, cells)
        columns = benchmark.columns
    Console(width=None if sys.stdout.isatty() else WIDTH_IN_FILES).print(table(benchmark, columns, rows))
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
        skipped += bool(result)
        if not result:
            try:
                result = list(benchmark.measure(**cell))
            except OutOfMemory:
                result = [{**cell, FAILED: OUT_OF_MEMORY}]
            records.append(path, *(records.make_record(benchmark.kind, row, benchmark.seed) for row in result))
        rows += result
    return rows, skipped


def _tuned(benchmark: Benchmark, path: Path) -> list[Fields]:
    """A row for each launch, those of a trial from the fastest on; one that does not compile or fit is left out."""
    trials = benchmark.trials()
    rows: list[Fields] = []
    answer: list[Any] | None = None
    while True:
        try:
            setting, launches, calls_of, timing = next(trials) if answer is None else trials.send(answer)
        except StopIteration:
            return rows
        result: dict[Any, Timing] = {}
        for launch in launches:
            try:
                result[launch] = benchmark.on.time(calls_of(launch), **timing)
            except Exception as error:
                if type(error).__name__ not in DOES_NOT_FIT:
                    raise
                print(f"{launch}: {type(error).__name__}", file=sys.stderr)
        answer = sorted(result, key=lambda launch: result[launch].median_us)
        these = [{**setting, "launch": str(launch), **dataclasses.asdict(result[launch])} for launch in answer]
        records.append(path, *(records.make_record(benchmark.tuning_kind, row, benchmark.seed) for row in these))
        rows += [row | {"setting": ", ".join(map(str, setting.values()))} for row in these]


def _require_device(benchmark: Benchmark) -> None:
    device = benchmark.device
    if device.split(":")[0] not in ("cuda", "cpu"):
        raise ValueError(f"--device {device} is not possible; use cuda or cpu")
    if benchmark.tunes and not benchmark.on.is_gpu:
        raise ValueError(f"launch sizes are timed on an NVIDIA GPU; leave --device {device} out")
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


def table(benchmark: Benchmark, columns: str, rows: list[Fields]) -> Table:
    """A line for each row: the fields that the columns name; what a row does not have stays empty."""
    result = Table(title=benchmark.headline(rows) if rows else benchmark.title)
    specs = [
        COLUMN.fullmatch(each.strip())
        for each in (columns + (" | failed" if any(map(_failed, rows)) else "")).split("|")
    ]
    for spec in specs:
        assert spec is not None, columns
        result.add_column(spec["heading"], justify="right" if spec["form"] else "left", overflow="fold")
    for row in rows:
        seen = row if row.get(FAILED) or benchmark.tunes else row | benchmark.shown(row, rows)
        result.add_row(*(_cell(seen.get(spec["field"] or spec["heading"]), spec) for spec in specs if spec))
    return result


def _failed(row: Fields) -> bool:
    return bool(row.get(FAILED))


def _cell(value: Any, spec: re.Match[str]) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return format(value / float(spec["divisor"]) if spec["divisor"] else value, spec["form"] or "")


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
