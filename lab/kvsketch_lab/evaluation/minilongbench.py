"""LongBench v1 in the 237 prompts of MiniLongBench, split before the question, so that a text is compressed unseen.

    kvsketch eval minilongbench --data MiniLongBench/pred_data/example --model qwen2.5-coder-1.5b --bytes 1/8,1/16

`--data` is the folder of MilkThink-Lab/MiniLongBench that has `MiniLongBench_<task>.json` with `origin_prompt` and
`gold` (arXiv 2505.19959). Tasks whose prompts end with a question, an instruction or an example are asked. The score is
F1 of words (questions, triviaqa), of the right label or number (trec, passage_retrieval, passage_count), or ROUGE-L
(summaries), the best over the gold answers.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsketch_lab.evaluation.documents import Document, DocumentExperiment, Item, TaskOptions, Wording
from kvsketch_lab.evaluation.locomo import f1
from kvsketch_lab.evaluation.summaries import rouge
from kvsketch_lab.options import option

F1, LABEL, ROUGE = "f1", "label", "rouge"
# What the last part of a prompt, which is asked after the text, begins with, and how an answer is scored.
TASKS = {
    "2wikimqa": ("Question:", F1), "hotpotqa": ("Question:", F1), "musique": ("Question:", F1),
    "multifieldqa_en": ("Question:", F1), "narrativeqa": ("Question:", F1), "qasper": ("Question:", F1),
    "triviaqa": ("Passage:", F1), "trec": ("Question:", LABEL),
    "passage_retrieval_en": ("The following is an abstract", LABEL), "passage_count": ("Please enter", LABEL),
    "gov_report": ("Now, write", ROUGE), "qmsum": ("Now, answer", ROUGE), "multi_news": ("Now, write", ROUGE),
    "samsum": ("Dialogue:", ROUGE),
}  # fmt: skip
WORDING = Wording("", "")


@dataclass
class MinilongbenchOptions(TaskOptions):
    texts: int = option(40, "prompts of each task, its first ones", least=1)
    max_new_tokens: int = option(64, "tokens of an answer", least=1)
    tasks: tuple[str, ...] = option(",".join(TASKS), "tasks, by commas", choices=tuple(TASKS))


class Minilongbench(DocumentExperiment):
    name = "minilongbench"
    source = "MilkThink-Lab/MiniLongBench"
    options: MinilongbenchOptions

    @property
    def files(self) -> list[Path]:
        return [Path(self.options.data) / f"MiniLongBench_{task}.json" for task in self.options.tasks]

    def read(self) -> dict[str, Document]:
        result = {}
        for task, path in zip(self.options.tasks, self.files, strict=True):
            if not path.is_file():
                raise ValueError(
                    f"--data {self.options.data} has no {path.name}; name pred_data/example of {self.source}"
                )
            rows = [*json.loads(path.read_text(encoding="utf-8")).values()]
            for number, row in enumerate(rows[: self.options.texts]):
                text, question = split(task, row["origin_prompt"])
                result[f"task={task} text={number}"] = Document(
                    text, [Item(task, question, json.dumps(gold(row["gold"])))]
                )
        return result

    def wording(self, task: str) -> Wording:
        return WORDING

    def expected(self, item: Item) -> dict[str, Any]:
        return {"task": item.task, "answers": json.loads(item.answer)}

    def score(self, answer: str, expected: Any) -> float:
        said, how = answer.strip(), TASKS[expected["task"]][1]
        if how == ROUGE:
            return max(rouge(said, each)["rougeL"] for each in expected["answers"])
        said = said.partition("\n")[0]
        if how == LABEL:
            return max(float(_label(each) in _label(said)) for each in expected["answers"])
        return max(f1(said, each) for each in expected["answers"])


def split(task: str, prompt: str) -> tuple[str, str]:
    """The text of a prompt, and what is asked after it."""
    mark = TASKS[task][0]
    before, found, after = prompt.rpartition(mark)
    if not found or not before.strip():
        raise ValueError(f"a prompt of {task} has no {mark!r} behind its text; are these MiniLongBench's files?")
    return before.rstrip(), mark + after


def gold(value: Any) -> list[str]:
    """The right answers: a list, the text of one, or with the classes that a label was chosen from."""
    if isinstance(value, dict):
        value = value["answers"]
    if isinstance(value, str) and value.startswith("["):
        value = ast.literal_eval(value)
    return [str(each) for each in value] if isinstance(value, list) else [str(value)]


def _label(text: str) -> str:
    """Words and numbers of a label such as `Paragraph 12`, each between spaces: 1 is no part of 12."""
    return f" {' '.join(re.findall(r'[a-z0-9]+', text.lower()))} "
