"""What a paper claims, which records answer it, and the verdict that follows from their numbers.

    Claim(
        "Table 2, 5k",                                            where the paper says it
        "k-center .86, H2O .66, sinks .56",                       what it says
        "longchat-7B, 200 lines, 65% of the cache",               in which setting
        {"k-center": ask("lines", method="kcenter", ...), ...},   our numbers by name
        rule="k-center > H2O and k-center > sinks",
    )

A rule compares numbers by their names, with each other or with a number. Where both have intervals it asks for the
interval of the difference (Zou and Donner 2008, from the two intervals as if they were independent): if that contains
zero, the two are too close to tell apart. A claim without a rule says its verdict, and why.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from kvsketch_lab.records import Estimate, interval_text, mean_over_texts, text_of
from kvsketch_lab.report.kinds import BIG, NOTHING, Data

HOLDS, FAILS, CLOSE = "holds", "does not hold", "too close to tell"
OTHER, CANNOT, NO_NUMBER = "other conditions", "cannot be run here", "no number"
VERDICTS = (HOLDS, FAILS, CLOSE, OTHER, CANNOT, NO_NUMBER, NOTHING)
UNITS = {"lines": "questions", "needle": "needles", "ruler": "questions", "attention_error": "runs",
         "perplexity": "runs", "recall": "query heads",
         "recall_bytes/": "questions"}  # fmt: skip
COMPARISON = re.compile(r"(.+?) (<|>|<=|>=) (?:([\d.]+) \* )?(.+)")
COMPARE = {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge}


class Measured(Protocol):
    """What knows the records: `docs.Numbers`."""

    def select(self, kind: str, /, **where: Any) -> list[Data]: ...

    def measurements(self, kind: str, formula: str, /, **where: Any) -> list[tuple[Any, Data]]: ...


@dataclass(frozen=True)
class Ask:
    """A number of the records: a field, or a formula of fields, of what `Numbers.select` finds; the mean of several."""

    kind: str
    formula: str
    form: str
    unit: str
    over: Ask | None
    where: Mapping[str, Any] = field(default_factory=dict)


def ask(
    kind: str, formula: str = "value", /, form: str = ".2f", unit: str = "", over: Ask | None = None, **where: Any
) -> Ask:
    return Ask(kind, formula, form, unit, over, where)


def answers(kind: str, method: str, budget: str, setting: str, /, form: str = ".2f", **where: Any) -> Ask:
    """A row of the report: a method at a budget in a setting, on the main model and asked in the usual way."""
    found = {"model": BIG, "variant": ""} | where
    return ask(kind, form=form, method=method, budget=budget, setting=setting, **found)


def attended(formula: str, /, form: str = ".0%") -> Ask:
    """Where attention goes, the mean over the layers of the model that this was measured on."""
    return ask("concentration/", formula, form=form, kind="concentration", model="qwen2.5-coder-0.5b", tokens=4096)


class Value(NamedTuple):
    estimate: Estimate
    samples: int | None
    command: str


def value_of(numbers: Measured, wanted: Ask) -> Value | None:
    """The number asked for; None where no record has it."""
    known = numbers.measurements(wanted.kind, wanted.formula, **_where(numbers, wanted))
    below = value_of(numbers, wanted.over) if wanted.over else None
    if not known or (wanted.over and below is None):
        return None
    if isinstance(known[0][0], Estimate):
        value, row = max(known, key=lambda each: each[1].get("count", 0))
        return Value(value, row.get("count"), row.get("command", ""))
    estimate = mean_over_texts([each for each, _ in known], [text_of(row, row.get("seed")) for _, row in known])
    if below:
        estimate = Estimate(estimate.value / below.estimate.value, None, None)
    return Value(estimate, len(known) if len(known) > 1 else None, known[-1][1].get("command", ""))


def _where(numbers: Measured, wanted: Ask) -> dict[str, Any]:
    """What is asked for, the method in every order of its parts that records have."""
    others = {name: value for name, value in wanted.where.items() if name != "method"}
    if len(others) == len(wanted.where):
        return others
    parts = set(wanted.where["method"].split(":"))
    known = {str(row.get("method")) for row in numbers.select(wanted.kind, **others)}
    return others | {"method": [text for text in known if set(text.split(":")) == parts]}


@dataclass(frozen=True)
class Claim:
    at: str
    says: str
    setting: str
    ours: Mapping[str, Ask] = field(default_factory=dict)
    rule: str = ""
    verdict: str = ""  # where there is no rule
    why: str = ""
    on: str = ""  # what we measured on, where it is not what the part says
    test: str = ""  # the test that checks it: file::function
    beside: Mapping[str, Ask] = field(default_factory=dict)  # numbers of the rule that other lines show
    brief: bool = False  # of many comparisons only how many hold

    def comparisons(self) -> list[str]:
        return self.rule.split(" and ") if self.rule else []


class Shown(NamedTuple):
    """A line of a page."""

    says: str
    setting: str
    ours: str
    verdict: str
    kind: str  # which of VERDICTS
    commands: tuple[str, ...]


def shown(numbers: Measured, claim: Claim) -> Shown:
    values = {name: value_of(numbers, each) for name, each in {**claim.ours, **claim.beside}.items()}
    kind, told = judged(claim, values)
    reasons = "; ".join(filter(None, [told, claim.why])) if kind != NOTHING else ""
    own = [value for name in claim.ours if (value := values[name])]
    commands = tuple(dict.fromkeys(value.command for value in own if value.command))
    return Shown(
        f"**{claim.at}**: {claim.says}" if claim.says else f"**{claim.at}**",
        claim.setting,
        _ours(claim, values),
        f"**{kind}**: {reasons}" if reasons else f"**{kind}**",
        kind,
        commands,
    )


def judged(claim: Claim, values: Mapping[str, Value | None]) -> tuple[str, str]:
    """The verdict, and the comparison that decided it where it is not that all hold."""
    if not claim.rule:
        missing = claim.ours and not any(values[name] for name in claim.ours)
        given = claim.verdict or (HOLDS if claim.test else NOTHING)
        return NOTHING if missing else given, ""
    results = {text: holds(text, values) for text in claim.comparisons()}
    if NOTHING in results.values():
        return NOTHING, ""
    worst = next((verdict for verdict in (FAILS, CLOSE) if verdict in results.values()), HOLDS)
    if claim.brief:
        return worst, f"{sum(verdict == HOLDS for verdict in results.values())} of {len(results)} comparisons hold"
    decided = [text for text, verdict in results.items() if verdict == worst]
    return worst, "" if worst == HOLDS or len(results) == 1 else "; ".join(decided)


def holds(comparison: str, values: Mapping[str, Value | None]) -> str:
    """Whether `a > b`, `a >= 0.5` or `a <= 1.05 * b`, by intervals where there are any."""
    left, sign, factor, right = parsed(comparison)
    pair = values[left], values[right] if right in values else Value(Estimate(float(right), None, None), None, "")
    if pair[0] is None or pair[1] is None:
        return NOTHING
    one, other = pair[0].estimate, _times(pair[1].estimate, factor)
    low, high = difference(one, other)
    if low < 0 < high:
        return CLOSE
    return HOLDS if COMPARE[sign](one.value, other.value) else FAILS


def parsed(comparison: str) -> tuple[str, str, float, str]:
    """Name, sign, factor, name or number."""
    parts = COMPARISON.fullmatch(comparison)
    if parts is None:
        raise ValueError(f"{comparison!r} is no comparison; write: name > name, name <= 0.5, name < 2 * name")
    return parts[1], parts[2], float(parts[3] or 1), parts[4]


def _times(estimate: Estimate, factor: float) -> Estimate:
    return Estimate(*(None if each is None else factor * each for each in estimate))  # type: ignore[arg-type]


def difference(one: Estimate, other: Estimate) -> tuple[float, float]:
    """The 95% interval of one minus other; a value without an interval counts as exact."""
    a, b = _edges(one), _edges(other)
    middle = one.value - other.value
    low = middle - math.hypot(one.value - a[0], b[1] - other.value)
    return low, middle + math.hypot(a[1] - one.value, other.value - b[0])


def _edges(estimate: Estimate) -> tuple[float, float]:
    if estimate.low is None or estimate.high is None:
        return estimate.value, estimate.value
    return estimate.low, estimate.high


def _ours(claim: Claim, values: Mapping[str, Value | None]) -> str:
    if claim.test:
        return f"checked by `{claim.test}`"
    own = {name: values[name] for name in claim.ours}
    if not any(own.values()):
        return claim.on if not claim.ours and claim.verdict else NOTHING
    if claim.brief:
        return claim.on
    counts = {(UNITS.get(claim.ours[name].kind, ""), value.samples) for name, value in own.items() if value}
    common = counts.pop() if len(counts) == 1 else ("", None)
    texts = [_named(name, claim.ours[name], values[name], common[1]) for name in claim.ours]
    many = f"; {common[1]:,} {common[0]}" if common[0] and common[1] else ""
    return f"{', '.join(texts)}{many}" + (f" ({claim.on})" if claim.on else "")


def _named(name: str, wanted: Ask, value: Value | None, common: int | None) -> str:
    if value is None:
        return f"{name} {NOTHING}"
    apart = wanted.kind in UNITS and value.samples and value.samples != common
    own = f" ({value.samples:,} {UNITS[wanted.kind]})" if apart else ""
    return f"{name} {interval_text(value.estimate, wanted.form)}{wanted.unit}{own}"


def counted(lines: Iterable[Shown]) -> dict[str, int]:
    """How many claims have each verdict."""
    kinds = [line.kind for line in lines]
    return {verdict: kinds.count(verdict) for verdict in VERDICTS}


@dataclass(frozen=True)
class Part:
    """Claims under one heading, with what their settings have in common."""

    title: str
    claims: Sequence[Claim]
    words: str = ""


@dataclass(frozen=True)
class Paper:
    """A page."""

    name: str
    title: str
    methods: Sequence[str]  # ours, in the setting of the paper
    parts: Sequence[Part]

    @property
    def claims(self) -> list[Claim]:
        return [claim for part in self.parts for claim in part.claims]
