"""Requests of rehearse in pages, without vLLM: they give what each gives alone, in whatever batches they come."""

from __future__ import annotations

import gc
import importlib
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvsketch import ops
from kvsketch.integrations.vllm.joint_layers import NOBODY, JointLayers
from kvsketch.integrations.vllm.settings import servable
from kvsketch.methods import Rehearse, parse_method
from kvsketch.methods.rehearse import rebuild
from kvsketch.ops.common import dispatch
from kvsketch.slots import LayerContext, SlotTable
from tests.helpers.common import also
from tests.ops.formula import needs_triton

LAYERS, HEADS, GROUP, SIZE = 2, 2, 2, 16
SCALE = 0.3


def places(method: Rehearse) -> list[LayerContext]:
    angles = tuple(1 / 100 ** (i / 8) for i in range(8))
    return [LayerContext(i, LAYERS, rotary=angles, bits=method.stored_bits) for i in range(LAYERS)]


class Alone:
    """A request by itself, as in a compressed cache."""

    def __init__(self, method: Rehearse, options: dict[str, Any]) -> None:
        self.method, self.tables = method, [SlotTable(place) for place in places(method)]
        self.options = options

    def read(self, tokens: list[list[Tensor]]) -> list[Tensor]:
        """Attention in each layer of new tokens, q, k and v of each layer."""
        result = []
        for table, new in zip(self.tables, tokens, strict=True):
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in new)
            past = None
            if not table.empty:
                past = ops.Past(table.key_slots(), table.value_slots(), *table.log_weights())
            single = table.layout is not None and q.shape[2] == 1
            out = None if single else ops.chunk_attention(q, k, v, SCALE, past=past, **self.options)
            table.append(k, v)
            if out is None:  # a new token is read as it is stored
                out = ops.weighted_attention(q, *table.as_stored()[:4], SCALE, ragged=table.layout, **self.options)
            table.forward.scale = SCALE
            self.method.compress(table, q)
            result.append(out[0].transpose(0, 1))
        self.method.settle(self.tables)
        return result

    def kept(self) -> list[list[list[int]]]:
        return [kept(table) for table in self.tables]


def kept(table: SlotTable) -> list[list[int]]:
    return [sorted(i for i in head if i >= 0) for head in table.index_slots()[0].tolist()]


class Served:
    """Five pages that hold what others have left there."""

    def __init__(self, text: str, options: dict[str, Any] | None = None) -> None:
        self.generator, self.options = torch.Generator().manual_seed(0), options or {}
        method = servable(parse_method(text))
        assert isinstance(method, Rehearse)
        self.method, self.joint = method, JointLayers(method)
        for place in places(method):
            self.joint.join(place, SCALE, self.options)
        shape = self.joint.shape(LAYERS, HEADS, HEADS * GROUP, SIZE, SIZE, torch.float32, longest=400)
        self.pool = torch.full((5, shape.nbytes), 255, dtype=torch.uint8)  # nan in every float
        self.alone: dict[int, Alone] = {}
        self.seen: dict[int, int] = {}
        self.out: list[Tensor] = []

    def tokens(self, n: int) -> list[list[Tensor]]:
        sizes = [(n, heads, SIZE) for heads in (HEADS * GROUP, HEADS, HEADS)]
        return [[torch.randn(size, generator=self.generator) for size in sizes] for _ in range(LAYERS)]

    def forward(self, singles: list[int], prompts: dict[int, int]) -> None:
        """One forward: a token of each request in `singles`, and so many of each in `prompts`; all as if alone."""
        for page in prompts:
            if page not in self.seen:
                self.alone[page], self.seen[page] = Alone(self.method, self.options), 0
        news = {page: self.tokens(n) for page, n in (dict.fromkeys(singles, 1) | prompts).items()}
        result: dict[int, list[Tensor]] = {page: [] for page in news}
        self.joint.catch_up(self.pool, self.seen.items())
        self.joint.begin(self.pool)
        for layer in range(LAYERS):
            if singles:
                batch = [torch.cat([news[page][layer][part] for page in singles]) for part in range(3)]
                seen = torch.tensor([self.seen[page] for page in singles])
                out = self.joint.decode(layer, torch.tensor(singles), seen, *batch)
                for i, page in enumerate(singles):
                    result[page].append(out[i : i + 1])
            for page in prompts:
                result[page].append(self.joint.prefill(layer, page, self.seen[page], *news[page][layer]))
        self.joint.finish()
        for page, new in news.items():
            # Layers decide as one table here: rounding may move a code.
            atol, rtol = (3e-2, 3e-2) if self.method.stored_bits else (2e-5, 1e-4)
            torch.testing.assert_close(result[page], self.alone[page].read(new), atol=atol, rtol=rtol)
            self.seen[page] += new[0][0].shape[0]

    def kept(self, page: int) -> list[list[list[int]]]:
        self.joint.catch_up(self.pool, self.seen.items())
        tables = self.joint.pages(self.pool).take(page, self.seen[page], self.joint.settled[page])
        return [kept(table) for table in tables]


