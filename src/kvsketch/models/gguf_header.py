"""Read the scalar metadata at the start of a GGUF file, skipping the vocabulary arrays.

transformers rebuilds the tokenizer from a GGUF file but drops some of what the file says about special tokens; this is
the file's own word. Layout: magic, version, tensor count, entry count, then (key, type, value) entries, little-endian.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# GGUF type number -> struct format of a fixed-size value.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# A header string is a name or a chat template; more than this is a damaged length.
LONGEST_STRING = 10_000_000

Scalar = int | float | bool | str


def read_metadata(path: Path) -> dict[str, Scalar]:
    """Every metadata entry that is not an array. ValueError says what is wrong with a file that is no whole GGUF."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"{path} is not a GGUF file: it does not start with {MAGIC!r}")
        try:
            return _read_entries(file)
        except (ValueError, struct.error) as error:
            raise ValueError(f"the header of {path} is damaged or cut short ({error}); fetch the file again") from error


def _read_entries(file: BinaryIO) -> dict[str, Scalar]:
    version = _scalar(file, "I")
    if version not in VERSIONS:
        raise ValueError(f"GGUF version {version}, readable are {VERSIONS}")
    _tensor_count, entries = _scalar(file, "Q"), _scalar(file, "Q")
    metadata: dict[str, Scalar] = {}
    for _ in range(int(entries)):
        key, kind = _string(file), int(_scalar(file, "I"))
        if kind == ARRAY:
            _skip_array(file)
        else:
            metadata[key] = _string(file) if kind == STRING else _scalar(file, _scalar_format(kind))
    return metadata


def _scalar_format(kind: int) -> str:
    if kind not in SCALARS:
        raise ValueError(f"unknown value type {kind}")
    return SCALARS[kind]


def _scalar(file: BinaryIO, kind: str) -> Scalar:
    size = struct.calcsize("<" + kind)
    value: Scalar = struct.unpack("<" + kind, file.read(size))[0]
    return value


def _string(file: BinaryIO) -> str:
    length = int(_scalar(file, "Q"))
    if length > LONGEST_STRING:
        raise ValueError(f"a string of {length} bytes")
    data = file.read(length)
    if len(data) < length:
        raise ValueError("the file ends inside a string")
    return data.decode("utf-8")


def _skip_array(file: BinaryIO) -> None:
    kind, count = int(_scalar(file, "I")), int(_scalar(file, "Q"))
    if kind == STRING:
        for _ in range(count):
            file.seek(int(_scalar(file, "Q")), 1)
    else:
        file.seek(count * struct.calcsize("<" + _scalar_format(kind)), 1)
