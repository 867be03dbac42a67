"""A forward that is broken off, by Ctrl-C or for lack of memory: tried again it is right, or an error says why."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import DynamicSlidingWindowLayer

import kvsketch
from kvsketch import CompressedCache
from kvsketch.cache import interrupted
from kvsketch.cache.layer import SlotLayer
from kvsketch.decode.captured import Step
from kvsketch.slots import SlotTable
from tests.helpers import zoo
from tests.helpers.common import with_budget

METHODS = ("full", "streamingllm", "h2o", "subgen", "balancekv", "quest", "clusterkv")  # one of each kind of table
BROKEN = r"interrupted: .*cache\.reset\(\)"


class BreakOff(TorchFunctionMode):
    """Ctrl-C at the n-th call of torch."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.calls, self.at = 0, at

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


def fail(*args: Any, **kwargs: Any) -> Any:
    raise MemoryError("out of memory")


def logits_after(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits[:, -1]


def assert_usable_after_reset(model: Any, cache: CompressedCache, ids: torch.Tensor) -> None:
    cache.reset()
    new = CompressedCache(model, cache.method, prefill=cache.prefill, chunk=cache.chunk)
    for piece in ids[:, :40].split([30, 1, 8, 1], 1):
        assert torch.equal(*(logits_after(model, each, piece) for each in (cache, new)))


def assert_refused(model: Any, cache: CompressedCache, ids: torch.Tensor) -> None:
    """Whatever is tried, as often as it is tried, until the cache is reset."""
    for piece in (ids[:, :1], ids[:, :7], ids[:, :7]):
        with pytest.raises(RuntimeError, match=BROKEN):
            logits_after(model, cache, piece)
    with pytest.raises(RuntimeError, match=BROKEN):
        model.generate(torch.cat([ids, ids], 1), past_key_values=cache, max_new_tokens=2)
    with pytest.raises(RuntimeError, match=BROKEN):
        cache.crop(-1)
    assert_usable_after_reset(model, cache, ids)


@pytest.mark.parametrize(("name", "prefill"), [*((name, "exact") for name in METHODS), ("h2o", "stream")])
def test_a_forward_broken_off_anywhere(name: str, prefill: str) -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, 60)
    base = CompressedCache(model, with_budget(name, 16), prefill=prefill, chunk=8)
    logits_after(model, base, ids[:, :30])
    for start, end in ((0, 30), (30, 40), (30, 31)):
        whole = CompressedCache(model, base.method, prefill=prefill, chunk=8) if start == 0 else copy.deepcopy(base)
        begun = copy.deepcopy(whole)
        with BreakOff(-1) as counter:
            right = logits_after(model, whole, ids[:, start:end])
        after = logits_after(model, whole, ids[:, end : end + 1])
        refused = 0
        for at in range(1, counter.calls, max(1, counter.calls // 6)):
            cache = copy.deepcopy(begun)
            with pytest.raises(KeyboardInterrupt), BreakOff(at):
                logits_after(model, cache, ids[:, start:end])
            if cache._left_behind():
                refused += 1
                with pytest.raises(RuntimeError, match=BROKEN):
                    logits_after(model, cache, ids[:, start:end])
            elif cache.tokens_seen == start:
                assert torch.equal(logits_after(model, cache, ids[:, start:end]), right)
            else:
                # All layers were done: only the answer is lost.
                assert torch.equal(logits_after(model, cache, ids[:, end : end + 1]), after)
        assert refused > 2
    assert_usable_after_reset(model, cache, ids)


@pytest.mark.parametrize(
    ("family", "first", "piece"), [("llama", True, 9), ("llama", False, 1), ("gemma3", True, 1), ("gemma3", False, 9)]
)
def test_between_two_layers(monkeypatch: pytest.MonkeyPatch, family: str, first: bool, piece: int) -> None:
    model, ids = zoo.build(family), zoo.tokens(1, 60)
    cache = CompressedCache(model, "h2o:budget=16:recent=4")
    if not first:
        logits_after(model, cache, ids[:, :30])
    monkeypatch.setattr(model.model.layers[0].mlp, "forward", fail)
    with pytest.raises(MemoryError):
        logits_after(model, cache, ids[:, :piece])
    monkeypatch.undo()
    assert_refused(model, cache, ids)


@pytest.mark.parametrize(("owner", "name"), [(SlotTable, "append"), (SlotLayer, "compress"), (SlotLayer, "finish")])
@pytest.mark.parametrize("piece", [1, 9])
def test_inside_the_last_layer(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, piece: int, tmp_path: Path
) -> None:
    """All layers count the same tokens, and one of them has not done its work."""
    model, ids = zoo.build("llama"), zoo.tokens(1, 60)
    cache = CompressedCache(model, "snapkv:budget=16")
    logits_after(model, cache, ids[:, :30])
    original = getattr(owner, name)

    def in_the_last_layer(self: Any, *args: Any) -> Any:
        (fail if getattr(self, "table", self).context.layer_idx == 1 else original)(self, *args)

    monkeypatch.setattr(owner, name, in_the_last_layer)
    with pytest.raises(MemoryError):
        logits_after(model, cache, ids[:, :piece])
    monkeypatch.undo()
    with pytest.raises(ValueError, match=BROKEN):
        cache.save(tmp_path / "broken.kvs")
    assert_refused(model, cache, ids)


def test_inside_a_native_layer_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = zoo.build("gemma3"), zoo.tokens(1, 60)
    cache = CompressedCache(model, "streamingllm:budget=16")
    logits_after(model, cache, ids[:, :30])
    last = cache.layers[-1]
    assert isinstance(last, DynamicSlidingWindowLayer)
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda *a, **k: fail() if last.cumulative_length > 30 else cat(*a, **k))
    with pytest.raises(MemoryError):
        logits_after(model, cache, ids[:, :9])
    monkeypatch.undo()
    assert len(set(interrupted.lengths(cache.layers))) == 1
    assert_refused(model, cache, ids)


def test_while_beams_are_reordered(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = zoo.build("llama"), zoo.tokens(2, 60)
    cache = CompressedCache(model, "h2o:budget=16:recent=4")
    logits_after(model, cache, ids[:, :30])
    monkeypatch.setattr(cache.slot_layers[1].table, "select_rows", fail)
    with pytest.raises(MemoryError):
        cache.reorder_cache(torch.tensor([1, 0]))
    monkeypatch.undo()
    assert_refused(model, cache, ids)


@pytest.mark.parametrize("part", ["mlp", "lm_head", "callback"])
@pytest.mark.parametrize("prefill", ["exact", "stream"])
def test_a_prompt_read_by_us_is_whole_or_refused(monkeypatch: pytest.MonkeyPatch, prefill: str, part: str) -> None:
    """Whatever breaks it off: the same call again would read the first chunks twice."""
    model, ids = zoo.build("llama"), zoo.tokens(1, 60)
    cache = CompressedCache(model, "uniform:budget=16:recent=4", prefill=prefill, chunk=8)
    module = model.lm_head if part == "lm_head" else model.model.layers[1].mlp
    forward, calls = module.forward, []

    def second_time_fails(*args: Any) -> Any:
        calls.append(None)
        return fail() if len(calls) == (2 if prefill == "stream" else 1) else forward(*args)

    if part != "callback":
        monkeypatch.setattr(module, "forward", second_time_fails)
    after_chunk = (lambda tokens: fail() if tokens > 8 else None) if part == "callback" else None
    if (part, prefill) == ("callback", "exact"):
        return
    with pytest.raises(MemoryError):
        kvsketch.prefill(model, ids[:, :40], cache, after_chunk=after_chunk)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=BROKEN):
        kvsketch.prefill(model, ids[:, :40], cache)
    assert_refused(model, cache, ids)


def test_a_prompt_refused_before_anything_was_read_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = zoo.build("llama"), zoo.tokens(1, 60)
    method = with_budget("quest", 16) + ":offload=host"
    cache, other = CompressedCache(model, method), CompressedCache(model, method)
    monkeypatch.setattr("kvsketch.slots.host.free_host_memory", lambda: 0)
    with pytest.raises(MemoryError, match="host memory"):
        kvsketch.prefill(model, ids, cache)
    monkeypatch.undo()
    assert torch.equal(*(kvsketch.prefill(model, ids, each) for each in (cache, other)))


@pytest.mark.parametrize("moment", ["forward", "lm_head", "count"])
def test_a_step_of_captured_decoding(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """The loop of `kvsketch.generate` without its graph, which only CUDA has."""
    model, ids = zoo.build("llama"), zoo.tokens(1, 60)
    cache = CompressedCache(model, "h2o:budget=16:recent=4")
    logits_after(model, cache, ids[:, :30])

    class Sampler:
        length = 30

        def before_step(self) -> None: ...

        def choose(self, logits: torch.Tensor) -> torch.Tensor:
            return logits.argmax(-1, keepdim=True)

    class Graph:
        def replay(self) -> None: ...

    with torch.no_grad():
        step = Step(model, cache, Sampler(), ids[:, 30:31], 60)  # type: ignore[arg-type]
        step.run()
        step.run()
        if moment == "count":
            monkeypatch.setattr(step, "_record", Graph)
            monkeypatch.setattr("kvsketch.slots.in_place.count_replayed", fail)
        else:
            monkeypatch.setattr(model.lm_head if moment == "lm_head" else model.model.layers[1].mlp, "forward", fail)
            step.steps = 0
        with pytest.raises(MemoryError):
            step.run()
    monkeypatch.undo()
    assert_refused(model, cache, ids)


def test_an_error_in_the_first_forward_of_one_layer_does_not_blame_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = zoo.build("llama", num_hidden_layers=1), zoo.tokens(1, 60)
    cache = CompressedCache(model, "h2o:budget=16:recent=4")
    monkeypatch.setattr(SlotLayer, "finish", fail)
    with pytest.raises(MemoryError):
        logits_after(model, cache, ids[:, :30])
    monkeypatch.undo()
    assert_refused(model, cache, ids)
