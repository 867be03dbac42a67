"""The papers that the methods come from: every table, figure and number, and what the records here say of it.

templates/papers has a page for each of them. A line of it is a claim, the records that answer it, and the verdict that
follows from their numbers:

    p.row(
        "Table 2, 5k",                                            where the paper says it
        "k-center .86, H2O .66, sinks .56",                       what it says
        "longchat-7B, 200 lines, 65% of the cache",               in which setting
        {"k-center": ask("lines", method="kcenter", ...), ...},   our numbers by name
        rule="k-center > H2O and k-center > sinks",
    )

A rule compares numbers by their names, with each other or with a number. Methods that were asked the same questions are
compared question by question (`records.paired_difference`); of other questions the line says so. Where the interval of
the difference contains zero, the two are too close to tell apart. A number in a rule is the paper's; where the paper
gives none, `threshold` says what we took. A claim without a rule says its verdict, and why.

Lines with one `claim` are one claim: it holds if all of them do. A line that is not in the paper (`beyond`) is none.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from kvsketch_lab.records import (
    Difference,
    Estimate,
    Result,
    interval_text,
    mean_over_texts,
    paired_difference,
    text_of,
    unpaired_difference,
)
from kvsketch_lab.report.kinds import BIG, KINDS, NOTHING, UNSEEN, Data, question_of

HOLDS, FAILS, CLOSE = "holds", "does not hold", "too close to tell"
OTHER, CANNOT, NO_NUMBER = "other conditions", "cannot be run here", "no number"
VERDICTS = (HOLDS, FAILS, CLOSE, OTHER, CANNOT, NO_NUMBER, NOTHING)
WORST = (FAILS, CLOSE, NOTHING, OTHER, CANNOT, NO_NUMBER, HOLDS)  # of the lines of a claim, the first that one has
PERPLEXITIES = {kind.name for kind in KINDS if kind.perplexity}
LARGEST = "largest"  # in place of the mean
UNITS = {"lines": "questions", "needle": "needles", "ruler": "questions", "attention_error": "runs",
         "perplexity": "runs", "recall": "query heads",
         "recall_bytes/": "questions"}  # fmt: skip
COMPARISON = re.compile(r"(.+?) (<|>|<=|>=) (?:([\d.]+) \* )?(.+)")
COMPARE = {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge}


PAPERS = {
    "subgen": "SubGen and ClusterGen",
    "balancekv": "BalanceKV",
    "clusterkv": "ClusterKV",
    "keyformer": "Keyformer",
}


class Measured(Protocol):
    """What knows the records: `docs.Numbers`."""

    def fill(self, template: str, /, **values: Any) -> str: ...

    def methods_of(self, kind: str) -> list[str]: ...

    def __hash__(self) -> int: ...

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
    of: str = ""  # LARGEST; empty: the mean
    where: Mapping[str, Any] = field(default_factory=dict)


def ask(
    kind: str,
    formula: str = "value",
    /,
    form: str = ".2f",
    unit: str = "",
    over: Ask | None = None,
    of: str = "",
    **where: Any,
) -> Ask:
    return Ask(kind, formula, form, unit, over, of, where)


def answers(kind: str, method: str, budget: str, setting: str, form: str = ".2f", **where: Any) -> Ask:
    """A row of the report: a method at a budget in a setting, on the main model and asked in the usual way."""
    found = {"model": BIG, "variant": ""} | where
    return ask(kind, form=form, method=method, budget=budget, setting=setting, **found)


def asks(kind: str, methods: Mapping[str, str], budget: str, setting: str, **where: Any) -> dict[str, Ask]:
    """The same of several methods by name; the full cache has no budget."""
    return {
        name: answers(kind, method, "" if method == "full" else budget, setting, **where)
        for name, method in methods.items()
    }


def by_budget(kind: str, name: str, method: str, budgets: Sequence[str], **where: Any) -> dict[str, Ask]:
    """The same of one method at several budgets; `name` has a place for the budget."""
    return {name.format(budget): answers(kind, method, budget, **where) for budget in budgets}


def step(
    method: str, shape: str, prompt: int, batch: int = 1, formula: str = "step_ms", over: Ask | None = None, **how: Any
) -> Ask:
    """A decode step, its milliseconds unless another formula is given."""
    where: dict[str, Any] = {"method": method, "shape": shape, "prompt": prompt, "batch": batch}
    return ask("decode_all", f"{formula} if step_ms else none", over=over, **how, **where)


def faster(method: str, shape: str, prompt: int, batch: int = 1, rival: str = "full", formula: str = "step_ms") -> Ask:
    """How many times as long the rival takes."""
    return step(rival, shape, prompt, batch, formula, step(method, shape, prompt, batch, formula), unit="x")


def attended(formula: str, /, form: str = ".0%") -> Ask:
    """Where attention goes, the mean over the layers of the model that this was measured on."""
    return ask("concentration/", formula, form=form, kind="concentration", model="qwen2.5-coder-0.5b", tokens=4096)


def largest(methods: Mapping[str, str], budget: str, steps: int) -> dict[str, Ask]:
    """The largest deviation of perplexity that methods have at any position, so many steps at each."""
    place: dict[str, Any] = {"kind": "perplexity", "model": BIG.partition(" ")[0], "budget": budget, "steps": steps}
    return {
        f"{name}, most": ask("eval/", "deviation", form="+.2f", of=LARGEST, method=method, **place)
        for name, method in methods.items()
    }


class Value(NamedTuple):
    estimate: Estimate
    samples: int | None
    command: str
    results: tuple[Result, ...] = ()  # what it is the mean of; none of a quotient or a maximum
    perplexity: bool = False


def value_of(numbers: Measured, wanted: Ask) -> Value | None:
    """The number asked for; None where no record has it."""
    known = numbers.measurements(wanted.kind, wanted.formula, **_where(numbers, wanted))
    below = value_of(numbers, wanted.over) if wanted.over else None
    if not known or (wanted.over and below is None):
        return None
    value = _one_of(wanted, known)
    if below is None:
        return value
    return Value(Estimate(value.estimate.value / below.estimate.value, None, None), value.samples, value.command)


def _one_of(wanted: Ask, known: Sequence[tuple[Any, Data]]) -> Value:
    """What the measurements say together; of rows that are estimates themselves the one of most questions."""
    if isinstance(known[0][0], Estimate):
        value, row = max(known, key=lambda each: each[1].get("count", 0))
        return Value(value, row.get("count"), row.get("command", ""), row["results"], wanted.kind in PERPLEXITIES)
    samples, command = len(known) if len(known) > 1 else None, known[-1][1].get("command", "")
    if wanted.of == LARGEST:
        return Value(Estimate(max(value for value, _ in known), None, None), samples, command)
    texts = [text_of(row, row.get("seed")) for _, row in known]
    values = [value for value, _ in known]
    results = [Result((question_of(row, text), row.get("layer")), text, value)
               for (value, row), text in zip(known, texts, strict=True)]  # fmt: skip
    return Value(mean_over_texts(values, texts), samples, command, tuple(results))


def _where(numbers: Measured, wanted: Ask) -> dict[str, Any]:
    """What is asked for, the method in every order of its parts that records have."""
    if "method" not in wanted.where:
        return dict(wanted.where)
    parts = set(wanted.where["method"].split(":"))
    known = [text for text in numbers.methods_of(wanted.kind) if set(text.split(":")) == parts]
    return {**wanted.where, "method": known[0] if len(known) == 1 else known}


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
    threshold: str = ""  # what a number of the rule is that the paper does not give
    claim: str = ""  # what it is a line of; empty: a claim of one line
    beyond: bool = False  # not in the paper: it counts nowhere

    @property
    def name(self) -> str:
        return self.claim or f"{self.at}: {self.says}: {self.setting}"

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
    ours = f"our threshold: {claim.threshold}" if claim.threshold else ""
    reasons = "; ".join(filter(None, [told, ours, claim.why])) if kind != NOTHING else ""
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
    """The verdict, and the differences that decided it."""
    if not claim.rule:
        missing = claim.ours and not any(values[name] for name in claim.ours)
        given = claim.verdict or (HOLDS if claim.test else NOTHING)
        return NOTHING if missing else given, ""
    results = {text: compared(text, values) for text in claim.comparisons()}
    if any(each is None for each in results.values()):
        return NOTHING, ""
    verdicts = {text: _verdict(text, each) for text, each in results.items()}
    worst = next((verdict for verdict in (FAILS, CLOSE) if verdict in verdicts.values()), HOLDS)
    if claim.brief:
        return worst, f"{sum(verdict == HOLDS for verdict in verdicts.values())} of {len(verdicts)} comparisons hold"
    mixed = len(set(verdicts.values())) > 1
    told = [_told(text, each, f", {verdicts[text]}" if mixed else "") for text, each in results.items() if each]
    return worst, "; ".join(filter(None, told))


def _told(comparison: str, difference: Difference, verdict: str) -> str:
    """`k-center - H2O: -0.200 [-0.280, -0.120], does not hold`; of exact values the comparison, if verdicts differ."""
    left, _, factor, right = parsed(comparison)
    if difference.estimate.low is None or re.fullmatch(r"[\d.]+", right):
        return f"{comparison}{verdict}" if verdict else ""
    times = "" if factor == 1 else f"{factor:g} * "
    common = f" ({difference.questions} questions of both)" if difference.left_out else ""
    questions = common if difference.questions else " (other questions, not paired)"
    return f"{left} - {times}{right}: {interval_text(difference.estimate, '+.3f')}{questions}{verdict}"


def holds(comparison: str, values: Mapping[str, Value | None]) -> str:
    """Whether `a > b`, `a >= 0.5` or `a <= 1.05 * b`: too close to tell where the interval of the difference contains
    zero, but for `>=` and `<=` no answer need differ.
    """
    return _verdict(comparison, compared(comparison, values))


def _verdict(comparison: str, difference: Difference | None) -> str:
    if difference is None:
        return NOTHING
    sign = parsed(comparison)[1]
    value, low, high = difference.estimate
    if low is None or high is None:
        return HOLDS if COMPARE[sign](value, 0) else FAILS
    if COMPARE[sign](low, 0) and COMPARE[sign](high, 0):
        return HOLDS
    return CLOSE if low <= 0 <= high else FAILS


def compared(comparison: str, values: Mapping[str, Value | None]) -> Difference | None:
    """What the left of a comparison has more than the right; None where a number is not known."""
    left, _, factor, right = parsed(comparison)
    one, other = values[left], values[right] if right in values else Value(Estimate(float(right), None, None), None, "")
    if one is None or other is None:
        return None
    both = paired_difference(one.results, other.results, factor, one.perplexity)
    return both or unpaired_difference(one.estimate, other.estimate, factor)


def parsed(comparison: str) -> tuple[str, str, float, str]:
    """Name, sign, factor, name or number."""
    parts = COMPARISON.fullmatch(comparison)
    if parts is None:
        raise ValueError(f"{comparison!r} is no comparison; write: name > name, name <= 0.5, name < 2 * name")
    return parts[1], parts[2], float(parts[3] or 1), parts[4]


def same(numbers: Measured, one: Ask, other: Ask) -> tuple[int, int]:
    """On how many of the questions that both were asked two methods give the same to the digit, and of how many."""
    sides = [{each.question: each.value for each in (value.results if value else ())}
             for value in (value_of(numbers, one), value_of(numbers, other))]  # fmt: skip
    both = sides[0].keys() & sides[1].keys()
    return sum(sides[0][question] == sides[1][question] for question in both), len(both)


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


class Page:
    """The page of a paper, line by line as its template asks for them."""

    head = "| paper | its setting | ours | verdict |\n| --- | --- | --- | --- |"

    def __init__(self, numbers: Measured, name: str) -> None:
        self.numbers, self.name, self.title = numbers, name, PAPERS[name]
        self.methods: tuple[str, ...] = ()  # ours, in the setting of the paper
        self.claims: list[Claim] = []
        self.commands: list[str] = []
        self.kinds: dict[str, set[str]] = {}  # the verdicts of the lines of each claim
        names = {each.__name__: each for each in (ask, answers, asks, by_budget, attended, step, faster, largest)}
        self.text = numbers.fill(f"papers/{name}.jinja", p=self, unseen=UNSEEN, **names)

    @property
    def counts(self) -> dict[str, int]:
        """How many claims have each verdict: of the lines of one the worst counts."""
        told = [next(verdict for verdict in WORST if verdict in kinds) for kinds in self.kinds.values()]
        return {verdict: told.count(verdict) for verdict in VERDICTS}

    def same(self, one: Ask, other: Ask) -> tuple[int, int]:
        return same(self.numbers, one, other)

    def setting(self, *methods: str) -> str:
        self.methods = methods
        return f"In the setting of the paper: {', '.join(f'`{method}`' for method in methods)}."

    def row(self, at: str, says: str, setting: str, ours: Mapping[str, Ask] | None = None, **more: Any) -> str:
        """The line of a claim, with links to its commands."""
        claim = Claim(at, says, setting, ours or {}, **more)
        line = shown(self.numbers, claim)
        self.claims.append(claim)
        if not claim.beyond:
            self.kinds.setdefault(claim.name, set()).add(line.kind)
        self.commands += [each for each in line.commands if each not in self.commands]
        links = ", ".join(f"[{self.commands.index(each) + 1}](#commands)" for each in line.commands)
        cells = [each.replace("|", "\\|") or "-" for each in (line.says, line.setting, line.ours, line.verdict)]
        cells[2] += f" {links}" if links else ""
        return f"| {' | '.join(cells)} |"


@functools.cache
def page(numbers: Measured, name: str) -> Page:
    """What the page of a paper shows."""
    return Page(numbers, name)


def index(numbers: Measured) -> list[Page]:
    """The pages of all papers."""
    return [page(numbers, name) for name in PAPERS]
