"""Questions by people about long documents: the closed tasks of L-Eval, scored exactly.

    kvsketch eval leval --data LEval-data/Closed-ended-tasks --model qwen2.5-coder-1.5b --budgets 256,512,1024,2048

ClusterKV (figures 3 and 9) answers LongBench; these documents are as long. `--data` is the folder of the tasks' files
as OpenLMLab/LEval has them. Choices (tpo, quality, coursera) are right when the answer's first letters are those
expected, all of them; sci_fi when its first word is, True or False; topic_retrieval_longchat when the answer contains
the topic.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kvsketch_lab.evaluation.documents import Item, TaskExperiment, TaskOptions, Wording
from kvsketch_lab.options import option

CHOICE = Wording("Answer with the letter of every right choice.", "The answer is")
TRUTH = Wording("Answer with True or False.", "The answer is")
TASKS = {
    "tpo": CHOICE,
    "quality": CHOICE,
    "coursera": CHOICE,
    "sci_fi": TRUTH,
    "topic_retrieval_longchat": Wording("", "The topic is"),
}


def expected_of(task: str, answer: str) -> str:
    """What a right answer says: letters in order, True or False, or the topic."""
    if TASKS[task] is CHOICE:
        return _letters(answer)
    return answer.split()[0] if TASKS[task] is TRUTH else answer.strip()


def _letters(answer: str) -> str:
    """The first letters of an answer that stand alone: BD of "(B) and (D)", of "BD" and of "B, D"."""
    result = re.match(r"\W*(?:[A-F]+\b\W*(?:and\W+)?)+", answer)
    return "".join(sorted(set(re.findall(r"[A-F]", result.group())))) if result else ""


@dataclass
class LevalOptions(TaskOptions):
    tasks: tuple[str, ...] = option(",".join(TASKS), "tasks, separated by commas", choices=tuple(TASKS))


class Leval(TaskExperiment):
    name = "leval"
    source = "OpenLMLab/LEval"
    options: LevalOptions

    def wording(self, task: str) -> Wording:
        return TASKS[task]

    def expected(self, item: Item) -> dict[str, str]:
        return {"task": item.task, "answer": expected_of(item.task, item.answer)}

    def score(self, answer: str, expected: Any) -> float:
        task, right = expected["task"], expected["answer"]
        if TASKS[task] is CHOICE:
            return float(_letters(answer) == right)
        if TASKS[task] is TRUTH:
            said = re.search(r"true|false", answer.lower())
            return float(said is not None and said.group() == right.lower())
        return float(right.lower() in answer.lower())
