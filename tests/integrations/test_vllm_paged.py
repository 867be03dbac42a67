"""Requests in pages, without vLLM: they give what each gives alone, in whatever batches they come."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.integrations.vllm.paged import PagedLayer
from kvsketch.integrations.vllm.settings import servable
from kvsketch.methods import parse_method
from kvsketch.slots.pages import Pages
from kvsketch.slots.table import Place, SlotTable

HEADS, GROUP, SIZE = 2, 2, 8
METHODS = [
    "streamingllm:budget=12:sinks=2",
    "uniform:budget=12:sinks=2:recent=4",
    "kcenter:budget=12:recent=4:weights=count",
    "h2o:budget=12",
    "keyformer:budget=12:horizon=6",
    "snapkv:budget=12:window=4",
    "pyramidkv:budget=12:window=4",
]


class Alone:
    """A request by itself: a table that is exact until something has to go, as in a compressed cache."""

    def __init__(self, text: str, place: Place) -> None:
        self.method, self.table = parse_method(text), SlotTable(**vars(place))

    def read(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        table, past = self.table, None
        if not table.empty:
            past = ops.Past(table.key_slots(), table.value_slots(), *table.log_weights())
        out = ops.chunk_attention(q, k, v, 0.3, past=past)
        table.append(k, v, whole=1000 if self.method.name == "pyramidkv" else None)
        table.note_scale(0.3)
        self.method.compress(table, q)
        return out[0].transpose(0, 1)

    def kept(self) -> list[list[int]]:
        return [sorted(i for i in head if i >= 0) for head in self.table.index_slots()[0].tolist()]


@pytest.mark.parametrize("text", METHODS)
def test_requests_in_pages_are_requests_alone(text: str) -> None:
    generator = torch.Generator().manual_seed(0)
    place = Place(1, 3, first_head=4)
    layer = PagedLayer(servable(parse_method(text)), place, 0.3)
    shape = layer.page_shape(HEADS, SIZE, SIZE, torch.float32)
    # Pages lie apart and hold what others have left there.
    pool = torch.full((6, shape.nbytes + 64), 63, dtype=torch.uint8)
    before = pool.clone()
    pages = Pages(shape, pool[:, : shape.nbytes])

    def tokens(n: int) -> tuple[Tensor, Tensor, Tensor]:
        q = torch.randn(n, HEADS * GROUP, SIZE, generator=generator)
        return q, *(torch.randn(n, HEADS, SIZE, generator=generator) for _ in range(2))

    lengths = {4: 30, 2: 5, 3: 1}  # page: tokens of the prompt
    alone = {page: Alone(text, place) for page in lengths}
    seen = dict.fromkeys(lengths, 0)

    def prompt(page: int, n: int) -> None:
        new = tokens(n)
        found = layer.prefill(pages, torch.tensor([page]), seen[page], *new)
        torch.testing.assert_close(found, alone[page].read(*new), atol=1e-5, rtol=1e-4)
        seen[page] += n

    def step(*batch: int) -> None:
        new = tokens(len(batch))
        rows, counts = torch.tensor(batch), torch.tensor([seen.get(page, -1) for page in batch])
        found = layer.decode(pages, rows, counts, *new)
        for i, page in enumerate(batch):
            if page in alone:
                wanted = alone[page].read(*(x[i : i + 1] for x in new))
                torch.testing.assert_close(found[i : i + 1], wanted, atol=1e-5, rtol=1e-4)
                seen[page] += 1

    prompt(4, 30)
    step(3, 4, 0)  # the only token of a prompt; page 0 stands for no request
    prompt(2, 5)
    for _ in range(5):
        step(4, 2, 3, 0, 0)
    prompt(4, 7)  # a second chunk
    for _ in range(9):
        step(3, 4)
    for page, request in alone.items():
        table = pages.one(place, layer.method.State, torch.tensor([page]), seen[page])
        assert [sorted(i for i in head if i >= 0) for head in table.index_slots()[0].tolist()] == request.kept()
    assert torch.equal(pool[[0, 1, 5]], before[[0, 1, 5]]), "a page of nobody was written"
    assert torch.equal(pool[:, shape.nbytes :], before[:, shape.nbytes :]), "bytes between the pages were written"
