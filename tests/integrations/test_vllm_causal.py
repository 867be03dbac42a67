"""Causal attention of prompts in vLLM: its flash attention, where it serves, is our own operation."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvsketch.integrations.vllm.causal import causal_attention, flash_attention

STARTS, KEY_STARTS = [0, 7, 8, 70], [0, 7, 20, 100]  # the second and third request have older tokens


def inputs(dtype: torch.dtype, device: str = "cpu", size: int = 32) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = ((STARTS[-1], 4), (KEY_STARTS[-1], 2), (KEY_STARTS[-1], 2))
    return [torch.randn(*shape, size, generator=g).to(device, dtype) for shape in shapes]


def by_torch(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:  # [n, Hq, D]
    parts = []
    for (a, b), (c, d) in zip(pairwise(STARTS), pairwise(KEY_STARTS), strict=True):
        seen = torch.ones(b - a, d - c, dtype=torch.bool, device=q.device).tril(d - c - (b - a))
        query, keys, values = (x.float().transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))
        keys, values = (x.repeat_interleave(2, 0) for x in (keys, values))
        parts.append(F.scaled_dot_product_attention(query, keys, values, seen, scale=scale))
    return torch.cat(parts, 1).transpose(0, 1)


def test_each_request_sees_its_own_tokens_up_to_each() -> None:
    q, k, v = inputs(torch.float32)
    out, log_sum = causal_attention(None, q, k, v, 0.2, STARTS, KEY_STARTS, softcap=None, sink_logits=None)
    torch.testing.assert_close(out[0].transpose(0, 1), by_torch(q, k, v, 0.2), atol=1e-5, rtol=1e-5)
    keys = k[:7].repeat_interleave(2, 1)
    logits = 0.2 * torch.einsum("qhd,khd->hqk", q[:7], keys)
    wanted = logits.masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), float("-inf")).logsumexp(-1)
    torch.testing.assert_close(log_sum[0, :, :7], wanted)


@pytest.mark.parametrize(
    ("options", "by_flash"),
    [
        ({}, True), ({"softcap": None, "sink_logits": None}, True), ({"softcap": 5.0}, False),
        ({"softcap": None, "sink_logits": torch.zeros(4)}, False),
    ],
)  # fmt: skip
def test_flash_attention_reads_what_it_can(options: dict[str, Any], by_flash: bool) -> None:
    calls = []

    def flash(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        calls.append(given)
        return torch.full_like(q, 3.0), torch.zeros(q.shape[1], len(q))

    q, k, v = inputs(torch.float32)
    out, log_sum = causal_attention(flash, q, k, v, 0.2, STARTS, KEY_STARTS, **options)
    assert (out.shape, log_sum.shape) == ((1, 4, 70, 32), (1, 4, 70))
    assert calls == ([(STARTS, KEY_STARTS, 0.2)] if by_flash else [])
    assert bool((out == 3.0).all()) == by_flash


def test_a_machine_without_it_has_none() -> None:
    if find_spec("vllm") is None or not torch.cuda.is_available():
        assert flash_attention(128, 128, torch.bfloat16) is None
    assert flash_attention(128, 64, torch.bfloat16) is None and flash_attention(128, 128, torch.float32) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or find_spec("vllm") is None, reason="needs a GPU and vLLM")
@pytest.mark.parametrize("size", [64, 128, 256])
def test_vllms_own_is_ours(size: int) -> None:
    flash = flash_attention(size, size, torch.bfloat16)
    if flash is None:
        pytest.skip("this GPU has none that is faster")
    q, k, v = inputs(torch.bfloat16, "cuda", size)
    # Strides of keys in a table with room for more, as a divided prompt has them.
    k = torch.cat([k.transpose(0, 1), torch.full((2, 9, size), float("nan"), device="cuda").bfloat16()], 1)
    k = k[:, : KEY_STARTS[-1]].transpose(0, 1)
    starts: Sequence[Sequence[int]] = (STARTS, KEY_STARTS)
    near, own = (causal_attention(each, q, k, v, size**-0.5, *starts) for each in (flash, None))
    torch.testing.assert_close(near.out, own.out, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(near.log_sum, own.log_sum, atol=1e-3, rtol=1e-3)
