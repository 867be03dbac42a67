"""What every experiment shares: its cells, the file of records, resuming, progress and the summary.

An experiment lists its cells; a cell is one measurement and becomes one record. What the file holds already is not
measured again, so a run that was killed goes on where it stopped. A cell that fails is recorded as failed with its
reason and stays so until `--retry-failed`. `--again` measures anew what another commit measured.

    class Lines(Experiment):
        name = "lines"
        def cells(self): ...            # cheap: no model
        def measure(self, cells): ...   # after open(): yields (cell, outcome)

The cells of one group are measured together, on one machine: a process needs only `Experiment(options)`, `open()` and
`measure(group)`, and the options are plain values.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from kvsketch import models, records
from kvsketch.evaluation import budgets, result_table
from kvsketch.evaluation.identity import model_sha256
from kvsketch.records import FAILED

DEVICE_LOST = "CUDA error"  # after one, nothing else runs on the device in this process
WIDTH_IN_FILES = 160
Record = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One measurement, and one record."""

    method: str  # text form without budget, such as "snapkv" or "clusterkv:completion=false"
    budget: str  # "1/8", "25%", "1024"; "" for methods without one
    sample: str  # what is asked, such as "lines=400 question=7"
    seed: int
    setting: tuple[tuple[str, Any], ...] = ()  # what else identifies the measurement: model, dtype, tokens, depth

    @property
    def data(self) -> dict[str, Any]:
        """What a record of this cell says of it, beside its outcome; the seed stands in the record itself."""
        return {"method": self.method, "budget": self.budget, "sample": self.sample, **dict(self.setting)}

    @property
    def key(self) -> str:
        return _key(self.data, self.seed)

    @property
    def cache_seed(self) -> int:
        """The seed of this cell's cache: each sample has its own, so that methods that draw tokens draw others in each.

        One seed for all samples would make all of them keep the same positions, and intervals over samples would not
        hold the error of that one draw.
        """
        return cache_seed(self.seed, self.sample)


def _key(data: dict[str, Any], seed: int | None) -> str:
    return json.dumps([seed, data], sort_keys=True)


def cache_seed(seed: int, sample: str) -> int:
    """31 bits of a hash of the base seed and the sample."""
    return int.from_bytes(hashlib.sha256(f"{seed} {sample}".encode()).digest()[:4]) >> 1


