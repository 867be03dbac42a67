"""Right answers of vLLM's own caches and of the plugin, from records of `scripts/vllm_answers.py`.

Counted are the held-out questions. Differences to vLLM's bf16 cache are paired: question by question, with an interval
that draws texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvsketch_lab.lists import grouped
from kvsketch_lab.records import FAILED, Record, interval_text, latest
from kvsketch_lab.records.held_out import is_held_out_seed
from kvsketch_lab.report import blocks
from kvsketch_lab.report.equal_bytes import FULL, OURS, SHORT, task_order, tasks_of
from kvsketch_lab.report.evidence import question_of
from kvsketch_lab.report.kinds import NOTHING, difference_of, estimate_of, model_name
from kvsketch_lab.report.vllm import OWN

IN_VLLM = "vllm-"  # what the methods of these records begin with
REFERENCE = "bf16"
NO_RECORD = "no record"
ByTask = dict[str, list[Record]]


def measured(records: Iterable[Record], model: str) -> dict[str, ByTask]:
    """The records that count, by contender and task; vLLM's own caches come first."""
    result: dict[str, ByTask] = {}
    for name, own in grouped(_counted(records, model), lambda record: str(record["data"]["method"])).items():
        if name.startswith(IN_VLLM):
            result[name.removeprefix(IN_VLLM)] = _by_task(own)
    return {name: result[name] for name in sorted(result, key=lambda name: (name not in OWN, name))}


def _counted(records: Iterable[Record], model: str) -> list[Record]:
    held_out = [r for r in latest(records) if is_held_out_seed(r["seed"]) and FAILED not in r["data"]]
    return [record for record in held_out if model_name(record["data"]) == model]


def _by_task(records: Iterable[Record]) -> ByTask:
    return grouped(records, lambda record: tasks_of(record)[0])


def in_readme(records: Iterable[Record], model: str, short: dict[str, str]) -> dict[str, str]:
    """Right answers by row of README's table: of vLLM's own caches where they were asked all of its tasks, of bf16 else
    those of the full cache on transformers, which `short` holds beside those of `rehearse`.
    """
    result = dict.fromkeys(OWN, NO_RECORD) | {REFERENCE: short[FULL], OURS: short[OURS]}
    for name, own in _asked_everything(records, model).items():
        result[name] = " / ".join(f"{estimate_of(own[task]).value:.2f}" for task in SHORT)
    return result


def where_asked(records: Iterable[Record], model: str) -> str:
    """Which of the answers in README's table were given in vLLM; empty: none."""
    names = " and ".join(_asked_everything(records, model))
    return names and f"The answers of {names} are [vLLM's](docs/vllm.md#right-answers), the others transformers'."


def _asked_everything(records: Iterable[Record], model: str) -> dict[str, ByTask]:
    """vLLM's own caches that were asked all tasks of README's table."""
    own = measured(records, model)
    return {name: own[name] for name in OWN if all(task in own.get(name, {}) for task in SHORT)}


def table(records: Iterable[Record], eval_records: Iterable[Record], model: str) -> str:
    """A row for each contender, and one for the full cache on transformers with the same questions: right answers by
    task, and what they differ by from those of vLLM's bf16 cache.
    """
    own = measured(records, model)
    if not own:
        return f"{NOTHING.capitalize()} yet."
    tasks = sorted({task for each in own.values() for task in each}, key=task_order)
    reference = own.get(REFERENCE, {})
    rows = [[OWN.get(name, blocks.Code(name)), *_row(each, reference, tasks)] for name, each in own.items()]
    asked = {question_of(record) for by_task in own.values() for some in by_task.values() for record in some}
    if full := [record for record in _of_full(eval_records, model) if question_of(record) in asked]:
        rows.insert(0, ["transformers, full cache", *_row(_by_task(full), reference, tasks)])
    heads = [f"{task} tokens" if task.startswith("RULER") else task for task in tasks]
    return blocks.table(["", "question", *heads, *(f"{head}, more than bf16" for head in heads)], rows)


def _of_full(eval_records: Iterable[Record], model: str) -> list[Record]:
    """Those of the full cache at equal bytes, which was asked unseen questions."""
    asked = {"method": FULL, "budgets_in": "bytes", "question": "unseen"}
    own = [
        record
        for record in eval_records
        if record["kind"] in ("lines", "ruler")
        and not record["data"].get("turns")
        and asked.items() <= record["data"].items()
    ]
    return _counted(own, model)


def _row(own: ByTask, reference: ByTask, tasks: Sequence[str]) -> list[str]:
    """How the questions were asked, the answers, and what they differ by."""
    ways = dict.fromkeys(str(record["data"]["question"]) for task in tasks for record in own.get(task, []))
    answers = [interval_text(estimate_of(own[task])) if task in own else NOTHING for task in tasks]
    return [", ".join(ways), *answers, *(_difference(own.get(task, []), reference.get(task, [])) for task in tasks)]


def _difference(own: Sequence[Record], reference: Sequence[Record]) -> str:
    if own is reference or not own or not reference:
        return ""
    found = difference_of(own, reference)
    return interval_text(found, "+.2f") if found else ""


def versions(records: Iterable[Record]) -> str:
    """Of vLLM, such as `0.32.0`."""
    return ", ".join(sorted({str(record["data"]["vllm"]) for record in records if "vllm" in record["data"]}))
