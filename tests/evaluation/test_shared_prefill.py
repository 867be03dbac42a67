"""A shared prefill leaves every method's cache as model.generate leaves it."""

from __future__ import annotations

import copy
from functools import cache as cached
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvsketch import CompressedCache, models
from kvsketch.compare.shared_prefill import memory, shared_prefill
from kvsketch.decode import captured as decoding
from kvsketch.models import texts
from kvsketch_lab.evaluation.prefill import rows_that_fit
from tests.helpers import common, zoo

LENGTH, NEW = 60, 10
OFFLOADED = [f"{common.with_budget(name, 16)}:offload=host" for name in ("clusterkv", "quest", "infinigen")]
SHARES = ["snapkv:budget=1/3", "h2o:budget=1/3:recent=4", "clusterkv:budget=1/2:sinks=4:skip_layers=0"]
METHODS = [*(common.with_budget(name, 16) for name in common.FED), *OFFLOADED, *SHARES]


@cached
def batch(pads: tuple[int, ...]) -> tuple[Any, dict[str, torch.Tensor]]:
    ids, mask = common.padded(zoo.tokens(len(pads), LENGTH), list(pads))
    return zoo.build("llama"), {"input_ids": ids, "attention_mask": mask}


def generated(model: Any, inputs: dict[str, torch.Tensor], cache: Any, new: int = NEW) -> torch.Tensor:
    """What transformers itself generates from the prompts, without them."""
    tokens = model.generate(**inputs, past_key_values=cache, max_new_tokens=new, do_sample=False)
    return tokens[:, inputs["input_ids"].shape[1] :]


def state(cache: CompressedCache) -> list[torch.Tensor]:
    """All that the tables hold; a host store is not written beyond its length."""
    near = [tensor for layer in cache.slot_layers for tensor in layer.table.tensors()]
    stores = [layer.table.host for layer in cache.slot_layers if layer.table.host is not None]
    return near + [tensor[:, :, : store.length] for store in stores for tensor in store.parts]


@pytest.mark.parametrize(
    ("method", "pads"), [*((method, (0, 7, 25)) for method in METHODS), (SHARES[0], (0,)), (OFFLOADED[0], (0,))]
)
def test_the_cache_and_the_tokens_are_those_of_generate(method: str, pads: tuple[int, ...]) -> None:
    model, inputs = batch(pads)
    prefilled = shared_prefill(model, inputs)
    shared, own = prefilled.cache(method, seed=3), CompressedCache(model, method, seed=3)
    # One token is the end of prefill: generate chooses it from the prompt's logits and stops.
    generated(model, inputs, own, new=1)
    assert [t.shape for t in state(shared)] == [t.shape for t in state(own)]
    assert all(layer.table.forward.scale == model.model.layers[0].self_attn.scaling for layer in shared.slot_layers)
    for mine, its in zip(shared.slot_layers, own.slot_layers, strict=True):
        assert mine.table.forward.appended == its.table.forward.appended
        for field in ("seen", "length", "new_tokens", "prompt_tokens"):
            assert getattr(mine.table, field) == getattr(its.table, field), field
        assert mine.table.state.numbers() == its.table.state.numbers()
    for mine, its in zip(state(shared), state(own), strict=True):
        torch.testing.assert_close(mine, its, atol=1e-5, rtol=1e-4, equal_nan=True)
    expected = generated(model, inputs, CompressedCache(model, method, seed=3))
    assert torch.equal(prefilled.generate(shared, NEW), expected)


class RunInsteadOfReplay:
    """Stands in for a CUDA graph on a CPU: the step is run at each replay, the host's counters are not moved."""

    def __init__(self, step: decoding.Step) -> None:
        self.step = step

    def replay(self) -> None:
        tables = [layer.table for layer in self.step.layers]
        counters = [(table.seen, table.new_tokens, table.prompt_tokens) for table in tables]
        self.step._forward(bounded=True)
        for table, values in zip(tables, counters, strict=True):
            table.seen, table.new_tokens, table.prompt_tokens = values


