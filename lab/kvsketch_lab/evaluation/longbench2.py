"""LongBench v2: questions with four choices about long documents, dialogues, tables and code.

    kvsketch eval longbench2 --data longbench2_md --model qwen2.5-coder-1.5b --bytes 1/8,1/16

`--data` is a clone of itsnamgyu/longbench2_md: a folder for each domain, in it `sample_NNN_<difficulty>_<length>.md`
with the question and `..._context.txt` with the text (arXiv 2412.15204; 480 of the 503 questions have a context there).
Contexts of up to `--most-kilobytes` are asked about; of one that still has more than `--most-tokens` tokens the middle
is left out, as in the benchmark. Chance is .25, and small models are near it: read `choice_nll` beside the score.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from kvsketch_lab.evaluation.choices import ChoiceExperiment
from kvsketch_lab.evaluation.documents import Document, DocumentOptions, Item, Wording
from kvsketch_lab.options import option

LETTERS = ["A", "B", "C", "D"]
WORDING = Wording("Answer with the letter of the right choice.", "The answer is (")


@dataclass
class Longbench2Options(DocumentOptions):
    texts: int = option(503, "documents, the first ones", least=1)
    most_kilobytes: int = option(130, "size of a context, at most (130: about 32k tokens)", least=1)


class Longbench2(ChoiceExperiment):
    name = "longbench2"
    source = "itsnamgyu/longbench2_md"
    options: Longbench2Options

    @functools.cached_property
    def files(self) -> list[Path]:
        found = sorted(Path(self.options.data).glob("*/sample_*_context.txt"))
        if not self.options.data or not found:
            raise ValueError(
                f"--data {self.options.data or '(none)'} has no */sample_*_context.txt; name a clone of {self.source}"
            )
        return [path for path in found if path.stat().st_size <= 1000 * self.options.most_kilobytes]

    def read(self) -> dict[str, Document]:
        by_text: dict[str, list[Item]] = {}
        for path in self.files:
            question = path.with_name(path.name.replace("_context.txt", ".md"))
            item = parsed(question.read_text(encoding="utf-8"), path.parent.name, question)
            by_text.setdefault(path.read_text(encoding="utf-8"), []).append(item)
        documents = [Document(text, items) for text, items in by_text.items()][: self.options.texts]
        return {f"task={each.items[0].task} text={number}": each for number, each in enumerate(documents)}

    def wording(self, task: str) -> Wording:
        return WORDING

    def choices(self, task: str) -> list[str]:
        return LETTERS


def parsed(text: str, domain: str, path: Path) -> Item:
    """The question of a sample's file, with its choices."""
    parts = dict(re.findall(r"^# (\w+)\n\n(.*?)(?=\n# |\Z)", text, re.DOTALL | re.MULTILINE))
    choices = re.findall(
        r"^- ([A-D]): (.*?)(?=\n- [A-D]: |\Z)", parts.get("Choices", "").strip(), re.DOTALL | re.MULTILINE
    )
    answer = parts.get("Answer", "").strip()
    if [letter for letter, _ in choices] != LETTERS or answer not in LETTERS:
        raise ValueError(f"{path} is no question of LongBench v2: it needs # Question, # Choices A to D and # Answer")
    listed = "\n".join(f"({letter}) {choice.strip()}" for letter, choice in choices)
    return Item(domain, f"{parts['Question'].strip()}\n{listed}", answer)
