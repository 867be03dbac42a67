"""Requests of rehearse in pages, without vLLM: they give what each gives alone, in whatever batches they come."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.integrations.vllm.settings import servable
from kvsketch.integrations.vllm.together import NOBODY, Together
from kvsketch.methods import parse_method
from kvsketch.methods.rehearse import Rehearse
from kvsketch.ops.common import dispatch
from kvsketch.slots.table import Place, SlotTable
from tests.ops.formula import needs_triton

LAYERS, HEADS, GROUP, SIZE = 2, 2, 2, 16
SCALE = 0.3


def places(method: Rehearse) -> list[Place]:
    angles = tuple(1 / 100 ** (i / 8) for i in range(8))
    return [Place(i, LAYERS, rotary=angles, bits=method.stored_bits) for i in range(LAYERS)]


class Alone:
    """A request by itself, as in a compressed cache."""

    def __init__(self, method: Rehearse) -> None:
        self.method, self.tables = method, [SlotTable(**vars(place)) for place in places(method)]

    def read(self, tokens: list[list[Tensor]]) -> list[Tensor]:
        """Attention in each layer of new tokens, q, k and v of each layer."""
        found = []
        for table, new in zip(self.tables, tokens, strict=True):
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in new)
            past = None
            if not table.empty:
                past = ops.Past(table.key_slots(), table.value_slots(), *table.log_weights())
            single = table.layout is not None and q.shape[2] == 1
            out = None if single else ops.chunk_attention(q, k, v, SCALE, past=past)
            table.append(k, v)
            if out is None:  # a new token is read as it is stored
                out = ops.weighted_attention(
                    q, table.keys, table.values, *table.read_weights(), SCALE, ragged=table.layout
                )
            table.note_scale(SCALE)
            self.method.compress(table, q)
            found.append(out[0].transpose(0, 1))
        self.method.settle(self.tables)
        return found

    def kept(self) -> list[list[list[int]]]:
        return [kept(table) for table in self.tables]


def kept(table: SlotTable) -> list[list[int]]:
    return [sorted(i for i in head if i >= 0) for head in table.index_slots()[0].tolist()]


class Served:
    """Five pages that hold what others have left there."""

    def __init__(self, text: str) -> None:
        self.generator = torch.Generator().manual_seed(0)
        method = servable(parse_method(text))
        assert isinstance(method, Rehearse)
        self.method, self.together = method, Together(method)
        for place in places(method):
            self.together.join(place, SCALE)
        shape = self.together.shape(LAYERS, HEADS, HEADS * GROUP, SIZE, SIZE, torch.float32)
        self.pool = torch.full((5, shape.nbytes), 255, dtype=torch.uint8)  # nan in every float
        self.together.open(shape, self.pool)
        self.alone: dict[int, Alone] = {}
        self.seen: dict[int, int] = {}

    def tokens(self, n: int) -> list[list[Tensor]]:
        sizes = [(n, heads, SIZE) for heads in (HEADS * GROUP, HEADS, HEADS)]
        return [[torch.randn(size, generator=self.generator) for size in sizes] for _ in range(LAYERS)]

    def forward(self, singles: list[int], prompts: dict[int, int]) -> None:
        """One forward: a token of each request in `singles`, and so many of each in `prompts`; all as if alone."""
        for page in prompts:
            if page not in self.seen:
                self.alone[page], self.seen[page] = Alone(self.method), 0
        news = {page: self.tokens(n) for page, n in (dict.fromkeys(singles, 1) | prompts).items()}
        found: dict[int, list[Tensor]] = {page: [] for page in news}
        for layer in range(LAYERS):
            if singles:
                batch = [torch.cat([news[page][layer][part] for page in singles]) for part in range(3)]
                seen = torch.tensor([self.seen[page] for page in singles])
                out = self.together.decode(layer, singles, seen, *batch)
                for i, page in enumerate(singles):
                    found[page].append(out[i : i + 1])
            for page in prompts:
                found[page].append(self.together.prefill(layer, page, self.seen[page], *news[page][layer]))
        self.together.finish([(page, self.seen[page]) for page in singles])
        for page, new in news.items():
            torch.testing.assert_close(found[page], self.alone[page].read(new), atol=2e-5, rtol=1e-4)
            self.seen[page] += new[0][0].shape[0]

    def kept(self, page: int) -> list[list[list[int]]]:
        assert self.together.pages is not None
        return [kept(self.together.pages.table(layer, page, self.seen[page])) for layer in range(LAYERS)]


@pytest.mark.parametrize("text", ["rehearse", "rehearse:share=layer:bits=16", "rehearse:share=head:value_bits=8"])
def test_requests_in_pages_are_requests_alone(text: str) -> None:
    served = Served(f"{text}:budget=40:wait=64:recent=8")
    served.forward([], {4: 90, 2: 70})
    for _ in range(3):
        served.forward([2, 4], {})
    served.forward([4], {3: 70, 2: 20})  # behind a prompt, tokens wait
    served.forward([3, 4], {2: 45})  # until they are too many
    served.forward([3], {4: 55})
    for _ in range(6):  # of which the last may come alone
        served.forward([4, 3], {})
    assert served.together.pages is not None
    assert served.together.pages.settled == [0, 0, 70 + 3 + 20 + 45, 70, 90 + 64]
    for page, request in served.alone.items():
        assert served.kept(page) == request.kept()
    del served.seen[3]  # the next request in that page
    served.forward([4], {3: 64})
    served.forward([3, 2], {})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("text", ["rehearse", "rehearse:share=layer:bits=16"])
def test_a_request_that_is_not_finite_harms_no_other(text: str, value: float) -> None:
    """Beside it, and in its page after it; its room for new tokens fills up meanwhile, so that it is settled twice."""
    served = Served(f"{text}:budget=40:wait=64:recent=8")
    served.forward([], {4: 90})

    def poison(n: int, seen: int) -> None:
        for layer, new in enumerate(served.tokens(n)):
            spoilt = [torch.full_like(part, value) for part in new]
            if n > 1:
                out = served.together.prefill(layer, 2, seen, *spoilt)
            else:
                out = served.together.decode(layer, [2], torch.tensor([seen]), *spoilt)
            assert not out.isfinite().any()
        served.together.finish([(2, seen)] if n == 1 else [])

    poison(70, 0)
    for count in range(66):
        poison(1, 70 + count)
    served.forward([4], {2: 80})
    for _ in range(5):
        served.forward([2, 4], {})
    for page, request in served.alone.items():
        assert served.kept(page) == request.kept()


def test_heads_and_layers_share_a_page() -> None:
    """With share=model a layer may hold more than its part; the page has room for the sum."""
    served = Served("rehearse:budget=24:wait=64:recent=8:refit=none")
    news = served.tokens(100)
    news[1][0] *= 8  # sharper attention, larger scores
    for layer in range(LAYERS):
        served.together.prefill(layer, 1, 0, *news[layer])
    served.together.finish()
    assert served.together.pages is not None
    counts = served.together.pages.kept[1].sum(-1).tolist()
    assert sum(counts) == LAYERS * HEADS * 24
    assert counts[1] > counts[0] + 10


def test_a_prompt_of_one_token_is_one_that_waits() -> None:
    served = Served("rehearse:budget=40:wait=64:bits=16")
    served.forward([], {1: 1})
    for _ in range(3):
        served.forward([1], {})
    assert served.together.pages is not None
    assert served.together.pages.settled[1] == 0
    assert served.kept(1) == served.alone[1].kept()


def test_memory_is_measured_without_a_page() -> None:
    together = Together(parse_method("rehearse:budget=40"))  # type: ignore[arg-type]
    served = Served("rehearse:budget=40")
    for place, new in zip(served.together.places, served.tokens(60), strict=True):
        together.prefill(together.join(place, SCALE), NOBODY, 0, *new)
    together.finish()
    assert not together.taken


@needs_triton
def test_the_kernels_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation of a step by its kernel, in Triton's interpreter where there is no GPU."""
    text = "rehearse:budget=16:wait=64:recent=4:refit=none"
    by_torch, by_kernel = Served(text), Served(text)
    for served in (by_torch, by_kernel):
        served.forward([], {3: 40, 1: 20})
    used: set[str] = set()

    def kernel_for(operation: str, device: torch.device) -> Any:
        used.add(operation)
        return importlib.import_module(f"kvsketch.ops.{operation}.kernel")

    q, k, v = by_torch.tokens(2)[0]
    wanted = by_torch.together.decode(1, [3, 1], torch.tensor([40, 20]), q, k, v)
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "kernel_for", kernel_for)
        found = by_kernel.together.decode(1, [3, 1], torch.tensor([40, 20]), q, k, v)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-3)
    assert used >= {"slot_update", "weighted_attention"}
    assert torch.equal(by_kernel.pool, by_torch.pool)
