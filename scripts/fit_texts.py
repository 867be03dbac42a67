"""Writes the texts that the maps of `rehearse:replay=learned` in `results/` were fitted to.

    python -m scripts.fit_texts build/fit && kvsketch fit qwen2.5-coder-1.5b --text build/fit

Speeches that are not held out, modules of Python's library, made-up records and lists of ten kinds, and speeches with
facts among their sentences. No text that questions are asked about is among them, and no line of their forms.
"""

from __future__ import annotations

import importlib
import inspect
import json
import random
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

from kvsketch.models import texts
from kvsketch_lab.records import held_out

CHARACTERS, SPEECHES, MIXED, LINES = 24_000, 10, 5, 900
MODULES = ("argparse", "heapq", "json.decoder", "http.server", "tarfile", "asyncio.queues", "statistics")
HARD, SOFT = "bcdfgklmnprstv", "aeiou"


class Chance:
    """Random words, names and lines."""

    def __init__(self, speeches: list[str], seed: int = 77) -> None:
        self.random = random.Random(seed)
        words = [word for name in speeches for word in texts.document(name).split() if word.isascii() and len(word) > 3]
        self.vocabulary = sorted({word.strip(".,;:()\"'") for word in words})

    def below(self, limit: int) -> int:
        return self.random.randrange(limit)

    def words(self, count: int = 1) -> str:
        return " ".join(self.random.choice(self.vocabulary) for _ in range(count))

    def name(self) -> str:
        return "".join(self.random.choices(part, k=1)[0] for part in (HARD, SOFT, HARD, SOFT, "nrstl")).capitalize()


def kinds(c: Chance) -> dict[str, Callable[[], str]]:
    """A line of each kind."""
    r = c.random
    return {
        "json": lambda: json.dumps({"id": c.below(10**6), "user": c.name(), "token": f"{r.getrandbits(48):012x}",
                                    "score": round(r.random() * 100, 2), "active": r.random() < 0.5}),
        "csv": lambda: ",".join([c.name(), c.name(), str(c.below(10**5)), f"{r.random() * 1e4:.2f}",
                                 f"20{r.randrange(10, 26)}-{r.randrange(1, 13):02d}-{r.randrange(1, 29):02d}"]),
        "phone": lambda: f"{c.name()} {c.name()} - {r.randrange(200, 999)} {r.randrange(10**4, 10**5)} - "
                         f"room {c.below(1000)}",
        "facts": lambda: f"The {c.words()} of {c.name()} is {c.words(2)}; its number is {c.below(10**4)}.",
        "log": lambda: f"[{c.below(24):02d}:{c.below(60):02d}:{c.below(60):02d}] {r.choice(['INFO', 'WARN', 'ERROR'])} "
                       f"{c.words()}: request {r.getrandbits(32):08x} took {c.below(3000)} ms",
        "assign": lambda: f"{c.name().lower()}_{c.below(100)} = "
                          f"{r.choice([str(c.below(10**5)), c.name().lower(), repr(c.words())])}",
        "table": lambda: "| " + " | ".join([c.words(), c.name(), str(c.below(10**6)), c.words()]) + " |",
        "words": lambda: c.words(4),
        "hex": lambda: f"{c.name()}: {uuid.UUID(int=r.getrandbits(128)).hex}",
        "dialog": lambda: f"{c.name()}: {c.words(r.randrange(4, 14))}{r.choice('.?!')}",
    }  # fmt: skip


def mixed(c: Chance, speeches: list[str]) -> str:
    parts = []
    for sentence in texts.sentences(CHARACTERS, c.random, speeches):
        parts.append(sentence)
        if c.random.random() < 0.15:
            parts.append(f"Note that {c.name()} {c.name()} keeps the {c.words()} {c.below(10**6)} in {c.name()}. ")
    return "".join(parts)


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    known = [name for name in texts.speeches() if not held_out.is_held_out_text(name)]
    speeches = sorted(known, key=lambda name: -len(texts.document(name)))[:SPEECHES]
    chance = Chance(speeches)
    files = {f"speech{i}.txt": texts.document(name) for i, name in enumerate(speeches)}
    files |= {f"code_{name}.py": inspect.getsource(importlib.import_module(name)) for name in MODULES}
    files |= {f"made_{kind}.txt": "\n".join(line() for _ in range(LINES)) for kind, line in kinds(chance).items()}
    files |= {f"mixed{i}.txt": mixed(chance, speeches) for i in range(MIXED)}
    for name, text in files.items():
        (folder / name).write_text(text[:CHARACTERS], encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
