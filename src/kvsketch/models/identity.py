"""The hash of the model that a record was made with."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from pathlib import Path

from kvsketch import models
from kvsketch.models.convert import identity_of
from kvsketch.models.files import home, read_json, sha256_of, write_json


@functools.cache
def model_sha256(spec: str) -> str:
    """The hash of the weights of a model, by its name or folder.

    For a built-in model it is the pinned hash of its file, because the converted copy may differ between releases of
    transformers. For others it is a SHA-256 over the names and hashes of config.json and the weight files. Hashes are
    stored in kvsketch's cache folder by path, size and time, so that weights are read once.
    """
    if spec in models.CATALOG:
        return models.CATALOG[spec].sha256
    folder = models.resolve(spec, progress=False)
    whole = hashlib.sha256()
    for file in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        whole.update(f"{file.name} {_remembered_sha256(file.resolve())}\n".encode())
    return whole.hexdigest()


def _remembered_sha256(file: Path) -> str:
    note = home() / "hashes" / f"{identity_of(file)}.json"
    known = read_json(note).get("sha256")
    if isinstance(known, str):
        return known
    result = sha256_of(file)
    # A hash that cannot be stored is computed again the next time.
    with contextlib.suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        write_json(note, {"file": file.name, "sha256": result})
    return result