@pytest.mark.parametrize("method", common.thinned(METHODS))
def test_captured_steps_give_the_same_tokens(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = batch((0, 7, 25))
    if torch.cuda.is_available():
        model = copy.deepcopy(model).cuda()
    else:
        monkeypatch.setattr(decoding, "impossible", lambda model, cache, options: None)
        monkeypatch.setattr(decoding.Step, "_record", lambda step: RunInsteadOfReplay(step))
    question = zoo.tokens(3, LENGTH + 5)[:, -5:]
    prefilled = shared_prefill(model, inputs)
    steps: list[int] = []
    run = decoding.Step.run
    monkeypatch.setattr(decoding.Step, "run", lambda step: (steps.append(step.steps), run(step))[1])
    eager = prefilled.generate(prefilled.cache(method), NEW, question, eager=True)
    assert not steps
    assert torch.equal(prefilled.generate(prefilled.cache(method), NEW, question), eager)
    assert steps


def test_methods_do_not_disturb_what_was_read() -> None:
    model, inputs = batch((0, 7, 25))
    prefilled = shared_prefill(model, inputs)
    before = [tensor.clone() for tensor in (*state(prefilled.read), *prefilled.queries.values())]
    for method in METHODS:
        prefilled.generate(prefilled.cache(method), 3)
    for old, new in zip(before, (*state(prefilled.read), *prefilled.queries.values()), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("method", ["full", "snapkv:budget=16", "quest:budget=24:skip_layers=0"])
def test_prompts_are_compressed_before_a_question_fed_behind_them_is_known(method: str) -> None:
    model, inputs = batch((0, 7, 25))
    question = zoo.tokens(3, LENGTH + 5)[:, -5:]
    prefilled = shared_prefill(model, inputs)
    tokens = prefilled.generate(prefilled.cache(method), NEW, question)
    cache, mask = CompressedCache(model, method), inputs["attention_mask"]
    logits = None
    for ids in (inputs["input_ids"], question):
        mask = mask if logits is None else torch.cat([mask, torch.ones(3, 5, dtype=mask.dtype)], 1)
        positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        with torch.no_grad():
            logits = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits[:, -1]
    assert logits is not None and torch.equal(tokens[:, 0], logits.argmax(-1))
    if method == "full":
        whole = {
            "input_ids": torch.cat([inputs["input_ids"], question], 1),
            "attention_mask": torch.cat([inputs["attention_mask"], torch.ones_like(question)], 1),
        }
        assert torch.equal(tokens, generated(model, whole, CompressedCache(model, "full")))


def test_rows_end_where_they_say_the_end_token() -> None:
    model, inputs = batch((0, 7, 25))
    prefilled = shared_prefill(model, inputs)
    tokens = prefilled.generate(prefilled.cache("full"), NEW)
    config = model.generation_config
    old = config.eos_token_id
    config.eos_token_id = [int(tokens[0, 2]), 96]
    try:
        ended = prefilled.generate(prefilled.cache("full"), NEW)
        assert torch.equal(ended, generated(model, inputs, CompressedCache(model, "full")))
        assert (ended[0, 3:] == config.pad_token_id).all()
    finally:
        config.eos_token_id = old


def test_native_layers_are_copied() -> None:
    model, ids = zoo.build("gemma3"), zoo.tokens(2, LENGTH)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    prefilled = shared_prefill(model, ids)
    for _ in range(2):
        tokens = prefilled.generate(prefilled.cache("snapkv:budget=16"), NEW)
        assert torch.equal(tokens, generated(model, inputs, CompressedCache(model, "snapkv:budget=16")))


def test_memory_is_measured_for_each_row() -> None:
    model, inputs = batch((0, 0))
    prefilled = shared_prefill(model, inputs)
    full = memory(prefilled.cache("full"))
    layers, heads, size, bytes_each = 2, 2, 8, 4
    assert full["full_bytes"] == full["device_bytes"] == LENGTH * layers * heads * 2 * size * bytes_each
    small = memory(prefilled.cache("streamingllm:budget=16"))
    assert small["tokens_stored"] == 16 and small["full_bytes"] == full["full_bytes"] > small["device_bytes"]
    assert memory(prefilled.cache(OFFLOADED[0]))["host_bytes"] >= full["full_bytes"]


def test_how_many_rows_fit_follows_from_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(
        num_attention_heads=12, num_key_value_heads=2, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28
    )
    config.get_text_config = lambda decoder: config
    model = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, config=config)
    for name, bytes_used in (("memory_reserved", 0), ("memory_allocated", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda device, bytes_used=bytes_used: bytes_used)

    def rows(gigabytes: int, tokens: int) -> int:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gigabytes << 30, 0))
        return rows_that_fit(model, tokens)

    queries_keys_values = 9000 * 28 * (12 + 4) * 128 * 2
    assert queries_keys_values * rows(130, 9000) < 130 << 30
    assert rows(130, 9000) > 20 and rows(130, 3000) > 3 * rows(130, 9000) and rows(1, 9000) == 1
    assert rows_that_fit(zoo.build("llama"), 9000) >= 1


def test_padding_on_the_right_is_refused() -> None:
    model, inputs = batch((0,))
    mask = inputs["attention_mask"].clone()
    mask[:, -3:] = 0
    with pytest.raises(ValueError, match="padding_side = 'left'"):
        shared_prefill(model, {"input_ids": inputs["input_ids"], "attention_mask": mask})


@pytest.mark.real_model
def test_a_real_model_answers_as_with_generate() -> None:
    model, tokenizer = models.load("smollm2-135m", device="cpu")
    tokenizer.padding_side = "left"
    ids = tokenizer(texts.document()[:400])["input_ids"]
    inputs = tokenizer.pad({"input_ids": [ids[:64], ids[:50]]}, return_tensors="pt")
    prefilled = shared_prefill(model, inputs)
    for method in ("snapkv:budget=1/2:window=8", "clusterkv:budget=1/2:offload=host"):
        tokens = prefilled.generate(prefilled.cache(method), 3)
        assert torch.equal(tokens, generated(model, dict(inputs), CompressedCache(model, method), 3))
