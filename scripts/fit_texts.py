"""Writes the texts that the maps of `rehearse:replay=learned` in `results/` were fitted to.

    python -m scripts.fit_texts build/fit && kvsketch fit qwen2.5-coder-1.5b --text build/fit

Speeches that are not held out, modules of Python's library, made-up records and lists of ten kinds, and speeches with
facts among their sentences. No text that questions are asked about is among them, and no line of their forms.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

from kvsketch.models import texts
from kvsketch.models.fit_texts import Chance, kinds, mixed
from kvsketch_lab.records import held_out

CHARACTERS, SPEECHES, MIXED, LINES = 24_000, 10, 5, 900
MODULES = ("argparse", "heapq", "json.decoder", "http.server", "tarfile", "asyncio.queues", "statistics")


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    known = [name for name in texts.speeches() if not held_out.is_held_out_text(name)]
    speeches = sorted(known, key=lambda name: -len(texts.document(name)))[:SPEECHES]
    chance = Chance([word for name in speeches for word in texts.document(name).split()])
    files = {f"speech{i}.txt": texts.document(name) for i, name in enumerate(speeches)}
    files |= {f"code_{name}.py": inspect.getsource(importlib.import_module(name)) for name in MODULES}
    files |= {f"made_{kind}.txt": "\n".join(line() for _ in range(LINES)) for kind, line in kinds(chance).items()}
    sentences = (texts.sentences(CHARACTERS, chance.random, speeches) for _ in range(MIXED))
    files |= {f"mixed{i}.txt": mixed(chance, each) for i, each in enumerate(sentences)}
    for name, text in files.items():
        (folder / name).write_text(text[:CHARACTERS], encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
