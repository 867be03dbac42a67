"""The metadata of a GGUF file, read by gguf's own reader, which maps the file and leaves the weights on disk.

transformers rebuilds the tokenizer from a GGUF file but drops some of its special-token settings, so they are read
here. transformers also builds a model of any size that the header claims: a million blocks take minutes. So the claimed
sizes are checked against the tensors, and the tensors against the size of the file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType

BLOCK = re.compile(r"blk\.(\d+)\.")
# Sizes of which each is, or is a part of, the width of some tensor.
WIDTHS = (
    "embedding_length", "feed_forward_length", "vocab_size", "attention.head_count", "attention.head_count_kv",
    "attention.key_length", "attention.value_length", "rope.dimension_count", "expert_count",
    "expert_feed_forward_length",
)  # fmt: skip

Scalar = int | float | bool | str


class _Reader(GGUFReader):
    """gguf's reader returns an empty array beyond the end of a file; here that is an error."""

    data: Any

    def _get(self, offset: int, dtype: Any, count: int = 1, *args: Any, **kwargs: Any) -> Any:
        self.data = np.asarray(self.data)  # the same pages; a memmap takes five times as long to slice
        result = super()._get(offset, dtype, count, *args, **kwargs)
        if len(result) < count:
            raise ValueError(f"{count} numbers at byte {offset} of {len(self.data)}")
        return result


def read_metadata(path: Path) -> dict[str, Scalar]:
    """Every metadata entry that is not an array. Raises ValueError for a file that is not a complete GGUF file, or that
    claims a larger model than it holds.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: it does not start with b'GGUF'")
    try:
        reader = _Reader(path)
        fields = {name: field for name, field in reader.fields.items() if field.types[0] != GGUFValueType.ARRAY}
        metadata = {name: field.contents() for name, field in fields.items()}
        require_believable(metadata, {tensor.name: tensor.shape.tolist() for tensor in reader.tensors})
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise ValueError(f"the header of {path} is damaged or cut short ({error}); fetch the file again") from error
    return metadata


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
