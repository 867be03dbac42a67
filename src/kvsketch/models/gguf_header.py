"""Read the scalar metadata at the start of a GGUF file, skipping the vocabulary arrays.

transformers rebuilds the tokenizer from a GGUF file but drops some of what the file says about special tokens; this is
the file's own word. Layout: magic, version, tensor count, entry count, then (key, type, value) entries, then (name,
dimensions, type, offset) of each tensor, little-endian.

A number in the header costs nothing to write, and transformers builds what it says: a million blocks take minutes. So
the sizes of the model are believed only as far as the tensors go, and those only as far as the file goes.
"""

from __future__ import annotations

import math
import os
import re
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
# Far above what any model has: some 50 entries, and some thousand tensors.
MOST_ENTRIES, MOST_TENSORS, MOST_DIMENSIONS = 10_000, 100_000, 8
WEIGHTS_PER_BYTE = 8  # no format packs more than one weight into a bit
BLOCK = re.compile(r"blk\.(\d+)\.")
# Sizes of which each is, or is a part of, the width of some tensor.
WIDTHS = (
    "embedding_length", "feed_forward_length", "vocab_size", "attention.head_count", "attention.head_count_kv",
    "attention.key_length", "attention.value_length", "rope.dimension_count", "expert_count",
    "expert_feed_forward_length",
)  # fmt: skip

Scalar = int | float | bool | str


def read_metadata(path: Path) -> dict[str, Scalar]:
    """Every metadata entry that is not an array. ValueError says what is wrong with a file that is no whole GGUF, or
    that claims a larger model than it holds.
    """
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"{path} is not a GGUF file: it does not start with {MAGIC!r}")
        try:
            return _Header(file).metadata()
        except (ValueError, struct.error) as error:
            raise ValueError(f"the header of {path} is damaged or cut short ({error}); fetch the file again") from error


class _Header:
    """A file behind its magic, and how long it is."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._size = file, os.fstat(file.fileno()).st_size

    def metadata(self) -> dict[str, Scalar]:
        version = self._scalar("I")
        if version not in VERSIONS:
            raise ValueError(f"GGUF version {version}, readable are {VERSIONS}")
        tensors, entries = int(self._scalar("Q")), int(self._scalar("Q"))
        if tensors > MOST_TENSORS or entries > MOST_ENTRIES:
            raise ValueError(f"it claims {tensors} tensors and {entries} entries")
        metadata = self._entries(entries)
        require_believable(metadata, dict(self._tensor() for _ in range(tensors)))
        return metadata

    def _entries(self, count: int) -> dict[str, Scalar]:
        metadata: dict[str, Scalar] = {}
        for _ in range(count):
            key, kind = self._string(), int(self._scalar("I"))
            if key in metadata:
                raise ValueError(f"{key} comes twice")
            if kind == ARRAY:
                self._skip_array()
            else:
                metadata[key] = self._string() if kind == STRING else self._scalar(_scalar_format(kind))
        return metadata

    def _tensor(self) -> tuple[str, list[int]]:
        """Name and dimensions of the next tensor."""
        name, dimensions = self._string(), int(self._scalar("I"))
        if dimensions > MOST_DIMENSIONS:
            raise ValueError(f"a tensor of {dimensions} dimensions")
        shape = [int(self._scalar("Q")) for _ in range(dimensions)]
        self._scalar("I"), self._scalar("Q")
        if math.prod(shape) > WEIGHTS_PER_BYTE * self._size:
            raise ValueError(f"tensor {name} of shape {shape} is larger than the file")
        return name, shape

    def _scalar(self, kind: str) -> Scalar:
        size = struct.calcsize("<" + kind)
        value: Scalar = struct.unpack("<" + kind, self._file.read(size))[0]
        return value

    def _string(self) -> str:
        length = int(self._scalar("Q"))
        if length > LONGEST_STRING:
            raise ValueError(f"a string of {length} bytes")
        data = self._file.read(length)
        if len(data) < length:
            raise ValueError("the file ends inside a string")
        return data.decode("utf-8")

    def _skip_array(self) -> None:
        kind, count = int(self._scalar("I")), int(self._scalar("Q"))
        if kind == STRING:
            for _ in range(count):
                self._skip(int(self._scalar("Q")))
        else:
            self._skip(count * struct.calcsize("<" + _scalar_format(kind)))

    def _skip(self, size: int) -> None:
        if size > self._size:
            raise ValueError(f"an array of {size} bytes")
        self._file.seek(size, os.SEEK_CUR)


def require_believable(metadata: dict[str, Scalar], tensors: dict[str, list[int]]) -> None:
    """Raises ValueError when the header claims more blocks, or wider ones, than the tensors have."""
    blocks = len({match[1] for match in map(BLOCK.match, tensors) if match})
    widest = max((width for shape in tensors.values() for width in shape), default=0)
    for key, claimed in metadata.items():
        name = key.partition(".")[2]
        limit = blocks if name == "block_count" else widest if name in WIDTHS else None
        if limit is not None and isinstance(claimed, (int, float)) and claimed > limit:
            holds = f"tensors of {blocks} blocks" if name == "block_count" else f"no tensor wider than {widest}"
            raise ValueError(f"it claims {key}={claimed} and holds {holds}")


def _scalar_format(kind: int) -> str:
    if kind not in SCALARS:
        raise ValueError(f"unknown value type {kind}")
    return SCALARS[kind]
