"""Streamed prompts against an oracle without any cache: one forward under a mask of what each query could still see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import kvsketch
from kvsketch import CompressedCache
from kvsketch.cache.chunks import chunk_spans
from tests.cache.test_oracle import BUDGET, SINKS, oracle, streaming_visible
from tests.helpers import zoo
from tests.helpers.common import padded, with_budget

LENGTH = 61


def stream(model: Any, method: str, chunk: int) -> CompressedCache:
    return CompressedCache(model, method, prefill="stream", chunk=chunk)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "gptj", "mpt", "opt", "gemma3"])
@pytest.mark.parametrize("pads", [[0], [0, 4, 17]], ids=["alone", "left_padded"])
@pytest.mark.parametrize("way", ["one forward", "many"])
def test_streamingllm_equals_the_masked_model(family: str, pads: list[int], way: str) -> None:
    """However the prompt arrives, in one forward or many."""
    model = zoo.build(family)
    length, chunk = 45, 21 if family == "opt" else 11
    ids, mask = padded(zoo.tokens(len(pads), length), pads)
    cache = stream(model, f"streamingllm:budget={BUDGET}:sinks={SINKS}", chunk)
    chunks = [end - start for start, end in chunk_spans(length, chunk)]
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        if way == "many":
            ours = kvsketch.prefill(model, ids, cache, mask)[:, None]
        else:
            ours = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True).logits
        expected = oracle(model, ids, streaming_visible(chunks, pads, length), mask)
        causal = torch.ones(length, length).tril().bool() & mask[:, None, None, :].bool()
        exact = oracle(model, ids, causal | torch.eye(length).bool(), mask)
    real = mask.bool()[:, -ours.shape[1] :]
    expected, exact = (logits[:, -ours.shape[1] :][real] for logits in (expected, exact))
    assert (ours[real] - expected).norm() / expected.norm() < 2e-5
    assert (exact - expected).norm() / expected.norm() > 1e-3, "the oracle must differ from the full cache"
    assert cache.tokens_stored <= BUDGET and cache.tokens_seen == length


def shared_keys_model() -> Any:
    """A Gemma 3n whose last two layers read the keys of the two before."""
    kinds = ["sliding_attention", "full_attention"] * 2
    changes = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "laurel_rank": 4}
    changes |= {"altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4, "sliding_window": 8}
    settings = {**zoo.FAMILIES["llama"][1], "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": kinds}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3n_text", **settings, **changes)).eval()


def test_layers_that_share_keys_read_what_their_owner_read() -> None:
    model, ids = shared_keys_model(), zoo.tokens(2, 45)
    mask, method = torch.ones_like(ids), f"streamingllm:budget={BUDGET}:sinks={SINKS}"
    chunks = [end - start for start, end in chunk_spans(45, 11)]
    with torch.no_grad():
        ours = kvsketch.prefill(model, ids, stream(model, method, 11))
        expected = oracle(model, ids, streaming_visible(chunks, [0, 0], 45), mask)[:, -1]
        exact = oracle(model, ids, torch.ones(45, 45).tril().bool().expand(2, 1, -1, -1), mask)[:, -1]
    assert (ours - expected).norm() / expected.norm() < 2e-5
    assert (exact - expected).norm() / expected.norm() > 1e-3
    with pytest.raises(ValueError, match=r"gemma3n_text share keys.*kvsketch\.prefill"):
        model(ids, past_key_values=stream(model, method, 11))


@pytest.mark.parametrize("name", ["uniform", "h2o"])
def test_each_chunk_reads_the_weights_of_its_table(name: str) -> None:
    """The table before each chunk, written as an additive mask, reproduces the logits of the chunk."""
    model = zoo.build("llama", num_hidden_layers=1)
    ids = zoo.tokens(1, LENGTH)
    cache = stream(model, with_budget(name, BUDGET), chunk=17)
    spans = chunk_spans(LENGTH, 17)
    bias = torch.full((1, 4, LENGTH, LENGTH), float("-inf"))
    logits = []
    with torch.no_grad():
        for start, end in spans:
            rows = slice(start, end)
            size = end - start
            bias[:, :, rows, rows] = torch.zeros(size, size).masked_fill(
                ~torch.ones(size, size).tril().bool(), -torch.inf
            )
            table = cache.slot_layers[0].table
            if start:
                index, weight = (t.repeat_interleave(2, 1) for t in (table.index.long(), table.log_den))
                for b, h, s in (index >= 0).nonzero().tolist():
                    bias[b, h, rows, index[b, h, s]] = weight[b, h, s]
            logits.append(model(ids[:, rows], past_key_values=cache).logits)
        expected = oracle(model, ids, bias.clamp_min(torch.finfo(torch.float32).min), torch.ones_like(ids))
        whole = model(ids, past_key_values=stream(model, with_budget(name, BUDGET), chunk=17)).logits
    ours = torch.cat(logits, 1)
    assert (ours - expected).norm() / expected.norm() < 2e-5
    torch.testing.assert_close(whole, ours, atol=1e-4, rtol=1e-4)
