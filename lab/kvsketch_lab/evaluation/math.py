r"""Problems of mathematics with long answers: MATH-500, AIME and others, compressed while the answer is written.

    kvsketch eval math --data test.jsonl --model qwen2.5-coder-1.5b --texts 100 --bytes 1/2,1/4

`--data` is a file of JSON lines with `problem` (or `question`) and `answer` (or `true_answer`), as in evaluation/data/
of QwenLM/Qwen2.5-Math or data/ of yisunlp/LongFLow; where there is no answer, the last box of `solution` is it. Records
name the file, or its folder if it is called `test`. The model ends with its answer in \boxed{}. An answer is right when
it says the same as the expected one: as a number, or letter by letter without what LaTeX takes for spacing and size.
Bytes are measured at the end of the answer, as in `gsm8k`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from kvsketch.models import encode_chat
from kvsketch_lab.evaluation.documents import file_hashes, json_lines
from kvsketch_lab.evaluation.experiment import Cell, text_sha256
from kvsketch_lab.evaluation.questions import Question, QuestionExperiment, QuestionOptions
from kvsketch_lab.options import option

ASK = "Solve the problem step by step. End with the answer in \\boxed{}.\n\n"
BOX = "\\boxed{"
# What changes how LaTeX looks and not what it says.
LOOKS = re.compile(
    r"\\(?:left|right|!|,|;|:|quad|displaystyle|mathrm|text|mbox)\b|\\[!,;:]|\\?\$|\\%|%|\^\\circ|\^\{\\circ\}|[\s{}]"
)


def boxed(text: str) -> str | None:
    """What stands in the last box of an answer; None: there is none, or it is not closed."""
    begin = text.rfind(BOX)
    if begin < 0:
        return None
    depth, first = 1, begin + len(BOX)
    for at in range(first, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return text[first:at]
    return None


def plain(text: str) -> str:
    """An answer without what LaTeX takes for looks: two of the same plain form say the same."""
    text = re.sub(r"\\[dt]frac", r"\\frac", text.strip().rstrip("."))
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"(\1)/(\2)", text)
    return LOOKS.sub("", text).replace("(", "").replace(")", "") if "," not in text else LOOKS.sub("", text)


def number(text: str) -> Fraction | None:
    """An answer as a number, if it is one: `1,234`, `0.5`, `3/4`."""
    try:
        return Fraction(re.sub(r"(?<=\d),(?=\d{3}\b)", "", text))
    except (ValueError, ZeroDivisionError):
        return None


def is_same(said: str, right: str) -> bool:
    one, other = plain(said), plain(right)
    if one == other:
        return True
    values = number(one), number(other)
    return values[0] is not None and values[0] == values[1]


@dataclass
class MathOptions(QuestionOptions):
    data: str = option("", "a file of problems, JSON lines")
    texts: int = option(500, "problems, the file's first ones", least=1)
    max_new_tokens: int = option(1024, "tokens of an answer", least=1)


class Math(QuestionExperiment):
    name = "math"
    options: MathOptions

    @functools.cached_property
    def file_rows(self) -> list[dict[str, Any]]:
        path = Path(self.options.data)
        rows = json_lines(path, "name a file of problems such as evaluation/data/aime24/test.jsonl")
        for at, row in enumerate(rows, 1):
            row["problem"] = row.get("problem") or row.get("question")
            known = [row[name] for name in ("answer", "true_answer") if row.get(name) is not None]
            row["answer"] = known[0] if known else boxed(str(row.get("solution", "")))
            if not row["problem"] or row["answer"] in (None, ""):
                raise ValueError(
                    f"{path}, line {at} needs problem (or question) and answer (or a solution with {BOX}}})"
                )
        return rows[: self.options.texts]

    @functools.cached_property
    def _source(self) -> dict[str, Any]:
        path = Path(self.options.data)
        name = path.absolute().parent.name if path.stem == "test" else path.stem
        return {"source": name, "data_sha256": file_hashes(path)}

    def origin(self) -> dict[str, Any]:
        return super().origin() | self._source

    @property
    def more(self) -> int:
        return self.options.max_new_tokens

    def questions(self) -> Iterator[tuple[str, dict[str, Any]]]:
        return ((f"prompt={at}", {"task": self._source["source"]}) for at in range(len(self.file_rows)))

    def ask(self, cell: Cell) -> Question:
        row = self.file_rows[int(cell.parts["prompt"])]
        text = ASK + str(row["problem"])
        ids = encode_chat(self.tokenizer, text)["input_ids"][0].tolist()
        return Question(tuple(ids), 0, str(row["answer"]), {"text_sha256": text_sha256(text)})

    def score(self, answer: str, expected: Any) -> float:
        said = boxed(answer)
        return float(said is not None and is_same(said, expected))
