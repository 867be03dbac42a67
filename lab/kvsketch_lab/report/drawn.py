"""Figures of docs/ that need not be drawn again: neither they nor what they follow from has changed.

Drawing is more than half of the work of `kvsketch report --docs`. build/figures.json notes the figures of the last run
in a checkout, and a hash of them, of the records, of the code of the laboratory and of the libraries that draw.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path

from kvsketch_lab.records import write_whole

NOTE = Path("build") / "figures.json"
LIBRARIES = ("matplotlib", "numpy", "pillow")
CODE = Path(__file__).parents[1]


def drawn(root: Path, draw: Callable[[], list[Path]]) -> list[Path]:
    """The figures of a checkout, in the order in which `draw` returns them; it is called if anything has changed."""
    note = root / NOTE
    known = json.loads(note.read_text(encoding="utf-8")) if note.is_file() else {"figures": []}
    figures = [root / name for name in known["figures"]]
    if not figures or not all(map(Path.is_file, figures)) or known["hash"] != _hash(root, figures):
        figures = draw()
        told = {"hash": _hash(root, figures), "figures": [path.relative_to(root).as_posix() for path in figures]}
        write_whole(note, json.dumps(told, indent=1).encode())
    return figures


def _hash(root: Path, figures: list[Path]) -> str:
    result = hashlib.sha256(" ".join(map(importlib.metadata.version, LIBRARIES)).encode())
    for path in (*sorted((root / "results").rglob("*.jsonl*")), *sorted(CODE.rglob("*.py")), *figures):
        result.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return result.hexdigest()