class Experiment(ABC):
    """Base of all experiments. The constructor and `cells` are cheap; `open` loads the model."""

    name: ClassVar[str]
    metric: ClassVar[str] = "score"  # the number of an outcome that the summary shows
    default_model: ClassVar[str] = "smollm2-135m"
    default_methods: ClassVar[str] = "all"
    default_budgets: ClassVar[str] = "1/16,1/8,1/4,1/2"
    default_seeds: ClassVar[str] = "0"

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.model: Any = None
        self.tokenizer: Any = None

    @classmethod
    def kind(cls) -> str:
        """The kind of the records, and the name of their file."""
        return cls.name.replace("-", "_")

    @classmethod  # noqa: B027
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Adds what the experiment needs beyond the common options."""

    @abstractmethod
    def cells(self) -> list[Cell]:
        """All measurements, in a fixed order; loads no model."""

    @abstractmethod
    def measure(self, cells: list[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
        """The outcome of each cell of a group, or of a part of it; `failure(error)` where one cell fails alone."""

    def open(self) -> None:
        """Loads the model; called only when a cell is missing."""
        options = self.options
        self.model, self.tokenizer = models.load(options.model, dtype=options.dtype, device=options.device)

    def groups(self) -> Iterable[list[Cell]]:
        """Cells that are measured together, such as a batch of questions or a shared prefill."""
        return ([cell] for cell in self.cells())

    def table(self, data: list[dict[str, Any]]) -> Table:
        """A summary: a row for each method and budget, the mean of `metric` with its 95% interval."""
        return result_table.table(self.name, data, self.metric)

    def show(self, data: list[dict[str, Any]]) -> None:
        """Called at the end with the data of all records of the run, failed ones included: prints the summary."""
        console = Console()
        Console(width=None if console.is_terminal else WIDTH_IN_FILES).print(self.table(data))

    def origin(self) -> dict[str, Any]:
        """What each record says of the model; asked before anything is measured."""
        return {"model_sha256": model_sha256(self.options.model)}

    # what the common options mean

    @property
    def contenders(self) -> list[tuple[str, str]]:
        """(method, budget) of every method that is compared."""
        return budgets.contenders(self.options.methods, self.options.budgets)

    @property
    def seeds(self) -> list[int]:
        return parse_seeds(self.options.seeds)

    @property
    def setting(self) -> tuple[tuple[str, Any], ...]:
        """What identifies every measurement with a model: its name and weights, its dtype, the unit of the budgets.

        The name of a built-in model pins its weights; any other is identified by the hash of its files.
        """
        spec = self.options.model
        path = Path(spec).expanduser()
        weights = () if spec in models.CATALOG else (("weights", model_sha256(spec)[:16]),)
        name = path.name if path.exists() else spec
        return (("model", name), *weights, ("dtype", self.dtype), ("budgets_in", self.options.budgets_in))

    @property
    def dtype(self) -> str:
        """The dtype `open` loads the model in, by name."""
        on_gpu = torch.cuda.is_available() if self.options.device is None else "cuda" in str(self.options.device)
        return str(self.options.dtype or ("bfloat16" if on_gpu else "float32"))


def failure(error: BaseException) -> dict[str, Any]:
    """The outcome of a cell that failed."""
    return {FAILED: f"{type(error).__name__}: {' '.join(str(error).split())}"}


def parse_seeds(text: str) -> list[int]:
    """`0,1,2` or `0-9`, or both."""
    found: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.strip().partition("-")
            found += range(int(first), int(last) + 1) if dash else [int(first)]
    except ValueError:
        raise ValueError(f"--seeds {text!r} is not a list of seeds; use whole numbers such as 0,1,2 or 0-9") from None
    if not found:
        raise ValueError(f"--seeds {text!r} names no seed; use whole numbers such as 0,1,2 or 0-9")
    return list(dict.fromkeys(found))


# the runner


def parser(experiment: type[Experiment]) -> argparse.ArgumentParser:
    """The command line of an experiment."""
    module = sys.modules[experiment.__module__]
    found = argparse.ArgumentParser(
        prog=f"kvsketch eval {experiment.name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = found.add_argument
    add("--model", default=experiment.default_model, help="short name, folder, .gguf file or hub name")
    add("--methods", default=experiment.default_methods, help="text forms by commas; all: every method")
    add("--budgets", default=experiment.default_budgets, help="tokens or shares of the prompt, by commas")
    add("--budgets-in", choices=budgets.UNITS, default="tokens", help="what is equal across methods")
    add("--seeds", default=experiment.default_seeds, help="such as 0,1,2 or 0-9")
    add("--out", default="results", help="folder of the records, one file for each experiment")
    add("--device", default=None, help="cpu or cuda; a GPU where there is one")
    add("--dtype", default=None, help="float32, bfloat16 or float16; bfloat16 on a GPU")
    add("--retry-failed", action="store_true", help="measure again what failed before")
    add("--again", action="store_true", help="measure again what another commit measured; replaces it in reports")
    add("--limit", type=int, default=None, help="only the first so many samples of each setting, for a quick look")
    add("--ray", nargs="?", const="", metavar="ADDRESS", help="spread the work over a Ray cluster; no address: here")
    add("--ray-workers", type=int, metavar="N", help="processes that measure; one for each GPU, else for each machine")
    experiment.add_arguments(found)
    return found


def records_path(experiment: Experiment) -> Path:
    """The file of records: the name of the experiment in the folder `--out`."""
    folder = Path(experiment.options.out)
    if folder.suffix == ".jsonl" or folder.is_file():
        raise ValueError(f"--out {folder} is a file; name the folder of the records, such as {folder.parent}")
    return folder / f"{experiment.kind()}.jsonl"


def wanted_cells(experiment: Experiment) -> dict[str, Cell]:
    """The cells of this run by key: those of the first `--limit` samples of each setting."""
    samples: dict[tuple[tuple[str, Any], ...], set[str]] = {}
    found: dict[str, Cell] = {}
    limit = experiment.options.limit
    if limit is not None and limit < 1:
        raise ValueError(f"--limit {limit} leaves nothing to measure; use 1 or more")
    for cell in experiment.cells():
        known = samples.setdefault(cell.setting, set())
        if limit is None or cell.sample in known or len(known) < limit:
            known.add(cell.sample)
            found[cell.key] = cell
    return found


def recorded(experiment: Experiment, wanted: dict[str, Cell]) -> dict[str, Record]:
    """The records of the wanted cells, by key; the last record of a cell counts."""
    names = {tuple(cell.data) for cell in wanted.values()}
    found: dict[str, Record] = {}
    for record in records.read(records_path(experiment)):
        data, seed = record["data"], record["seed"]
        if experiment.metric not in data and FAILED not in data:
            continue  # without an outcome the cell is still to be measured
        for fields in names:
            if all(name in data for name in fields):
                key = _key({name: data[name] for name in fields}, seed)
                if key in wanted:
                    found[key] = record
    return found


def pending(experiment: Experiment, wanted: dict[str, Cell]) -> list[list[Cell]]:
    """The groups of cells that have no record; with `--retry-failed` or `--again` those that failed, or that another
    commit measured, as well.
    """
    done = {key for key, record in recorded(experiment, wanted).items() if _counts(record, experiment.options)}
    groups = ([cell for cell in group if cell.key in wanted.keys() - done] for group in experiment.groups())
    return [group for group in groups if group]


def _counts(record: Record, options: argparse.Namespace) -> bool:
    if options.again and record.get("commit") != records.commit():
        return False
    return not (options.retry_failed and FAILED in record["data"])


def measure_group(experiment: Experiment, cells: list[Cell]) -> Iterator[tuple[Cell, Record]]:
    """The record of each cell; an error that stops the group is the outcome of all cells that it leaves unmeasured."""
    left = {cell.key: cell for cell in cells}
    reason: dict[str, Any] = {FAILED: "RuntimeError: the experiment gave no outcome"}
    try:
        for cell, outcome in experiment.measure(cells):
            left.pop(cell.key)
            yield cell, make_record(experiment, cell, _writable(outcome))
    except Exception as error:
        reason = failure(error)
    for cell in left.values():
        yield cell, make_record(experiment, cell, reason)


def make_record(experiment: Experiment, cell: Cell, outcome: dict[str, Any]) -> Record:
    """The record of a cell, which says itself which of its fields tell measurements apart."""
    data = {**cell.data, **outcome, **experiment.origin()}
    return records.make_record(experiment.kind(), data, cell.seed, tuple(cell.data), experiment.options.again)


def common_fields(experiment: Experiment) -> tuple[str, ...]:
    """The fields that all records of a run have in common, which their file holds once."""
    return (*dict(experiment.setting), *experiment.origin())


def _writable(outcome: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(outcome, allow_nan=False)
    except (ValueError, TypeError) as error:
        return failure(error)
    return outcome


def run(experiment: Experiment, groups: list[list[Cell]]) -> None:
    """Measures the groups one after another, with the time left, and writes their records."""
    path, common = records_path(experiment), common_fields(experiment)
    with records.Writer(path, common) as writer, _bar(experiment, groups) as bar:
        for group in groups:
            lost = None
            for cell, record in measure_group(experiment, group):
                if lost not in (None, (cell.method, cell.budget)):
                    break
                if reason := record["data"].get(FAILED):
                    tqdm.write(f"failed: {cell.method} {cell.budget} {cell.sample}: {reason}", file=sys.stderr)
                    lost = (cell.method, cell.budget) if DEVICE_LOST in reason else lost
                writer.add(record)
                bar.update()
            if lost is not None:
                raise RuntimeError(f"{lost[0]} {lost[1]} left the GPU unusable; give the same command again to go on")


def _bar(experiment: Experiment, groups: list[list[Cell]]) -> tqdm:
    # In a log, a line every half a minute.
    seconds = 0.2 if sys.stderr.isatty() else 30.0
    return tqdm(total=sum(map(len, groups)), unit="cell", mininterval=seconds, desc=experiment.name)


def main(experiment: type[Experiment], arguments: list[str] | None = None) -> int:
    """Runs an experiment: measures what the file of records lacks, and prints the summary of all.

    The exit code is 1 when a cell of the run has failed or has no record, and 0 otherwise.
    """
    asked = experiment(parser(experiment).parse_args(arguments))
    wanted = wanted_cells(asked)
    groups = pending(asked, wanted)
    if groups:
        # What cannot be named or written is said before hours of measurements, not after.
        asked.origin()
        records.append(records_path(asked))
    if groups and asked.options.ray is not None:
        from kvsketch.evaluation import distributed

        distributed.run(asked, groups)
    elif groups:
        asked.open()
        run(asked, groups)
    found = recorded(asked, wanted)
    asked.show([{**record["data"], "seed": record["seed"]} for record in found.values()])
    failed = sum(FAILED in record["data"] for record in found.values())
    missing = len(wanted) - len(found)
    said = [f"{len(found)} records in {records_path(asked)}"]
    said += [f"{failed} of them failed"] if failed else []
    said += [f"{missing} cells have none"] if missing else []
    print(", ".join(said))
    return 1 if failed or missing else 0