@pytest.mark.parametrize("share", ["model", "layer", "head"])
def test_the_heads_of_a_later_process_share_a_budget_as_those_of_the_first(
    share: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tensor parallel their numbers in the model do not begin at 0, and vLLM's processes share nothing."""
    results, own = [], places
    for first in (0, HEADS):
        monkeypatch.setattr(
            sys.modules[__name__], "places",
            lambda method, first=first: [replace(each, first_head=first) for each in own(method)],
        )  # fmt: skip
        served = Served(f"rehearse:budget=40:wait=64:recent=8:bits=16:share={share}")
        served.forward([], {1: 90})
        served.forward([1], {2: 70})
        results.append([served.kept(page) for page in (1, 2)])
    assert results[0] == results[1]


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
    for page, request in served.alone.items():
        assert served.kept(page) == request.kept()
    assert served.joint.settled == {2: 70 + 3 + 20 + 45, 3: 70, 4: 90 + 64}
    del served.seen[3]  # the next request in that page
    served.forward([4], {3: 64})
    served.forward([3, 2], {})


def test_softcap_and_sinks_of_a_layer_count() -> None:
    options = {"softcap": 0.5, "sink_logits": torch.tensor([-1.0, 0.0, 1.0, 3.0])}
    served = Served("rehearse:budget=40:wait=64:recent=8:bits=16", options)
    served.forward([], {4: 90, 2: 70})
    served.forward([4], {2: 45})
    for _ in range(3):
        served.forward([2, 4], {})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("rehearse", float("nan")),
        ("rehearse:share=layer:bits=16", float("inf")),
        *also(("rehearse", float("inf")), ("rehearse:share=layer:bits=16", float("nan"))),
    ],
)
def test_a_request_that_is_not_finite_harms_no_other(text: str, value: float) -> None:
    """Beside it, and in its page after it; its room for new tokens fills up meanwhile, so that it is settled twice."""
    served = Served(f"{text}:budget=40:wait=64:recent=8")
    served.forward([], {4: 90})

    def poison(n: int, seen: int) -> None:
        served.joint.catch_up(served.pool, [(2, seen)])
        served.joint.begin(served.pool)
        for layer, new in enumerate(served.tokens(n)):
            spoilt = [torch.full_like(part, value) for part in new]
            if n > 1:
                out = served.joint.prefill(layer, 2, seen, *spoilt)
            else:
                out = served.joint.decode(layer, torch.tensor([2]), torch.tensor([seen]), *spoilt)
            assert not out.isfinite().any()
        served.joint.finish()

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
    served.joint.begin(served.pool)
    for layer in range(LAYERS):
        served.joint.prefill(layer, 1, 0, *news[layer])
    served.joint.finish()
    counts = served.joint.pages(served.pool).planes["kept"][1].sum(-1).tolist()
    assert sum(counts) == LAYERS * HEADS * 24
    assert counts[1] > counts[0] + 10


def test_a_prompt_of_one_token_is_one_that_waits() -> None:
    served = Served("rehearse:budget=40:wait=64:bits=16")
    served.forward([], {1: 1})
    for _ in range(3):
        served.forward([1], {})
    assert served.joint.settled[1] == 0
    assert served.kept(1) == served.alone[1].kept()


def test_memory_is_measured_without_a_page() -> None:
    joint = JointLayers(parse_method("rehearse:budget=40"))  # type: ignore[arg-type]
    served = Served("rehearse:budget=40")
    joint.begin(None)
    for place, new in zip(served.joint.places, served.tokens(60), strict=True):
        joint.prefill(joint.join(place, SCALE), NOBODY, 0, *new)
    joint.finish()
    assert joint.forward is None and not joint.settled


def lies_in(tensor: Tensor, storages: set[int]) -> bool:
    try:
        return tensor.untyped_storage().data_ptr() in storages
    except RuntimeError:  # functional tensors, which other tests' torch.compile may leave, have no memory
        return False


def tensors_over(storages: set[int]) -> int:
    """Tensors that lie in these pieces of memory."""
    gc.collect()
    result = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and each.device.type == "cpu"]
    return sum(lies_in(each, storages) for each in result)


def test_tensors_without_memory_are_not_counted() -> None:
    tensor = torch.ones(3)
    traced = torch._to_functional_tensor(tensor)
    assert tensors_over({tensor.untyped_storage().data_ptr()}) == 1
    assert torch.equal(torch._from_functional_tensor(traced), tensor)


