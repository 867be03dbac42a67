"""What each kind of record says: its title, its measure, and the observations that a record holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvsketch.report.observations import MEMORY, Estimator, Observation, mean_and_interval
from kvsketch.report.reading import Record

Data = dict[str, Any]
# Fields that tell measurements apart; an outcome, or the lack of one, does not.
IDENTITY = (
    *("model", "dtype", "budgets_in", "method", "sample", "tokens", "max_new_tokens", "question_as_decode"),
    *("lines", "length", "depth", "needles", "file", "task", "prompts", "chat", "max_prompt", "truncate", "clean"),
    *("protocol", "layers", "queries", "steps", "prefix", "bucket", "form", "instruction", "min_new_tokens", "beams"),
    *("primed", "chunk", "layer"),
)
Observe = Callable[["Kind", Record], list[Observation]]
Places = Callable[["Kind", Data], list[str]]


@dataclass(frozen=True)
class Kind:
    """How the records of one experiment are read and shown."""

    name: str
    title: str
    text: str
    measure: str  # name of the axis
    metric: str  # field of the value
    setting: tuple[str, ...] = ()  # fields whose values are compared only among themselves
    identified_by: tuple[str, ...] = ()  # fields beyond the common ones that tell its measurements apart
    overall: str = ""  # name of the setting that takes all values of those fields together; empty: there is none
    higher_is_better: bool = True
    logarithmic: bool = False
    share: bool = False  # whether values are shares of 1, shown as percentages
    places: Places | None = None  # the settings that a record counts in; None: the overall one and its own
    observe: Observe | None = None  # the observations of a record that did not fail; None: `metric` at every place
    estimate: Estimator = mean_and_interval

    def observations(self, record: Record) -> list[Observation]:
        """What the record measured: one value, several, or a failure."""
        if not record["data"].get("failed"):
            return (self.observe or _one_value)(self, record)
        return [observation(self, record, None, place) for place in self.settings(record["data"])]

    def settings(self, data: Data) -> list[str]:
        """The settings that a record counts in."""
        if self.places:
            return self.places(self, data)
        overall = [", ".join([self.overall, *variants(data)])] if self.overall else []
        return [*overall, setting_text(self, data)]

    def latest(self, records: Iterable[Record]) -> list[Record]:
        """The records of this experiment; of the same measurement made twice, such as one that failed before, the last
        counts.
        """
        return latest((record for record in records if self.owns(record)), self.identified_by)

    def owns(self, record: Record) -> bool:
        """Whether a record is of this experiment; benchmarks may use the same word for another thing."""
        same = record["kind"].replace("-", "_") == self.name
        return same and "method" in record["data"] and "operation" not in record["data"]


def identity(record: Record, more: Iterable[str] = ()) -> tuple[Any, ...]:
    """What a record measured, whether it failed or not: its seed, its budget and the fields that tell cells apart."""
    data = record["data"]
    return (record.get("seed"), budget_of(data), *(str(data.get(name)) for name in (*IDENTITY, *more)))


def latest(records: Iterable[Record], more: Iterable[str] = ()) -> list[Record]:
    """The last record of each identity, in the order in which they were first measured."""
    fields = tuple(more)
    return list({identity(record, fields): record for record in records}.values())


def budget_of(data: Data) -> str:
    """The budget; a rate of 8, which older records have in its place, is 1/8."""
    return str(data.get("budget") or (f"1/{data['rate']}" if "rate" in data else ""))


def observation(kind: Kind, record: Record, value: float | None, setting: str, **memory: Any) -> Observation:
    """An observation of the method, budget and memory that the record names."""
    data = record["data"]
    return Observation(
        kind=kind.name,
        model=model_name(data),
        setting=setting,
        variant=", ".join(variants(data)),
        method=str(data["method"]),
        budget=budget_of(data),
        value=value,
        failed=str(data.get("failed") or ""),
        data=data,
        **{name: memory.get(name, data.get(name)) for name in MEMORY},
    )


def model_name(data: Data) -> str:
    """The model, with the dtype it ran in: other dtypes are other measurements."""
    name = str(data.get("model") or "unknown model")
    return f"{name} ({data['dtype']})" if data.get("dtype") else name


def setting_text(kind: Kind, data: Data) -> str:
    """The setting in words, such as `lines 400`, with what differs from the common way to measure."""
    parts = [_words(key, data[key]) for key in kind.setting if data.get(key) not in (None, "")]
    return ", ".join([*parts, *variants(data)])


def variants(data: Data) -> list[str]:
    """What makes a measurement another one than the common one of its experiment."""
    found = []
    if data.get("budgets_in") == "bytes":
        found.append("budgets of equal bytes")
    if data.get("question_as_decode"):
        found.append("question after compression")
    if data.get("primed"):
        found.append("answer begun")
    if data.get("chunk"):
        found.append(f"read in chunks of {data['chunk']:,}")
    if data.get("file"):
        found.append(f"from {data['file']}")
    if data.get("needles", 1) != 1:
        found.append(f"{data['needles']} needles")
    if data.get("beams", 1) != 1:
        found.append(f"{data['beams']} beams")
    return found


def _words(key: str, value: Any) -> str:
    return value if isinstance(value, str) else f"{key} {value:,}" if isinstance(value, int) else f"{key} {value}"


def _one_value(kind: Kind, record: Record) -> list[Observation]:
    value = record["data"].get(kind.metric)
    places = [] if value is None else kind.settings(record["data"])
    return [observation(kind, record, float(value), place) for place in places]
