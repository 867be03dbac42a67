"""Answers at equal bytes: every method at the same share of the full cache's bytes, on questions held out of tuning.

Counted are records with budgets in bytes and seeds, or texts, kept for reporting (`records.held_out`). A number is the
mean over questions; its interval draws whole texts again, because questions about one text share its compressed cache.
A number with less than a third of the full cache's questions, or without two of its RULER tasks, is not shown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from kvsketch_lab.lists import grouped
from kvsketch_lab.records import (
    FAILED,
    Estimate,
    Record,
    budget_value,
    interval_text,
    latest,
    mean,
    mean_over_texts,
    text_of,
)
from kvsketch_lab.records.held_out import is_held_out_seed, is_held_out_text
from kvsketch_lab.report import blocks
from kvsketch_lab.report.canvas import as_shares, curve, dress, grid, legend
from kvsketch_lab.report.kinds import estimate_of, model_name
from kvsketch_lab.report.palette import looks, order

EXPERIMENTS = ("lines", "needle", "ruler", "perplexity")
SHARES = ("1/4", "1/8", "1/16", "1/32")
FULL, OURS = "full", "rehearse"
SEEDS = ("subgen", "kcenter", "balancekv", "clusterkv", "keyformer")  # of the papers that pages of their own show
MAPPED = "rehearse:replay=learned"
# What costs more than another form and answers less, or was not chosen for any share, is in the long tables alone.
PARTS = ("value_bits", "bits=16", "refit=none", "basis=")  # options of forms that the picture leaves out
ASIDE = ("replay=sampled", f"{MAPPED}:bits=3", f"{MAPPED}:value_bits=2")
LOSSES = ("perplexity", "KL")  # tasks of which less is better
SHORT_HEAD = "share of the full cache's bytes"
SHORT = ("lines 400", "RULER 4,000")  # the tasks of README
RULER_TASKS = 13  # in the paper; two need texts or a tokenizer that are not here
SMALL = {"markersize": 4.5, "linewidth": 1.3, "zorder": 3}  # how a curve is drawn that is not ours
DRAWN = ("lines 200", "lines 400", "RULER 4,000", "needle 4,000")


@dataclass(frozen=True)
class Cell:
    """What one method did at one share of the bytes, on one task, asked in one way."""

    model: str
    task: str
    method: str
    budget: str  # as asked; "" where the method takes none
    question: str  # seen or unseen
    value: Estimate
    questions: int
    bytes: float  # on the device, measured, of the full cache's
    tokens: float | None  # the budget in tokens, of the prompt's
    parts: dict[str, float] = field(default_factory=dict)  # of RULER, the mean of each task
    typical: float | None = None  # `bytes` of the method, the mean over tasks

    @property
    def column(self) -> str:
        """The share of the bytes that it is compared at: the one asked for, or the nearest to what it takes."""
        takes = self.typical or self.bytes
        return self.budget or min(SHARES, key=lambda share: abs(math.log(takes / float(Fraction(share)))))


def cells(records: Iterable[Record]) -> list[Cell]:
    """Everything that was measured at equal bytes on held-out questions."""
    return cells_of(held_out(records))


def held_out(records: Iterable[Record]) -> list[Record]:
    """The records that count."""
    return [record for record in latest(each for each in records if each["kind"] in EXPERIMENTS) if counts(record)]


def cells_of(own: Iterable[Record]) -> list[Cell]:
    """What records that count measured."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in own:
        data = record["data"]
        if FAILED in data or not data.get("full_bytes"):
            continue
        method, budget = str(data["method"]), str(data.get("budget") or "")
        for task in tasks_of(record):
            key = (model_name(data), task, method, budget, str(data.get("question", "unseen")))
            groups.setdefault(key, []).append(record)
    return comparable(_in_one_column([_cell(key, members) for key, members in sorted(groups.items())]))


