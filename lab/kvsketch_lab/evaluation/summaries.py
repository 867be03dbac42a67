"""Summaries through a compressed cache: ROUGE against the full cache's own summary, and against a reference.

    kvsketch eval summaries --model qwen2.5-coder-1.5b --texts 8 --tokens 4000 --budgets 90%,70%,50%,30%

Keyformer (figures 7 and 8) summarises news and reports at a share of the prompt's tokens. Texts here are the
beginnings of messages on the State of the Union, which have no reference, or with `--file` those of a JSON lines file
with `input` and `outputs`, as L-Eval's gov_report_summ.jsonl has them. The request stands before the text, so that no
method meets it late. `score` is ROUGE-2 against the summary that the full cache writes of the same prompt, 1 where
both are the same; `rouge` and, where there is a reference, `reference_rouge` hold the F measures of ROUGE-1, 2 and L
without stemming.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsketch.models import encode_chat, texts
from kvsketch_lab.evaluation import passages
from kvsketch_lab.evaluation.experiment import FAILED, Cell, text_sha256
from kvsketch_lab.evaluation.questions import Question, QuestionExperiment, QuestionOptions
from kvsketch_lab.options import option

LEAD = "Summarize the following text in a few sentences.\n\n"


def rouge(text: str, reference: str) -> dict[str, float]:
    """F measures of ROUGE-1, ROUGE-2 and ROUGE-L over lower-case words and numbers."""
    said, wanted = (re.findall(r"[a-z0-9]+", each.lower()) for each in (text, reference))
    shared = {f"rouge{n}": overlap(said, wanted, n) for n in (1, 2)}
    return {name: round(value, 4) for name, value in (shared | {"rougeL": _longest(said, wanted)}).items()}


def overlap(said: list[str], wanted: list[str], n: int) -> float:
    """F measure of runs of n words, each counted as often as both have it."""
    runs = [Counter(zip(*(words[i:] for i in range(n)), strict=False)) for words in (said, wanted)]
    return _f_measure((runs[0] & runs[1]).total(), runs[0].total(), runs[1].total())


def _longest(said: list[str], wanted: list[str]) -> float:
    """F measure of the longest common subsequence."""
    row = [0] * (len(wanted) + 1)
    for word in said:
        before = row
        row = [0]
        for at, other in enumerate(wanted, 1):
            row.append(before[at - 1] + 1 if word == other else max(before[at], row[-1]))
    return _f_measure(row[-1], len(said), len(wanted))


def _f_measure(both: int, said: int, wanted: int) -> float:
    return 2 * both / (said + wanted) if both else 0.0


@dataclass
class SummariesOptions(QuestionOptions):
    texts: str = passages.texts_option("8")
    tokens: int = option(4000, "tokens of each text, at most", least=10)
    file: str | None = option(None, "JSON lines with `input` and `outputs` to summarise instead; --texts of them")
    max_new_tokens: int = option(128, "tokens of a summary", least=1)


class Summaries(QuestionExperiment):
    name = "summaries"
    columns = f"reference ROUGE-2=reference:.2f | {QuestionExperiment.columns}"
    options: SummariesOptions

    def __init__(self, options: SummariesOptions) -> None:
        super().__init__(options)
        self._of_full: dict[tuple[str, int], str] = {}

    @functools.cached_property
    def documents(self) -> dict[str, tuple[str, str]]:
        """Text and reference by name."""
        if self.options.file is None:
            return {name: (texts.document(name), "") for name in passages.names(self.options.texts)}
        lines = Path(self.options.file).read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines[: int(self.options.texts)]]
        return {f"text={number}": (row["input"], row["outputs"][0]) for number, row in enumerate(rows)}

    def questions(self) -> Iterator[tuple[str, dict[str, Any]]]:
        source = {"file": Path(self.options.file).name} if self.options.file else {}
        return ((name, {"tokens": self.options.tokens, **source}) for name in self.documents)

    def ask(self, cell: Cell) -> Question:
        text, reference = self.documents[cell.sample]
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"][: self.options.tokens]
        prompt = encode_chat(self.tokenizer, LEAD + self.tokenizer.decode(ids))["input_ids"][0].tolist()
        return Question(tuple(prompt), 0, reference, {"text_sha256": text_sha256(text)})

    def measure(self, cells: list[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
        alone = {(cell.sample, cell.seed): cell for cell in cells if (cell.sample, cell.seed) not in self._of_full}
        full = [dataclasses.replace(cell, method="full", budget="") for cell in alone.values()]
        for cell, outcome in super().measure(full) if full else ():
            if FAILED in outcome:
                raise RuntimeError(f"the full cache gave no summary: {outcome[FAILED]}")
            self._of_full[cell.sample, cell.seed] = outcome["answer"]
        for cell, outcome in super().measure(cells):
            yield cell, outcome if FAILED in outcome else self._compared(cell, outcome)

    def _compared(self, cell: Cell, outcome: dict[str, Any]) -> dict[str, Any]:
        answer, reference = outcome["answer"], outcome.pop("expected")
        result = {"rouge": rouge(answer, self._of_full[cell.sample, cell.seed])}
        if reference:
            result["reference_rouge"] = rouge(answer, reference)
        return outcome | result | {"score": result["rouge"]["rouge2"]}

    def score(self, answer: str, expected: Any) -> float:
        return 0.0  # `_compared` knows the other summary

    def shown(self, data: dict[str, Any]) -> dict[str, Any]:
        return super().shown(data) | {"reference": data.get("reference_rouge", {}).get("rouge2")}
