"""Caches of several methods that read the same tokens in one forward, so that the weights of a model are read once.

    abreast = Abreast([one, other])                 # caches that have read the same prompts, of B rows each
    model(token.repeat(2, 1), past_key_values=abreast, use_cache=True)

Rows [C B] are those of the first cache, then those of the second. Single tokens alone: prompts are read before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from kvsketch import CompressedCache
from kvsketch.cache.attention import attend
from kvsketch.cache.layer import TAG, LayerView


class Abreast:
    """What a model takes for its cache."""

    is_compileable = False

    def __init__(self, caches: Sequence[CompressedCache]) -> None:
        seen = {cache.tokens_seen for cache in caches}
        if len(seen) > 1:
            raise ValueError(f"caches abreast have read as many tokens, not {sorted(seen)}")
        self.caches = caches
        # Where tokens stand is the same in all of them.
        self.layers, self.is_sliding = caches[0].layers, [False] * len(caches[0].layers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.caches[0], name)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        count = len(self.caches)
        pairs = zip(self.caches, key_states.chunk(count), value_states.chunk(count), strict=True)
        views = [getattr(cache.update(k, v, layer_idx, *args, **kwargs)[0], TAG) for cache, k, v in pairs]
        keys = key_states.view_as(key_states)
        setattr(keys, TAG, Views(views, value_states))
        return keys, value_states


@dataclass
class Views:
    """What a forward reads of a layer of all caches, in the place of a `LayerView`."""

    views: Sequence[LayerView]
    values: Tensor
    exact: bool = False
    appended: bool = True

    def __post_init__(self) -> None:
        self.handed_shape = self.values.shape
        table = SimpleNamespace(document=None)
        self.layer: Any = SimpleNamespace(forward=SimpleNamespace(mask_free=False), attends=False, table=table)

    def attend(self, query: Tensor, scale: float, mask: Any, bias: Tensor | None = None, **options: Any) -> Tensor:
        """Attention of the queries [C B, Hq, 1, D] of each cache over its own slots, which then takes the token."""
        count, parts = len(self.views), []
        masks = [None] * count if mask is None else mask.expand(len(query), *mask.shape[1:]).chunk(count)
        for view, asked, seen in zip(self.views, query.chunk(count), masks, strict=True):

            def read(view: LayerView = view, asked: Tensor = asked, seen: Any = seen) -> tuple[Tensor, None]:
                return view.attend(asked, scale, seen, **options).transpose(1, 2), None

            # The owner of a layer compresses, and each view is that of its own.
            parts.append(attend(view, nn.Module(), asked, scale, seen, read, bias, **options)[0])
        return torch.cat(parts).transpose(1, 2)

    def finish(self, module: nn.Module, query: Tensor, scale: float, mask: Any) -> None:
        """Each cache has taken its token."""
