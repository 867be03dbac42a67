"""The sizes on the page about vLLM are those that the plugin makes, for the shape of Llama-3.1-8B in bf16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvsketch.integrations.vllm.blocks import ENOUGH, GROWTH
from kvsketch.integrations.vllm.joint_layers import JointLayers
from kvsketch.integrations.vllm.paged import PagedLayer
from kvsketch.integrations.vllm.settings import BLOCK_SIZES, block_codecs, chosen_full, chosen_method
from kvsketch.methods.waiting import WaitingMethod
from kvsketch.ops.token_blocks import TOKENS, BlockShape
from kvsketch.slots import LayerContext
from kvsketch.slots.pages import RequestShape

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "vllm.md").read_text(encoding="utf-8").split())
LAYERS, HEADS, QUERY_HEADS, SIZE, DTYPE = 32, 8, 32, 128, torch.bfloat16
PLAIN = 2 * SIZE * DTYPE.itemsize  # bytes of a key and a value


def megabytes(text: str) -> int:
    """Of the pages of a request, where each layer has one."""
    method = chosen_method({"kvsketch": text})
    layer = PagedLayer(method, LayerContext(1, LAYERS, bits=method.stored_bits), 1.0)
    return round(LAYERS * layer.page_shape(HEADS, SIZE, SIZE, DTYPE).nbytes / 1e6)


def together(text: str) -> tuple[JointLayers, RequestShape]:
    method = chosen_method({"kvsketch": text})
    assert isinstance(method, WaitingMethod)
    layers = JointLayers(method)
    return layers, layers.shape(LAYERS, HEADS, QUERY_HEADS, SIZE, SIZE, DTYPE, longest=1 << 17)


def token_bytes(text: str) -> float:
    """Of a key and a value of one head, in a layer that is not the first."""
    key, value = block_codecs(chosen_full({"kvsketch": text}), 1, SIZE, SIZE)
    return BlockShape(HEADS, key, value).nbytes / TOKENS / HEADS


def test_pages_have_the_sizes_that_are_named() -> None:
    snapkv, coded = (megabytes(f"snapkv:budget=2048{bits}") for bits in ("", ":bits=4"))
    assert f"a request of `snapkv:budget=2048` takes {snapkv} MB, with `bits=4` {coded} MB" in PAGE
    layers, page = together("rehearse:budget=2048")
    _, less = together("rehearse:budget=2048:wait=128")
    queries = page.sizes["queries"]
    assert (
        f"`budget=2048` takes {page.nbytes / 1e6:.0f} MB per request, {queries / 1e6:.0f} MB of it for the queries of "
        f"{layers.room} new tokens; `wait=128` makes it {less.nbytes / 1e6:.0f} MB" in PAGE
    )
    assert f"The full cache of 32,768 tokens takes {32768 * LAYERS * HEADS * PLAIN / 1e9:.1f} GB" in PAGE
    assert f"A turn of more than {layers.room} tokens (five quarters of `wait`)" in PAGE


def test_blocks_have_the_sizes_that_are_named() -> None:
    four, eight = token_bytes("full:bits=4"), token_bytes("full:bits=8")
    assert f"take {four} bytes in 4 bits and {eight:.0f} in 8, compared with {PLAIN} in bf16" in PAGE
    assert f"**Blocks** have {TOKENS} tokens" in PAGE
    assert f"Heads have {', '.join(map(str, BLOCK_SIZES[:-1]))} or {BLOCK_SIZES[-1]} numbers" in PAGE
    assert f"fewer than {ENOUGH} tokens" in PAGE and GROWTH == 4 and "of four times as many tokens" in PAGE


@pytest.mark.parametrize(("bits", "part"), [(3, 5), (2, 7)])
def test_fewer_bits_take_the_part_that_is_named(bits: int, part: int) -> None:
    """The keys of the first layer have 8 bits, which is counted."""
    first = block_codecs(chosen_full({"kvsketch": f"full:bits={bits}"}), 0, SIZE, SIZE)
    taken = BlockShape(HEADS, *first).nbytes / TOKENS / HEADS + (LAYERS - 1) * token_bytes(f"full:bits={bits}")
    assert round(LAYERS * PLAIN / taken) == part
    assert "`bits=3` takes a fifth of the bytes of bf16, `bits=2` a seventh" in PAGE
