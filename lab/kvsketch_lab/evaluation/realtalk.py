"""REALTALK: many questions about one real conversation of two people over 21 days, F1 of words.

    kvsketch eval realtalk --data REALTALK/data --model qwen2.5-coder-1.5b --bytes 1/8,1/16

`--data` is the folder data/ of danny911kr/REALTALK (arXiv 2502.13270) with ten files `Chat_*.json` of 16,000 to 18,000
words, and 728 questions. They are scored as those of LoCoMo, whose form the files have.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsketch_lab.evaluation.documents import Document, Item
from kvsketch_lab.evaluation.locomo import CATEGORIES, Locomo, LocomoOptions
from kvsketch_lab.options import option


@dataclass
class RealtalkOptions(LocomoOptions):
    questions: int = option(100, "questions about each conversation", least=1)
    max_new_tokens: int = option(32, "tokens of an answer", least=1)


class Realtalk(Locomo):
    name = "realtalk"
    source = "danny911kr/REALTALK"
    options: RealtalkOptions

    @property
    def files(self) -> list[Path]:
        found = sorted(Path(self.options.data).glob("Chat_*.json"), key=_number)
        if not self.options.data or not found:
            raise ValueError(f"--data {self.options.data or '(none)'} has no Chat_*.json; name data/ of {self.source}")
        return found[: self.options.texts]

    def read(self) -> dict[str, Document]:
        return {f"realtalk text={_number(path)}": _document(json.loads(path.read_text("utf-8"))) for path in self.files}


def _number(path: Path) -> int:
    found = re.search(r"\d+", path.name)
    return int(found.group()) if found else 0


def _document(row: dict[str, Any]) -> Document:
    numbers = itertools.takewhile(lambda number: f"session_{number}" in row, itertools.count(1))
    text = "\n\n".join(_session(row[f"session_{number}"]) for number in numbers)
    by_category = [[q for q in row["qa"] if q["category"] == category] for category in CATEGORIES]
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*by_category))
    return Document(text, [Item(CATEGORIES[q["category"]], q["question"], str(q["answer"])) for q in in_turn if q])


def _session(turns: list[dict[str, Any]]) -> str:
    day = str(turns[0]["date_time"]).partition(",")[0] if turns else ""
    return "\n".join([f"[{day}]", *(f"{turn['speaker']}: {turn['clean_text']}" for turn in turns)])
