"""FinanceBench: questions about annual and quarterly reports, read from their PDFs as `kvsketch read` reads them.

    kvsketch eval financebench --data financebench --model qwen2.5-coder-1.5b --bytes 1/8,1/16

`--data` is a clone of patronus-ai/financebench (arXiv 2311.11944): data/financebench_open_source.jsonl and pdfs/.
Reports are longer than small models read: of each, consecutive pages with the evidence among them are taken, about as
many as have `--most-tokens` tokens; where the evidence lies in them is drawn by the document's name. An answer that is
a number is right when it says that number, within half a percent; others are scored by F1 of words.
"""

from __future__ import annotations

import functools
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsketch.serve.files import read_file
from kvsketch_lab.evaluation.documents import Document, DocumentExperiment, DocumentOptions, Item, Wording, json_lines
from kvsketch_lab.evaluation.locomo import f1
from kvsketch_lab.options import option

WORDING = Wording("Answer in a few words or with a number alone.", "Short answer:")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
NEAR = 0.005
CHARACTERS = 2.5  # of a token, in tables of numbers


@dataclass
class FinancebenchOptions(DocumentOptions):
    texts: int = option(200, "documents, the first ones", least=1)
    questions: int = option(8, "questions about each document", least=1)
    max_new_tokens: int = option(48, "tokens of an answer", least=1)


class Financebench(DocumentExperiment):
    name = "financebench"
    source = "patronus-ai/financebench"
    options: FinancebenchOptions

    @property
    def files(self) -> list[Path]:
        return [Path(self.options.data) / "data" / "financebench_open_source.jsonl"]

    def read(self) -> dict[str, Document]:
        rows = json_lines(self.files[0], f"name a clone of {self.source}")
        by_evidence: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for row in rows:
            # Questions whose evidence is on one page share a text.
            if row["evidence"] and self._pdf(row["doc_name"]).is_file():
                by_evidence.setdefault((row["doc_name"], int(row["evidence"][0]["evidence_page_num"])), []).append(row)
        if not by_evidence:
            raise ValueError(f"--data {self.options.data} has none of the PDFs in pdfs/; name a clone of {self.source}")
        result = {}
        for name, page in [*by_evidence][: self.options.texts]:
            own = by_evidence[name, page]
            items = [Item(row["question_type"], row["question"], row["answer"]) for row in own]
            result[f"document={name} text={page}"] = Document(self._around(name, page), items)
        return result

    def _pdf(self, name: str) -> Path:
        return Path(self.options.data) / "pdfs" / f"{name}.pdf"

    @functools.cache  # noqa: B019
    def _pages(self, name: str) -> list[str]:
        found = read_file(self._pdf(name).read_bytes(), f"{name}.pdf")
        begins = [begin for begin, _ in found.places] or [0]
        return [found.text[a:b] for a, b in zip(begins, [*begins[1:], None], strict=True)]

    def _around(self, name: str, evidence: int) -> str:
        """Consecutive pages with the evidence at a drawn place among them."""
        pages, most = self._pages(name), int(self.options.most_tokens * CHARACTERS)
        first = last = min(evidence, len(pages) - 1)
        chance = random.Random(f"{name} {evidence}")
        size = len(pages[first])
        while first > 0 or last < len(pages) - 1:
            before = last == len(pages) - 1 or (first > 0 and chance.random() < 0.5)
            more = pages[first - 1] if before else pages[last + 1]
            if size + len(more) > most:
                break
            size += len(more)
            first, last = (first - 1, last) if before else (first, last + 1)
        return "".join(pages[first : last + 1])

    def wording(self, task: str) -> Wording:
        return WORDING

    def expected(self, item: Item) -> dict[str, str]:
        return {"task": item.task, "answer": item.answer}

    def score(self, answer: str, expected: Any) -> float:
        said, right = answer.strip().partition("\n")[0], expected["answer"]
        wanted = NUMBER.fullmatch(right.strip().strip("$%").rstrip("."))
        if wanted is None:
            return f1(said, right)
        value = _value(wanted.group())
        return float(any(abs(_value(found) - value) <= NEAR * abs(value) for found in NUMBER.findall(said)))


def _value(number: str) -> float:
    return float(number.replace(",", ""))