def _in_one_column(measured: Sequence[Cell]) -> list[Cell]:
    """The same, with what a method takes on all tasks: one that takes no budget stands in one column."""
    taken = grouped(measured, lambda cell: (cell.model, cell.method, cell.budget))
    typical = {key: mean([cell.bytes for cell in own]) for key, own in taken.items()}
    return [replace(cell, typical=typical[cell.model, cell.method, cell.budget]) for cell in measured]


def comparable(measured: Sequence[Cell]) -> list[Cell]:
    """Those that were asked about as much as the full cache, nearly."""
    full = {(cell.model, cell.task): cell for cell in measured if cell.method == FULL}

    def is_comparable(cell: Cell) -> bool:
        reference = full.get((cell.model, cell.task), cell)
        return 3 * cell.questions >= reference.questions and len(missing(cell, reference)) <= 1

    return [cell for cell in measured if is_comparable(cell)]


def missing(cell: Cell, reference: Cell) -> list[str]:
    """The RULER tasks of the reference that a cell lacks."""
    return [name for name in reference.parts if name not in cell.parts]


def counts(record: Record) -> bool:
    """Whether a record was measured at equal bytes, on what no default was chosen by. The full cache of kvpress is no
    measurement of ours: its presses are rows of their own.
    """
    data, kind = record["data"], record["kind"]
    if data.get("method") == FULL and "kvpress" in data:
        return False
    if kind not in EXPERIMENTS or data.get("budgets_in") != "bytes" or data.get("turns"):
        return False
    return is_held_out_text(str(data.get("sample"))) if kind == "perplexity" else is_held_out_seed(record.get("seed"))


def tasks_of(record: Record) -> list[str]:
    """The tasks that a record counts in, such as `lines 400`."""
    data = record["data"]
    match record["kind"]:
        case "lines":
            return [f"lines {data['lines']:,}"]
        case "needle":
            return [f"needle {data['length']:,}"]
        case "ruler":
            return [f"RULER {data['length']:,}"]
    at = f"{data['position']:,}"
    return [f"perplexity {at}", *([f"KL {at}"] if "kl" in data else [])]


def _cell(key: tuple[str, ...], members: Sequence[Record]) -> Cell:
    model, task, method, budget, question = key
    data = [record["data"] for record in members]
    by_task = grouped(data if members[0]["kind"] == "ruler" else [], lambda each: str(each["task"]))
    tokens = [
        each["budget_tokens"] / each["prompt_tokens"]
        for each in data
        if each.get("budget_tokens") and each.get("prompt_tokens")
    ]
    return Cell(
        model,
        task,
        method,
        budget,
        question,
        _value(task, members),
        len(members),
        mean([each["device_bytes"] / each["full_bytes"] for each in data]),
        mean(tokens) if tokens else None,
        {name: mean([each["score"] for each in own]) for name, own in by_task.items()},
    )


def _value(task: str, members: Sequence[Record]) -> Estimate:
    if not task.startswith("KL"):
        return estimate_of(members)
    texts = [text_of(record["data"], record["seed"]) for record in members]
    return mean_over_texts([record["data"]["kl"] for record in members], texts)


def same_tasks(full: Cell, cell: Cell) -> float:
    """What the full cache answers on the RULER tasks that a cell has, or on the whole task."""
    shared = [value for name, value in full.parts.items() if name in cell.parts]
    return mean(shared) if shared else full.value.value


# tables


def task_order(task: str) -> tuple[int, float]:
    """Lines, RULER, needles, then losses; each by its size."""
    name, _, size = task.partition(" ")
    names = ("lines", "RULER", "needle", *LOSSES)
    return names.index(name), float(size.replace(",", ""))


