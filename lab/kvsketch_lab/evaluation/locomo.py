"""Many questions about one long conversation: LoCoMo, F1 of words.

    kvsketch eval locomo --data locomo10.zip --model qwen2.5-coder-1.5b --bytes 1/8,1/16 --questions 24

Ten conversations of 8,000 to 16,000 words in up to 35 sessions, each with its date (arXiv 2402.17753). `--data` is
data/locomo10.zip or data/locomo10.json of snap-research/locomo. The score is the F1 of words without articles and
punctuation; of a multi-hop answer, a list, the mean over its parts of the best F1. Questions that have no answer in the
conversation are left out: a cache that forgets would answer them best. The questions of a conversation are taken from
the four categories in turn.
"""

from __future__ import annotations

import itertools
import json
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from kvsketch_lab.evaluation.documents import Document, DocumentExperiment, DocumentOptions, Item, Wording
from kvsketch_lab.evaluation.summaries import overlap
from kvsketch_lab.options import option

CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop"}
WORDING = Wording("Answer in a few words, without a sentence. Give dates where a time is asked for.", "Short answer:")


def read_conversations(path: str) -> dict[str, Document]:
    """The conversations of LoCoMo's zip or JSON file by name."""
    if not Path(path).is_file():
        raise ValueError(f"--data {path} is no file; name data/locomo10.zip or data/locomo10.json of LoCoMo")
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = sorted(name for name in archive.namelist() if re.search(r"/\d+\.json$", name))
            rows = [json.loads(archive.read(name)) | {"sample_id": PurePosixPath(name).stem} for name in names]
    else:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
    return {f"locomo text={row['sample_id'].removeprefix('conv-')}": _document(row) for row in rows}


def _document(row: dict[str, Any]) -> Document:
    said = row.get("conversation", row)
    numbers = itertools.takewhile(lambda number: f"session_{number}" in said, itertools.count(1))
    text = "\n\n".join(_session(said[f"session_{n}"], said[f"session_{n}_date_time"]) for n in numbers)
    by_category = [[q for q in row["qa"] if q["category"] == category] for category in CATEGORIES]
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*by_category))
    items = [Item(CATEGORIES[q["category"]], q["question"], str(q["answer"])) for q in in_turn if q]
    return Document(text, items)


def _session(turns: list[dict[str, Any]], date: str) -> str:
    return "\n".join([f"[{date}]", *(_turn(turn) for turn in turns)])


def _turn(turn: dict[str, Any]) -> str:
    shown = f" (shows a picture: {turn['blip_caption']})" if turn.get("blip_caption") else ""
    return f"{turn['speaker']}: {turn['text']}{shown}"


def words(text: str) -> list[str]:
    """Lower-case words and numbers without articles."""
    return [word for word in re.findall(r"[a-z0-9]+", text.lower()) if word not in ("a", "an", "the", "and")]


def f1(said: str, wanted: str) -> float:
    """F1 of words, each counted as often as both have it."""
    return overlap(words(said), words(wanted), 1)


def best_parts(said: str, wanted: str) -> float:
    """The mean over the parts of a list of the best F1 of a part of the answer."""
    parts = [[part for part in text.split(",") if words(part)] for text in (said, wanted)]
    best: Iterator[float] = (max((f1(one, other) for one in parts[0]), default=0.0) for other in parts[1])
    scores = list(best)
    return sum(scores) / len(scores) if scores else 0.0


@dataclass
class LocomoOptions(DocumentOptions):
    texts: int = option(10, "conversations, the first ones", least=1)
    questions: int = option(24, "questions about each conversation", least=1)
    max_new_tokens: int = option(24, "tokens of an answer", least=1)


class Locomo(DocumentExperiment):
    name = "locomo"
    source = "snap-research/locomo"
    options: LocomoOptions

    @property
    def files(self) -> list[Path]:
        return [Path(self.options.data)]

    def read(self) -> dict[str, Document]:
        return dict(itertools.islice(read_conversations(self.options.data).items(), self.options.texts))

    def wording(self, task: str) -> Wording:
        return WORDING

    def expected(self, item: Item) -> dict[str, str]:
        return {"task": item.task, "answer": item.answer}

    def score(self, answer: str, expected: Any) -> float:
        said = answer.strip().partition("\n")[0]
        return (best_parts if expected["task"] == CATEGORIES[1] else f1)(said, expected["answer"])