def test_nothing_of_a_forward_outlives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM measures memory with forwards over pages that it gives back, and calls what is held then its own."""
    served = Served("rehearse:budget=40:wait=64:recent=8")
    served.forward([], {1: 90, 2: 70})
    for _ in range(64):  # the last is followed by a rehearsal
        served.forward([1, 2], {})
    served.joint.catch_up(served.pool, served.seen.items())
    assert tensors_over({served.pool.untyped_storage().data_ptr()}) == 1
    news = served.tokens(100)
    held = {each.untyped_storage().data_ptr() for layer in news for each in layer}
    known, rehearsed = dict(served.joint.settled), []
    catch_up = Rehearse.catch_up

    def noted(method: Rehearse, tables: list[SlotTable]) -> None:
        rehearsed.append(tables[0].seen)
        catch_up(method, tables)

    monkeypatch.setattr(Rehearse, "catch_up", noted)
    served.joint.begin(None)
    for layer in range(LAYERS):
        served.joint.prefill(layer, NOBODY, 0, *news[layer])
    served.joint.finish()
    assert tensors_over(held) == 3 * LAYERS
    assert rehearsed == [99 + 64], "what new tokens take is measured too"
    assert served.joint.settled == known


@pytest.mark.parametrize("count", [200, 192])
def test_prompts_of_whole_chunks_and_others_are_tried_before_the_first_request(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their refits are different programs on a GPU, where the first request would wait for them to be compiled."""
    served, kinds = Served("rehearse:budget=40:wait=64:recent=8:chunk=64"), []
    refit_layers = rebuild.refit_layers

    def noted(layers: Any, *given: Any) -> Any:
        kinds.append({bool(layer.marks[1].all()) for layer in layers} == {True})
        return refit_layers(layers, *given)

    monkeypatch.setattr(rebuild, "refit_layers", noted)
    served.joint.begin(None)
    news = served.tokens(count)
    for layer in range(LAYERS):
        served.joint.prefill(layer, NOBODY, 0, *news[layer])
    served.joint.finish()
    assert kinds[:2] == [count == 192, count != 192]


def test_a_later_chunk_holds_no_product_that_its_keys_are_a_part_of() -> None:
    """vLLM's layers give views of one tensor: all layers of a long chunk would hold their queries too."""
    served = Served("rehearse:budget=40:wait=64:recent=8")
    served.forward([], {1: 90})
    served.joint.begin(served.pool)
    whole = torch.randn(100, (HEADS * GROUP + 2 * HEADS) * SIZE)
    new = [x.unflatten(1, (-1, SIZE)) for x in whole.split([HEADS * GROUP * SIZE, HEADS * SIZE, HEADS * SIZE], 1)]
    served.joint.prefill(0, 1, 90, *new)
    assert tensors_over({whole.untyped_storage().data_ptr()}) == 1 + len(new)


def test_rows_of_no_request_change_no_page() -> None:
    """Rows that fill up a captured step stand for vLLM's null block, whatever is written there."""
    text = "rehearse:budget=40:wait=64:recent=8"
    served, padded = Served(text), Served(text)
    for each in (served, padded):
        each.forward([], {1: 90, 3: 70})
    new = served.tokens(4)
    for each, rows in ((served, 2), (padded, 4)):
        each.joint.begin(each.pool)
        pages, seen = torch.tensor([3, 1, 0, 0])[:rows], torch.tensor([70, 90, -1, 500])[:rows]
        outs = [each.joint.decode(layer, pages, seen, *(x[:rows] for x in new[layer])) for layer in range(LAYERS)]
        each.joint.finish()
        each.seen, each.out = {1: 91, 3: 71}, [out[:2] for out in outs]
    torch.testing.assert_close(padded.out, served.out)
    for page in (1, 3):
        ours, theirs = (each.joint.pages(each.pool).planes for each in (served, padded))
        for name, plane in ours.items():
            assert torch.equal(plane[page].view(torch.uint8), theirs[name][page].view(torch.uint8)), name


def test_a_first_token_that_comes_alone_starts_its_page() -> None:
    """A captured step takes a prompt of one token like any other; what the page held before is not seen."""
    served = Served("rehearse:budget=40:wait=64:bits=16")
    served.forward([], {2: 90})
    served.alone[2], served.seen[2] = Alone(served.method, served.options), 0
    served.joint.start(served.pool, [2])
    for _ in range(5):
        served.forward([2], {})
    assert served.kept(2) == served.alone[2].kept() == [[[0, 1, 2, 3, 4]] * HEADS] * LAYERS


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="the pool is on the CPU, where kernels need the interpreter")
@pytest.mark.parametrize("bits", [4, 16])
def test_the_kernels_do_the_same(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation of a step by its kernel, in Triton's interpreter; what nobody has written there is nan."""
    text = f"rehearse:budget=16:wait=64:recent=4:refit=none:bits={bits}"
    by_torch, by_kernel = Served(text), Served(text)
    for served in (by_torch, by_kernel):
        served.forward([], {3: 40, 1: 20})
    used: set[str] = set()

    def kernel_for(operation: str, device: torch.device) -> Any:
        used.add(operation)
        return importlib.import_module(f"kvsketch.ops.{operation}.kernel")

    step = torch.tensor([3, 1]), torch.tensor([40, 20]), *by_torch.tokens(2)[0]
    for served in (by_torch, by_kernel):
        served.joint.begin(served.pool)
    wanted = by_torch.joint.decode(1, *step)
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "kernel_for", kernel_for)
        result = by_kernel.joint.decode(1, *step)
    torch.testing.assert_close(result, wanted, atol=1e-4, rtol=1e-3)
    assert used >= {"weighted_attention", "work_list", "keep_queries"} | ({"slot_update"} if bits == 4 else set())
    assert torch.equal(by_kernel.pool, by_torch.pool)