def tables(measured: Sequence[Cell], model: str) -> str:
    """A table for each share of the bytes: a row for each method and way to ask, a column for each task."""
    own = [cell for cell in measured if cell.model == model]
    tasks = sorted({cell.task for cell in own}, key=task_order)
    parts = []
    for share in SHARES:
        full = {cell.task: cell for cell in own if cell.method == FULL}
        rows = _rows([cell for cell in own if cell.method != FULL and cell.column == share], tasks, full)
        reference = _rows(list(full.values()), tasks, full)
        if rows:
            head = ["method", "question", "bytes", *map(_title, tasks)]
            parts.append(f"**{share} of the bytes**\n\n{blocks.table(head, [*reference, *rows])}")
    return "\n\n".join(parts)


def _rows(measured: Sequence[Cell], tasks: Sequence[str], full: dict[str, Cell]) -> list[list[str]]:
    by: dict[tuple[str, str], dict[str, Cell]] = {}
    for cell in measured:
        by.setdefault((cell.method, cell.question), {})[cell.task] = cell
    # The question makes no difference to perplexity, so its cells join the row of unseen questions.
    return [
        [
            blocks.Code(method),
            question,
            _held(own.values()),
            *(_text(own[task], full.get(task)) if task in own else "" for task in tasks),
        ]
        for (method, question), own in sorted(by.items(), key=lambda each: (order(each[0][0]), each[0][1] != "unseen"))
    ]


def _held(measured: Iterable[Cell]) -> str:
    """The share of the bytes when a text is compressed. Losses do not tell: they are measured while tokens are
    generated, which take room besides.
    """
    answers = [cell.bytes for cell in measured if not cell.task.startswith(LOSSES)]
    return f"{mean(answers):.1%}" if answers else ""


def _text(cell: Cell, full: Cell | None) -> str:
    form = "+.2f" if cell.task.startswith("perplexity") else ".3f" if cell.task.startswith("KL") else ".2f"
    text = interval_text(cell.value, form)
    if full is None or not (lacks := missing(cell, full)):
        return text
    return f"{text} without {', '.join(lacks)} (full {same_tasks(full, cell):.2f})"


def _title(task: str) -> str:
    return f"{task} tokens" if not task.startswith("lines") else task


def short_table(measured: Sequence[Cell], model: str) -> str:
    """README's: right answers to unseen questions by share of the bytes, a row for each method but the seeds'."""
    own = _short(measured, model)
    full = {cell.task: cell for cell in own if cell.method == FULL}
    whole = " / ".join(f"{full[task].value.value:.2f}" for task in sorted(full, key=task_order))
    rows = [[method, "", *cells] for method, *cells in _short_rows(own, short_tasks(measured, model), seeds=False)]
    return blocks.table([SHORT_HEAD, "all", *SHARES], [[blocks.Code(FULL), whole, *("" for _ in SHARES)], *rows])


def in_short(measured: Sequence[Cell], model: str) -> dict[str, str]:
    """Right answers of the full cache and of `rehearse` at an eighth, task by task."""
    own = _short(measured, model)
    columns = {FULL: "", OURS: "1/8"}
    values = {
        name: {cell.task: cell.value.value for cell in own if cell.method == name and (not at or cell.column == at)}
        for name, at in columns.items()
    }
    return {
        name: " / ".join(f"{found[task]:.2f}" for task in sorted(found, key=task_order))
        for name, found in values.items()
    }


def asked(measured: Sequence[Cell], model: str) -> str:
    """What README's right answers are of."""
    full = {cell.task: cell for cell in _short(measured, model) if cell.method == FULL}
    said = []
    for task in sorted(full, key=task_order):
        name, size, *_ = task.split()
        what = f"about one of {size} {name} each"
        if full[task].parts:
            what = f"of {name} ({len(full[task].parts)} of its {RULER_TASKS} tasks, texts of {size} tokens)"
        said.append(f"{full[task].questions} questions {what}")
    return f"{' / '.join(said)}; {model}"


def seed_table(measured: Sequence[Cell], model: str) -> str:
    """The same of the methods of the five papers; empty without records."""
    rows = _short_rows(_short(measured, model), short_tasks(measured, model), seeds=True)
    return blocks.table([SHORT_HEAD, *SHARES], rows) if rows else ""


