"""Pages outside of vLLM's pool, and which request each belongs to; knows nothing of vLLM.

The pages of all layers (`slots.pages`) fill a pool of their own: all keys of all pages lie together, then all values. A
pool whose blocks are divided with layers of vLLM cannot hold them. There each request still has one block of vLLM for
its whole life, and the book says which page that block stands for.

Nobody tells when a request ends. Its block is given to another then, and its page is free as soon as all others were
used since: no more requests run together than there are pages.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class PageMap:
    """Pages for so many requests at once. Page 0 and block 0 are nobody's."""

    def __init__(self, requests: int, nbytes: int, device: torch.device) -> None:
        self.pool = torch.zeros(requests + 1, nbytes, dtype=torch.uint8, device=device)
        self.free = [*range(requests, 0, -1)]
        self.blocks: dict[int, int] = {}  # page of each block, the one that was used longest ago first
        self.table = torch.zeros(1, dtype=torch.int64, device=device)  # the same on the device, 0: no page

    def cover(self, blocks: int) -> None:
        """So many blocks there are."""
        if len(self.table) < blocks:
            self.table = torch.cat([self.table, self.table.new_zeros(blocks - len(self.table))])

    def pages(self, blocks: Tensor) -> Tensor:
        """The pages of `blocks` [B]; the device is not asked."""
        return self.table[blocks]

    def use(self, pages: Iterable[int]) -> None:
        """Requests in these pages run."""
        running = {*pages}
        last = {block: page for block, page in self.blocks.items() if page in running}
        self.blocks = {block: page for block, page in self.blocks.items() if page not in running} | last

    def begin(self, blocks: Iterable[int], running: Iterable[int]) -> None:
        """New requests in `blocks`, which get pages; all blocks of this step are `running`."""
        blocks, running = [*blocks], {*running}
        for block in blocks:
            if block not in self.blocks:
                self.blocks[block] = self.free.pop() if self.free else self._oldest(running)
        if blocks:
            # All of it: a sleep of level 2 has taken what the device held.
            known = torch.tensor([[*self.blocks], [*self.blocks.values()]], device=self.table.device)
            self.table.zero_()[known[0]] = known[1]
            self.use([self.blocks[block] for block in blocks])

    def _oldest(self, running: set[int]) -> int:
        block = next((block for block in self.blocks if block not in running), None)
        if block is None:
            raise RuntimeError(f"{len(running)} requests run together, and there are {len(self.blocks)} pages")
        self.table[block] = 0
        return self.blocks.pop(block)
