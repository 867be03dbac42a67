"""What an experiment is: its options, its cells, and how they become records. `runner.py` runs one.

    @dataclass
    class LinesOptions(ExperimentOptions):
        questions: int = option(50, "questions for each number of lines and seed", least=1)

    class Lines(Experiment):
        name = "lines"
        options: LinesOptions
        def cells(self): ...            # cheap: no model; raises ValueError for impossible options
        def outcome(self, cell): ...    # after open(): what a record says besides; or `measure` for several together

Class attributes say what its summary shows: `metric` with its interval, `rows`, `by` and `columns`.

The cells of one group are measured together, in one process, which needs only `Experiment(options)`, `open()` and
`measure(group)`; the options are plain values.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

import torch
from rich.console import Console
from rich.table import Table

from kvsketch import models
from kvsketch.compare import budgets
from kvsketch.compare.budgets import UNITS
from kvsketch.methods.budget import Size
from kvsketch.models.identity import model_sha256
from kvsketch_lab import columns, records
from kvsketch_lab.lists import evenly, grouped
from kvsketch_lab.options import Options, option
from kvsketch_lab.records import FAILED, Estimate, interval_text, mean, nested_mean, text_of

WIDTH_IN_FILES = 160
LAYER = ("layer",)
MOST_VALUES = 6  # of a number that have a column each
MOST_INTERVALS = 4  # columns whose values have room for their intervals
Record = dict[str, Any]
Data = dict[str, Any]


def text_sha256(text: str) -> str:
    """Identity of a text: the first 16 digits of its SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def end_tokens(model: Any) -> list[int]:
    """The tokens that end an answer."""
    ends = model.generation_config.eos_token_id
    return ends if isinstance(ends, list) else [ends]


def model_option(default: str) -> Any:
    return option(default, "short name, folder, .gguf file or hub name")


def methods_option(default: str) -> Any:
    return option(default, "methods, separated by commas; all: every method")


def budgets_option(default: str) -> Any:
    return option(default, "tokens or shares of the prompt, separated by commas")


