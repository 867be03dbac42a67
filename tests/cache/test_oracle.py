"""Eviction and weights against an oracle without any cache.

One forward of the unmodified model over the whole text, under a 4D mask that says what each query could still see,
must give the logits of step-by-step generation. Weights join the mask as additive log-weights. A method that keeps
different tokens per head is checked on a one-layer model, where one mask per head says everything.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvsketch import CompressedCache
from tests.helpers import zoo
from tests.helpers.common import FED, also, padded, with_budget

SINKS, BUDGET, PROMPT, STEPS = 2, 12, 30, 14
ONE_WEIGHT = [name for name, method in FED.items() if method.family in ("evict",) or name == "uniform"]


def step_by_step(
    model: Any, ids: torch.Tensor, cache: CompressedCache, chunks: list[int], mask: torch.Tensor
) -> torch.Tensor:
    """Logits of every position when the text is fed in the given chunks."""
    logits, start = [], 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    for chunk in chunks:
        end = start + chunk
        out = model(
            ids[:, start:end],
            attention_mask=mask[:, :end],
            position_ids=positions[:, start:end],
            past_key_values=cache,
            use_cache=True,
        )
        logits.append(out.logits)
        start = end
    return torch.cat(logits, 1)


def oracle(model: Any, ids: torch.Tensor, visible: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits of one forward without a cache; `visible` is bool or additive, [B, 1 or H, L, L]."""
    if visible.dtype == torch.bool:
        visible = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    full: Any = visible
    window = getattr(model.config, "sliding_window", None)
    if window and "sliding_attention" in getattr(model.config, "layer_types", []):
        i, j = torch.arange(ids.shape[1])[:, None], torch.arange(ids.shape[1])[None]
        local = ((j <= i) & (j > i - window))[None, None] & mask[:, None, None, :].bool()
        sliding = torch.zeros(local.shape).masked_fill(~local, torch.finfo(torch.float32).min)
        full = {"full_attention": visible, "sliding_attention": sliding}
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    return model(ids, attention_mask=full, position_ids=positions, use_cache=False).logits


def streaming_visible(chunks: list[int], pads: list[int], length: int) -> torch.Tensor:
    """What StreamingLLM lets each query see when it compresses after every chunk."""
    visible = torch.zeros(len(pads), 1, length, length, dtype=torch.bool)
    for row, pad in enumerate(pads):
        kept: list[int] = []
        start = 0
        for chunk in chunks:
            for i in range(start, start + chunk):
                visible[row, 0, i, [j for j in kept + list(range(start, i + 1)) if j >= pad]] = True
                visible[row, 0, i, i] = True
            everything = [j for j in kept + list(range(start, start + chunk)) if j >= pad]
            start += chunk
            kept = everything
            if len(everything) > BUDGET:
                kept = [j for j in everything if j < pad + SINKS]
                kept += everything[-(BUDGET - len(kept)) :]
    return visible


SCHEDULES = {
    "after_prefill": [PROMPT] + [1] * STEPS,
    "after_each_chunk": [7, 13, 10, 1, 1, 9, 3],
    "decode_only": [5] + [1] * (PROMPT + STEPS - 5),
    "second_turn": [PROMPT, 1, 1, 1, 8, 1, 1, 1],
}


ALONE, PADDED = [0], [0, 4, 17]
# All families by the schedule that holds every kind of forward; each schedule by each way to reach attention.
CASES: list[Any] = [(family, "second_turn", PADDED) for family in zoo.FAMILIES if family != "llama"]
CASES += [("llama", schedule, PADDED) for schedule in SCHEDULES]
CASES += also(*(("llama", schedule, ALONE) for schedule in SCHEDULES))
CASES += [(family, "after_each_chunk", ALONE) for family in ("gemma3", "gpt_oss", "gptj", "mpt")]
CASES += [(family, "decode_only", PADDED) for family in ("gemma3", "opt", "gpt2", "mpt")]


@pytest.mark.parametrize(("family", "schedule", "pads"), CASES)
def test_streamingllm_equals_the_masked_model(family: str, schedule: str, pads: list[int]) -> None:
    model, chunks = zoo.build(family), SCHEDULES[schedule]
    if pads != [0] and chunks[0] < max(pads) and family == "opt":
        chunks = [max(pads) + 1, *chunks]
    ids, mask = padded(zoo.tokens(len(pads), sum(chunks)), pads)
    cache = CompressedCache(model, f"streamingllm:budget={BUDGET}:sinks={SINKS}")
    with torch.no_grad():
        ours = step_by_step(model, ids, cache, chunks, mask)
        expected = oracle(model, ids, streaming_visible(chunks, pads, ids.shape[1]), mask)
        causal = torch.ones(ids.shape[1], ids.shape[1]).tril().bool() & mask[:, None, None, :].bool()
        exact = oracle(model, ids, causal | torch.eye(ids.shape[1]).bool(), mask)
    real = mask.bool()
    scale = expected[real].norm()
    assert (ours - expected)[real].norm() / scale < 2e-5
    assert (exact - expected)[real].norm() / scale > 1e-3, (
        "the oracle must differ from the full cache, or the test has no teeth"
    )
    assert cache.tokens_stored <= BUDGET and cache.tokens_seen == ids.shape[1]


@pytest.mark.parametrize("name", ONE_WEIGHT)
@pytest.mark.parametrize("pads", [[0], [0, 6]], ids=["alone", "left_padded"])
def test_each_head_sees_what_its_table_says(name: str, pads: list[int]) -> None:
    """The table before each forward, written as a mask, reproduces the logits: nothing else was read or left out."""
    model = zoo.build("llama", num_hidden_layers=1)
    chunks = [PROMPT] + [1] * STEPS + [5] + [1] * 3
    ids, mask = padded(zoo.tokens(len(pads), sum(chunks)), pads)
    cache = CompressedCache(model, with_budget(name, BUDGET))
    table_of = cache.slot_layers[0]
    heads, groups, length = model.config.num_attention_heads, 2, ids.shape[1]
    bias = torch.full((len(pads), heads, length, length), float("-inf"))
    logits, start = [], 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        for chunk in chunks:
            rows = slice(start, start + chunk)
            bias[:, :, rows, rows] = torch.zeros(chunk, chunk).masked_fill(
                ~torch.ones(chunk, chunk).tril().bool(), float("-inf")
            )
            table = table_of.table
            if not table.exact:
                held = table.stored_index(), table.log_weights()[1]
                index, weight = (each.repeat_interleave(groups, 1) for each in held)
                for b, h, s in (index >= 0).nonzero().tolist():
                    bias[b, h, rows, index[b, h, s]] = weight[b, h, s]
            elif start:
                bias[:, :, rows, :start] = 0.0
            out = model(
                ids[:, rows],
                attention_mask=mask[:, : start + chunk],
                position_ids=positions[:, rows],
                past_key_values=cache,
                use_cache=True,
            )
            logits.append(out.logits)
            start += chunk
        bias = bias.masked_fill(~mask[:, None, None, :].bool(), float("-inf"))
        bias = bias.masked_fill(torch.eye(length).bool() & (bias == float("-inf")), 0.0)
        expected = oracle(model, ids, bias.clamp_min(torch.finfo(torch.float32).min), mask)
    ours, real = torch.cat(logits, 1), mask.bool()
    assert (ours - expected)[real].norm() / expected[real].norm() < 2e-5