def _short_rows(own: Sequence[Cell], tasks: Sequence[str], seeds: bool) -> list[list[str]]:
    full = {cell.task: cell for cell in own if cell.method == FULL}
    values = {}
    for cell in own:
        star = "*" if missing(cell, full.get(cell.task, cell)) else ""
        values[cell.method, cell.column, cell.task] = f"{cell.value.value:.2f}{star}"
    methods = {cell.method for cell in own if cell.method != FULL and is_seed(cell.method) == seeds}
    methods -= {method for method in methods if is_aside(method)}
    return [
        [blocks.Code(method), *(" / ".join(_known(values, method, share, tasks)) for share in SHARES)]
        for method in sorted(methods, key=lambda name: (not _is_ours(name), order(name)))
    ]


def is_seed(method: str) -> bool:
    return method.partition(":")[0] in SEEDS


def is_aside(method: str) -> bool:
    return any(form in method for form in ASIDE)


def bit_table(tuned: Sequence[Cell], measured: Sequence[Cell], model: str, base: str) -> str:
    """`base` and its forms with fewer bits: on the questions that chose among them, then on held-out ones.

    Chosen is the form with the largest mean over tasks of the former, at each share.
    """
    tasks = [task for task in DRAWN if any(cell.task == task for cell in tuned)]
    known = [
        {(c.budget, c.method, c.task): c.value.value for c in own if c.model == model} for own in (tuned, measured)
    ]
    forms = {cell.method: _bits_beside(base, cell.method) for cell in tuned}
    rows = []
    for share in SHARES:
        means = {
            method: mean([known[0][share, method, task] for task in tasks])
            for method, bits in sorted(forms.items())
            if bits and all((share, method, task) in known[0] for task in tasks)
        }
        for method, average in sorted(means.items(), key=lambda item: -item[1]):
            values = [part.get((share, method, task)) for part in known for task in tasks]
            texts = ["" if value is None else f"{value:.2f}" for value in values]
            chosen = "chosen" if average == max(means.values()) else ""
            rows.append([share, blocks.Code(forms[method]), *texts, chosen])
    head = ["bytes", "bits", *(f"{task}, {of}" for of in ("tuned", "held out") for task in tasks), ""]
    return blocks.table(head, rows) if rows else ""


def _bits_beside(base: str, method: str) -> str:
    """The bits of a form of `base` that differs in nothing else; empty for other methods."""
    options = set(method.split(":")) - set(base.split(":"))
    same = method.startswith(base) and all(option.partition("=")[0].endswith("bits") for option in options)
    return (method.removeprefix(base).lstrip(":") or "bits=4") if same else ""


def short_note(measured: Sequence[Cell], model: str) -> str:
    """What a star in README's table means; empty where there is none."""
    own = _short(measured, model)
    full = {cell.task: cell for cell in own if cell.method == FULL}
    lacking = {name: cell for cell in own if cell.task in full for name in missing(cell, full[cell.task])}
    return "; ".join(
        f"*: without RULER's {name}, where the full cache has {same_tasks(full[cell.task], cell):.2f}"
        for name, cell in lacking.items()
    )


def seed_note(measured: Sequence[Cell], model: str) -> str:
    """Which of the papers' methods were asked fewer questions than the full cache; empty where none was."""
    own = _short(measured, model)
    asked = {cell.task: cell.questions for cell in own if cell.method == FULL}
    fewer = [
        f"`{cell.method}` at {cell.column} was asked {cell.questions} of {asked[cell.task]} questions of {cell.task}"
        for cell in own
        if is_seed(cell.method) and not is_aside(cell.method) and cell.questions < asked.get(cell.task, 0)
    ]
    return "; ".join(fewer)


def short_tasks(measured: Sequence[Cell], model: str) -> list[str]:
    """The tasks of README's table."""
    return sorted({cell.task for cell in _short(measured, model)}, key=task_order)


