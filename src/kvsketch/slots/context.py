"""Where a table stands in its model: what is known before the first token and stays until the last."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvsketch.slots.codes import QuantBits
from kvsketch.slots.positions import Positions


@dataclass(frozen=True)
class LayerContext:
    """One layer of a model."""

    layer_idx: int
    num_layers: int
    seed: int = 0
    rank: int = -1  # place of the layer among those the method compresses; -1: its place among all
    compressed_layers: int = 0  # how many those are; 0: all
    rotary: tuple[float, ...] = ()  # radians per position of channel pairs (i, i + half); empty: none known
    positions: Positions = field(default_factory=Positions, repr=False, compare=False)  # shared by a cache's layers
    bits: QuantBits = field(default_factory=QuantBits)  # of keys and values as asked for, once the table is bounded
    first_head: int = 0  # number of the first KV head in the whole model (`heads`)
    head_group: str = ""  # processes among which the layer's heads are divided; "": this one holds them all

    def __post_init__(self) -> None:
        if self.rank < 0:
            object.__setattr__(self, "rank", self.layer_idx)
        if not self.compressed_layers:
            object.__setattr__(self, "compressed_layers", self.num_layers)