@dataclass
class ExperimentOptions(Options):
    """Options of every experiment."""

    model: str = model_option("smollm2-135m")
    methods: str = methods_option("all")
    budgets: str = budgets_option("1/16,1/8,1/4,1/2")
    budgets_in: str = option("tokens", "what is equal across methods", choices=UNITS)
    bytes: str | None = option(
        None, "shares of the full cache's bytes, separated by commas: --budgets-in bytes --budgets"
    )
    seeds: str = option("0", "such as 0,1,2 or 0-9")
    out: str = option("build/eval", "folder of the records, one file for each experiment")
    device: str | None = option(None, "cpu or cuda; a GPU where there is one")
    dtype: str | None = option(None, "bfloat16 on a GPU unless given", choices=("float32", "bfloat16", "float16"))
    retry_failed: bool = option(False, "measure again what failed before")
    again: bool = option(False, "measure again what another commit measured; replaces it in reports")
    limit: int | None = option(None, "only the first N samples of each setting, for a quick look", least=1)
    ray: str | None = option(
        None, "distribute the work over the Ray cluster at ADDRESS; no address: this machine", alone="local"
    )
    ray_workers: int | None = option(None, "processes that measure; one for each GPU, else for each machine", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bytes is not None:
            default = next(field.default for field in dataclasses.fields(self) if field.name == "budgets")
            if self.budgets not in (default, self.bytes):
                raise ValueError(f"--bytes {self.bytes} and --budgets {self.budgets} both set the size; leave one out")
            for share in self.bytes.split(","):
                if Size.parse(share, "--bytes").share is None:
                    raise ValueError(f"--bytes {share} is no share of the full cache's bytes; use such as 1/4,1/8")
            self.budgets, self.budgets_in = self.bytes, "bytes"


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
        """The fields of a record that describe this cell; the seed is a field of the record itself."""
        return {"method": self.method, "budget": self.budget, "sample": self.sample, **dict(self.setting)}

    @property
    def key(self) -> str:
        return key_of(self.data, self.seed)

    def __getitem__(self, name: str) -> Any:
        """A field of the setting."""
        return dict(self.setting)[name]

    @property
    def parts(self) -> dict[str, str]:
        """The numbers that the sample names: text and question of `lines=400 text=2 question=7`."""
        return dict(word.split("=") for word in self.sample.split() if "=" in word)

    @property
    def text(self) -> str:
        """The sample without its question: cells that share it ask about one text."""
        return self.sample.rpartition(" question=")[0] or self.sample

    @property
    def cache_seed(self) -> int:
        """The seed of this cell's cache. Each sample has its own, so that random methods draw other tokens in each.

        With one seed for all samples, all would keep the same positions, and intervals over samples would not include
        the error of that one draw.
        """
        return cache_seed(self.seed, self.sample)


def key_of(data: dict[str, Any], seed: int | None) -> str:
    return json.dumps([seed, data], sort_keys=True)


def cache_seed(seed: int, sample: str) -> int:
    """31 bits of a hash of the base seed and the sample."""
    return int.from_bytes(hashlib.sha256(f"{seed} {sample}".encode()).digest()[:4]) >> 1


class Experiment(ABC):
    """Base of all experiments. The constructor and `cells` are cheap; `open` loads the model."""

    name: ClassVar[str]
    metric: ClassVar[str] = "score"  # the number of an outcome that the summary shows with its interval
    form: ClassVar[str] = ".2f"  # how it is written
    rows: ClassVar[tuple[str, ...]] = ("method", "budget")  # the fields of which the summary has a row for each value
    by: ClassVar[str] = ""  # the field of which it has a column for each value; empty: none
    nested: ClassVar[bool] = False  # whether the mean over all is that of the means of these values
    columns: str = "tokens stored=tokens_stored:,.0f | of full bytes=share:.1%"  # means of other fields
    options: ExperimentOptions

    def __init__(self, options: Any) -> None:
        self.options = options
        self.model: Any = None
        self.tokenizer: Any = None

    @classmethod
    def kind(cls) -> str:
        """The kind of the records, and the name of their file."""
        return cls.name.replace("-", "_")

    @classmethod
    def options_type(cls) -> type[ExperimentOptions]:
        result: type[ExperimentOptions] = get_type_hints(cls)["options"]
        return result

    @abstractmethod
    def cells(self) -> list[Cell]:
        """All measurements, in a fixed order; loads no model. Raises ValueError for impossible options."""

    def outcome(self, cell: Cell) -> dict[str, Any]:
        """What a cell measured."""
        raise NotImplementedError

    def measure(self, cells: list[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
        """Yields the outcome of each cell of a group; `failure(error)` for a cell that fails alone."""
        return apart(cells, self.outcome)

    def open(self) -> None:
        """Loads the model; called only when a cell is missing."""
        options = self.options
        self.model, self.tokenizer = models.load(options.model, dtype=options.dtype, device=options.device)

    def check(self) -> None:  # noqa: B027
        """Raises ValueError for options that do not fit the model or its tokenizer; called once it is open."""

    def alike(self, cell: Cell) -> Hashable:
        """Cells of which this is the same are measured together, such as those that share a prefill."""
        return cell.key

    def groups(self) -> Iterable[list[Cell]]:
        """Cells that are measured together."""
        return grouped(self.cells(), self.alike).values()

    def estimate(self, data: Sequence[dict[str, Any]]) -> Estimate:
        """What the data of records, none of which failed, say of `metric` together; its interval draws texts."""
        places = [each[self.by] if self.nested else "" for each in data]
        texts = [text_of(each, each["seed"]) for each in data]
        return nested_mean([each[self.metric] for each in data], texts, places)

    def shown(self, data: dict[str, Any]) -> dict[str, Any]:
        """Fields that the summary shows beside those of a record."""
        held, full = data.get("device_bytes"), data.get("full_bytes")
        return {"share": held / full} if held is not None and full else {}

    def table(self, data: Sequence[Data]) -> Table:
        """A row for each value of the fields `rows`: the estimate with its interval, over all and for each of several
        values of the field `by`; how many were measured and failed; and the means of the fields that `columns` names.
        """
        if len({each.get("question") for each in data}) > 1:
            data = [each | {"method": f"{each['method']}, {each['question']}"} for each in data]
        known = sorted({each[self.by] for each in data if self.by in each}) if self.by else []
        known = evenly(known, MOST_VALUES) if known and isinstance(known[0], int) else known
        values, shown = known if len(known) > 1 else [], columns.parse(self.columns)
        numbers = [*(f"{self.by}\n{value}" for value in values), self.metric, "samples", "failed"]
        numbers += [column.heading for column in shown]
        result = Table(title=self.name)
        for name in (*self.rows, *numbers):
            result.add_column(name, justify="right" if name in numbers else "left", no_wrap=True)
        groups = grouped(data, lambda each: tuple(str(each[name]) for name in self.rows))
        for key, cells in [*groups.items(), *([(("all",), data)] if self.rows == LAYER else [])]:
            right = [each | self.shown(each) for each in cells if FAILED not in each and self.metric in each]
            parts = [[each for each in right if each[self.by] == value] for value in values]
            counts = str(len(right)), str(len(cells) - len(right))
            means = _means(right)
            texts = [*(self._written(part, len(values) <= MOST_INTERVALS) for part in parts), self._written(right)]
            result.add_row(*key, *texts, *counts, *(c.of(means) for c in shown))
        return result

    def _written(self, data: Sequence[Data], interval: bool = True) -> str:
        if not data:
            return "-"
        estimate = self.estimate(data)
        return interval_text(estimate, self.form) if interval else format(estimate.value, self.form)

    def show(self, data: list[dict[str, Any]]) -> None:
        """Called at the end with the data of all records of the run, failed ones included: prints the summary."""
        console = Console()
        Console(width=None if console.is_terminal else WIDTH_IN_FILES).print(self.table(data))

    def origin(self) -> dict[str, Any]:
        """Fields of each record about the model; called before anything is measured."""
        return {"model_sha256": model_sha256(self.options.model)}

    # values of the common options

    @property
    def contenders(self) -> list[tuple[str, str]]:
        """(method, budget) of every method that is compared."""
        return budgets.contenders(self.options.methods, self.options.budgets)

    @property
    def seeds(self) -> list[int]:
        return parse_numbers(self.options.seeds, "--seeds")

    @property
    def setting(self) -> tuple[tuple[str, Any], ...]:
        """Fields that identify the model of a measurement and the unit of its budgets: name, weights, dtype, unit.

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


def _means(data: Sequence[Data]) -> dict[str, float]:
    """The mean of each number over the records that have it."""
    values: dict[str, list[float]] = {}
    for each in data:
        for name, value in each.items():
            if isinstance(value, (int, float)):
                values.setdefault(name, []).append(value)
    return {name: mean(known) for name, known in values.items()}


def failure(error: BaseException) -> dict[str, Any]:
    """The outcome of a cell that failed."""
    return {FAILED: f"{type(error).__name__}: {' '.join(str(error).split())}"}


def apart(cells: Iterable[Cell], outcome: Callable[[Cell], dict[str, Any]]) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """The outcome of each cell; one that fails leaves the others as they are."""
    for cell in cells:
        try:
            result = outcome(cell)
        except Exception as error:
            result = failure(error)
        yield cell, result


def parse_numbers(text: str, flag: str) -> list[int]:
    """`0,1,2` or `0-9`, or both; ValueError that names the option."""
    result: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.strip().partition("-")
            result += range(int(first), int(last) + 1) if dash else [int(first)]
    except ValueError:
        raise ValueError(f"{flag} {text!r} is not a list of numbers; use whole numbers such as 0,1,2 or 0-9") from None
    if not result:
        raise ValueError(f"{flag} {text!r} names no number; use whole numbers such as 0,1,2 or 0-9")
    return list(dict.fromkeys(result))


# records


def records_path(experiment: Experiment) -> Path:
    """The file of records: the name of the experiment in the folder `--out`."""
    folder = Path(experiment.options.out)
    if folder.suffix == ".jsonl" or folder.is_file():
        raise ValueError(f"--out {folder} is a file; name the folder of the records, such as {folder.parent}")
    return folder / f"{experiment.kind()}.jsonl"


def measure_group(experiment: Experiment, cells: list[Cell]) -> Iterator[tuple[Cell, Record]]:
    """The record of each cell; an error that stops the group becomes the outcome of all its unmeasured cells."""
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
    """The record of a cell, with the names of the fields that identify the measurement."""
    data = {**cell.data, **outcome, **experiment.origin()}
    return records.make_record(experiment.kind(), data, cell.seed, tuple(cell.data), experiment.options.again)


def common_fields(experiment: Experiment) -> tuple[str, ...]:
    """The fields that all records of a run share; the file holds them once."""
    return (*dict(experiment.setting), *experiment.origin())


def _writable(outcome: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(outcome, allow_nan=False)
    except (ValueError, TypeError) as error:
        return failure(error)
    return outcome
