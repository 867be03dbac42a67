"""Requests in pages, without vLLM: they give what each gives alone, in whatever batches they come."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.integrations.vllm.paged import PagedLayer
from kvsketch.integrations.vllm.settings import servable
from kvsketch.methods import parse_method
from kvsketch.methods.received import Scores
from kvsketch.ops.common import dispatch
from kvsketch.slots import LayerContext, SlotTable, rollback
from kvsketch.slots.codes import QuantBits, SlotCodes
from kvsketch.slots.pages import Pages
from tests.helpers.common import also
from tests.ops.formula import needs_triton

HEADS, GROUP, SIZE = 2, 2, 8
METHODS = [
    "streamingllm:budget=12:sinks=2",
    "uniform:budget=12:sinks=2:recent=4",
    "kcenter:budget=12:recent=4",
    "h2o:budget=12",
    "keyformer:budget=12:horizon=6",
    "keyformer:budget=12:compat=official",
    "snapkv:budget=12:window=4",
    "pyramidkv:budget=12:window=4",
]


QUANTISED = [f"{text}:bits=4" for text in METHODS] + [
    "streamingllm:budget=12:sinks=2:bits=8",
    "h2o:budget=12:key_bits=4",
    "keyformer:budget=12:horizon=6:value_bits=3",
    "snapkv:budget=12:window=4:key_bits=4:value_bits=2",
]


class Alone:
    """A request by itself: a table that is exact until something has to go, as in a compressed cache.

    A quantised one is coded after its first tokens, as a cache does with 64 of them. A first token that comes alone has
    no mean to be coded around.
    """

    def __init__(self, text: str, place: LayerContext, options: dict[str, Any] | None = None) -> None:
        self.method, self.table, self.options = parse_method(text), SlotTable(place), options or {}

    def read(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        table, past = self.table, None
        if table.context.bits and table.empty and q.shape[2] == 1:
            self._begin_around_zero(k, v)
        if table.context.bits and not table.empty and q.shape[2] == 1:
            table.append(k, v)
            out = ops.weighted_attention(q, *table.read()[:4], 0.3, **self.options)
        else:
            if not table.empty:
                past = ops.Past(table.key_slots(), table.value_slots(), *table.log_weights())
            out = ops.chunk_attention(q, k, v, 0.3, past=past, **self.options)
            table.append(k, v, whole=1000 if self.method.name == "pyramidkv" else None)
        table.forward.scale = 0.3
        self.method.compress(table, q)
        if table.context.bits and table.exact:
            self.method.bound(table, table.seen)
        return out[0].transpose(0, 1)

    def _begin_around_zero(self, k: Tensor, v: Tensor) -> None:
        table = self.table
        table.append(torch.zeros_like(k), torch.zeros_like(v), whole=1000)
        table.bound(self.method.budget_tokens(table))
        rollback.drop_in_order(table, 1)
        table.count(prompt_tokens=0)
        if self.method.State is Scores:
            table.state_of(Scores).score = torch.zeros(table.shape, device=k.device)
        for slots in (table.keys, table.values):
            if isinstance(slots, SlotCodes):
                slots.exact_at.fill_(-1)


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Served:
    """A layer with six pages, which lie apart and hold what others have left there."""

    def __init__(self, text: str, options: dict[str, Any] | None = None, size: int = SIZE) -> None:
        self.generator, self.size = torch.Generator().manual_seed(0), size
        method = servable(parse_method(text))
        self.place = LayerContext(1, 3, first_head=4, bits=method.stored_bits)
        self.layer = PagedLayer(method, self.place, 0.3, options or {})
        self.shape = self.layer.page_shape(HEADS, size, size, torch.float32)
        # nan in every float
        self.pool = torch.full((6, self.shape.nbytes + 64), 255, dtype=torch.uint8, device=DEVICE)
        self.pages = Pages(self.shape, self.pool[:, : self.shape.nbytes])

    def tokens(self, n: int) -> list[Tensor]:
        sizes = ((n, heads, self.size) for heads in (HEADS * GROUP, HEADS, HEADS))
        return [torch.randn(size, generator=self.generator).to(DEVICE) for size in sizes]

    def kept(self, page: int, seen: int) -> list[list[int]]:
        return kept(self.pages.take(whole(page), seen))


def kept(table: SlotTable) -> list[list[int]]:
    return [sorted(i for i in head if i >= 0) for head in table.index_slots()[0].tolist()]


def whole(*numbers: int) -> Tensor:
    return torch.tensor(numbers, device=DEVICE)


CAPPED = {"softcap": 0.5}
WITH_SINKS = {"sink_logits": torch.tensor([-1.0, 0.0, 1.0, 3.0], device=DEVICE)}


@pytest.mark.parametrize(
    ("text", "options"),
    [
        *((text, {}) for text in METHODS + QUANTISED[-4:]),
        *also(*((text, {}) for text in QUANTISED[:-4])),
        ("h2o:budget=12", CAPPED),
        ("snapkv:budget=12:window=4", CAPPED),
        ("h2o:budget=12", WITH_SINKS),
        ("snapkv:budget=12:window=4", CAPPED | WITH_SINKS),
    ],
)
def test_requests_in_pages_are_requests_alone(text: str, options: dict[str, Any]) -> None:
    served = Served(text, options)
    before = served.pool.clone()
    alone = {page: Alone(text, served.place, options) for page in (4, 2, 3)}
    seen = dict.fromkeys(alone, 0)

    def prompt(page: int, n: int) -> None:
        new = served.tokens(n)
        result = served.layer.prefill(served.pages, whole(page), seen[page], *new)
        torch.testing.assert_close(result, alone[page].read(*new), atol=1e-5, rtol=1e-4)
        seen[page] += n

    def step(*batch: int) -> None:
        new = served.tokens(len(batch))
        counts = whole(*(seen.get(page, -1) for page in batch))
        result = served.layer.decode(served.pages, whole(*batch), counts, *new)
        for i, page in enumerate(batch):
            if page in alone:
                wanted = alone[page].read(*(x[i : i + 1] for x in new))
                torch.testing.assert_close(result[i : i + 1], wanted, atol=1e-5, rtol=1e-4)
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
        assert served.kept(page, seen[page]) == kept(request.table)
    assert torch.equal(served.pool[[0, 1, 5]], before[[0, 1, 5]]), "a page of nobody was written"
    end = served.shape.nbytes
    assert torch.equal(served.pool[:, end:], before[:, end:]), "bytes between the pages were written"


@pytest.mark.parametrize("text", ["h2o:budget=12", "snapkv:budget=12:window=4:bits=4"])
def test_memory_is_measured_of_a_prompt_and_of_chunks_behind_it(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served, read, prefill = Served(text), [], PagedLayer.prefill
    before = served.pool.clone()

    def spied(self: PagedLayer, pages: Pages, page: Tensor, seen: int, *tokens: Tensor) -> Tensor:
        read.append((seen, len(tokens[0])))
        return prefill(self, pages, page, seen, *tokens)

    monkeypatch.setattr(PagedLayer, "prefill", spied)
    served.layer.measure(served.shape, *served.tokens(70))
    assert read == [(0, 70), (70, 70), (140, 2)]
    assert torch.equal(served.pool, before), "pages of requests were written"


@pytest.mark.parametrize("value", [float("nan"), *also(float("inf"))])
@pytest.mark.parametrize("text", METHODS + QUANTISED[-4:] + also(*QUANTISED[:-4]))
def test_a_request_that_was_not_finite_leaves_nothing_in_its_page(text: str, value: float) -> None:
    """The next one there begins with a prompt, or with a single token, and is as it would be alone."""
    served = Served(text)
    for begins in (7, 1):
        poison = [torch.full_like(part, value) for part in served.tokens(20)]
        served.layer.prefill(served.pages, whole(4), 0, *poison)
        for count in range(5):
            one = [part[:1] for part in poison]
            served.layer.decode(served.pages, whole(4), whole(20 + count), *one)
        alone, seen = Alone(text, served.place), 0
        for new in (begins, 1, 1, 1):
            tokens = served.tokens(new)
            if new > 1:
                result = served.layer.prefill(served.pages, whole(4), seen, *tokens)
            else:
                result = served.layer.decode(served.pages, whole(4), whole(seen), *tokens)
            torch.testing.assert_close(result, alone.read(*tokens), atol=1e-5, rtol=1e-4)
            seen += new
        assert served.kept(4, seen) == kept(alone.table)


def test_a_page_is_the_same_under_the_defaults_of_a_loader() -> None:
    """vLLM asks for the shape of a page where new tensors have the dtype and the device of the model."""
    text = "h2o:budget=12:bits=4"
    wanted = Served(text).shape
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            result = PagedLayer(parse_method(text), LayerContext(1, 3, bits=QuantBits(4, 4)), 0.3)
            shape = result.page_shape(HEADS, SIZE, SIZE, torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    assert shape.planes == wanted.planes and shape.nbytes == wanted.nbytes


@needs_triton
@pytest.mark.parametrize("bits", [16, 4])
def test_the_kernels_do_the_same(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation of a step by its kernel, in Triton's interpreter where there is no GPU."""
    by_torch, by_kernel = (Served(f"h2o:budget=2:bits={bits}", size=16) for _ in range(2))

    def kernel_for(operation: str, device: torch.device) -> Any:
        used.add(operation)
        return importlib.import_module(f"kvsketch.ops.{operation}.kernel")

    used: set[str] = set()
    for count in range(4):
        rows, seen, new = whole(4, 0), whole(count, -1), by_torch.tokens(2)
        wanted = by_torch.layer.decode(by_torch.pages, rows, seen, *new)
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "kernel_for", kernel_for)
            result = by_kernel.layer.decode(by_kernel.pages, rows, seen, *new)
        torch.testing.assert_close(result[0], wanted[0], atol=1e-5, rtol=1e-4)
    assert used == {"page_rows", "slot_update", "weighted_attention", "attention_mass"}
    assert by_kernel.kept(4, 4) == by_torch.kept(4, 4)
    assert torch.equal(by_kernel.pool[:4], by_torch.pool[:4])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("text", METHODS + QUANTISED)
def test_a_captured_step_serves_other_requests(text: str) -> None:
    """vLLM records the step once and replays it for whatever requests its rows stand for."""
    eager, captured = Served(text), Served(text)
    for served in (eager, captured):
        served.layer.prefill(served.pages, whole(4), 0, *served.tokens(30))
    rows, seen, new = whole(0, 0, 0), whole(-1, -1, -1), captured.tokens(3)
    captured.layer.decode(captured.pages, rows, seen, *new)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = captured.layer.decode(captured.pages, rows, seen, *new)
    for count in range(12):
        fresh = eager.tokens(3)
        rows.copy_(whole(4, 2, 0)), seen.copy_(whole(30 + count, count, -1))
        for place, values in zip(new, fresh, strict=True):
            place.copy_(values)
        graph.replay()
        wanted = eager.layer.decode(eager.pages, whole(4, 2), whole(30 + count, count), *(x[:2] for x in fresh))
        torch.testing.assert_close(out[:2], wanted, atol=1e-5, rtol=1e-4)
    for page, tokens in ((4, 42), (2, 12)):
        assert captured.kept(page, tokens) == eager.kept(page, tokens)