def _short(measured: Sequence[Cell], model: str) -> list[Cell]:
    return [cell for cell in measured if cell.model == model and cell.question == "unseen" and cell.task in SHORT]


def _is_ours(method: str) -> bool:
    return method.partition(":")[0] == OURS


def _known(values: dict[tuple[str, str, str], str], method: str, share: str, tasks: Sequence[str]) -> list[str]:
    known = [values.get((method, share, task), "-") for task in tasks]
    return known if set(known) != {"-"} else []


def least_questions(measured: Sequence[Cell], model: str) -> str:
    """The fewest questions behind an answer of the tables; tasks that were asked far less are named."""
    least: dict[str, int] = {}
    for cell in measured:
        if cell.model == model and not cell.task.startswith(LOSSES):
            least[cell.task] = min(cell.questions, least.get(cell.task, cell.questions))
    many = {task: count for task, count in least.items() if 3 * count >= max(least.values())}
    few = [f"{_title(task)}: {least[task]}" for task in sorted(least, key=task_order) if task not in many]
    named = f" ({', '.join(few)})" if few else ""
    return f"{min(many.values(), default=0)} questions{named}"


# the picture


def has_picture(measured: Sequence[Cell], model: str) -> bool:
    """Whether `picture` has something to draw."""
    return any(cell.model == model and cell.task in DRAWN for cell in measured)


def picture(measured: Sequence[Cell], model: str) -> Any | None:
    """Right answers to unseen questions against measured bytes, a panel for each task; None without two points.

    The many forms of the seeds' methods, and those of ours that differ in bits or lack a part, are in the tables alone.
    """
    in_tables = [is_seed, is_aside, lambda method: any(part in method for part in PARTS)]
    drawn = [c for c in measured if c.task in DRAWN and not any(left_out(c.method) for left_out in in_tables)]
    own = [cell for cell in drawn if cell.model == model and cell.question == "unseen"]
    tasks = sorted({cell.task for cell in own if cell.method != FULL}, key=task_order)
    if not tasks:
        return None
    figure, panels = grid(len(tasks), 2, 3.6, 0.9)
    shown = looks({cell.method for cell in own})
    for axes, task in zip(panels, tasks, strict=True):
        _panel(axes, [cell for cell in own if cell.task == task], shown)
        axes.set_title(re.sub(r"lines (.*)", r"line retrieval, \1 lines", _title(task)), loc="left", fontsize=10)
    legend(figure, panels)
    return figure


def _panel(axes: Any, own: Sequence[Cell], shown: dict[str, Any]) -> None:
    from matplotlib.ticker import NullLocator

    # Quantised full caches are points of one curve.
    quantised = f"{FULL}, quantised"
    curves = grouped(own, lambda cell: quantised if cell.method.startswith(f"{FULL}:") else cell.method)
    for name in sorted(curves, key=order):
        members = sorted(curves[name], key=lambda cell: cell.bytes)
        look = shown[members[0].method]
        if name == FULL:
            axes.axhline(members[0].value.value, color=look.colour, linestyle="--", linewidth=1.4, label="full cache")
            axes.plot([members[0].bytes], [members[0].value.value], marker="s", color=look.colour, markersize=6)
            continue
        size = {"markersize": 9, "linewidth": 2.6, "zorder": 4} if _is_ours(name) else SMALL
        places = [cell.bytes for cell in members]
        curve(axes, places, [cell.value for cell in members], look, marker=look.marker, label=name, **size)
    axes.set(xscale="log", xlabel="memory, share of the full cache", ylabel="right answers", ylim=(-0.03, 1.03))
    axes.set_xticks([1.0, *(budget_value(share) for share in SHARES)], ["1", *SHARES])
    axes.xaxis.set_minor_locator(NullLocator())
    as_shares(axes.yaxis)
    dress(axes)
