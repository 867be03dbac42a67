"""What the layers of a cache know of the forward that is under way: one object for all of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from kvsketch.cache.masks import Prompt

T = TypeVar("T")


@dataclass
class Forward:
    """How tokens come, and how layers work on them."""

    chunk: int | None = None  # tokens of a prompt that are read at once; None: all of them
    prompt: Prompt | None = None  # one that comes in several forwards; tells the padding without masks
    mask_free: bool = False  # single tokens without a mask: a bounded table holds no padding
    short_mask: bool = False  # all tables are bounded, and single tokens come without a mask
    side_stream: Any = None  # side stream to compress on (decode.captured.SideStream); None: the current one
    looked_up: dict[str, tuple[Any, Any, Any]] = field(default_factory=dict, repr=False)  # in the mask, by name

    def once(self, name: str, mask: Any, seen: int, find: Callable[[], T]) -> T:
        """What `find` finds in a mask after `seen` tokens: layers share it, and the device is asked once."""
        if mask is None:
            return find()
        state = seen, mask._version if isinstance(mask, Tensor) and not mask.is_inference() else 0
        known = self.looked_up.get(name)
        if known is None or known[0]() is not mask or known[1] != state:
            known = self.looked_up[name] = weakref.ref(mask), state, find()
        answer: T = known[2]
        return answer

    @contextmanager
    def during(self, **known: Any) -> Iterator[None]:
        """Inside the block these fields have other values."""
        before = {name: getattr(self, name) for name in known}
        vars(self).update(known)
        try:
            yield
        finally:
            vars(self).update(before)
