"""Which model and which text a record was made with, by their bytes."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from kvsketch import models
from kvsketch.models.files import home, read_json, sha256_of, write_json


@functools.cache
def model_sha256(spec: str) -> str:
    """SHA-256 over the names and the SHA-256 of config.json and the weight files behind a model's name or folder.

    Hashes of files are remembered in kvsketch's cache folder by path, size and time, so that weights are read once.
    """
    folder = models.resolve(spec, progress=False)
    whole = hashlib.sha256()
    for file in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        whole.update(f"{file.name} {_remembered_sha256(file.resolve())}\n".encode())
    return whole.hexdigest()


def _remembered_sha256(file: Path) -> str:
    stat = file.stat()
    state = f"{file}:{stat.st_size}:{stat.st_mtime_ns}"
    note = home() / "hashes" / f"{hashlib.sha256(state.encode()).hexdigest()}.json"
    known = read_json(note).get("sha256")
    if isinstance(known, str):
        return known
    found = sha256_of(file)
    note.parent.mkdir(parents=True, exist_ok=True)
    write_json(note, {"file": file.name, "sha256": found})
    return found


def text_sha256(text: str) -> str:
    """Identity of a text."""
    return hashlib.sha256(text.encode()).hexdigest()
