"""Token blocks of a layer, without vLLM: requests share them, and the centers serve every text."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from kvsketch.integrations.vllm.blocks import ENOUGH, BlockLayer, Chunks
from kvsketch.ops.codec import Codec
from kvsketch.ops.token_blocks import TOKENS, BlockShape, Reading
from tests.helpers.block_model import BlockModel

SHAPE: dict[str, Any] = dict(
    vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, initializer_range=0.1,
)  # fmt: skip


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()


def biased() -> Qwen2ForCausalLM:
    """Keys with a large common part, as those of Qwen."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, rope_theta=1e6)).eval()
    for layer in model.model.layers:
        # Channels that turn slowly, of the lower and the upper half.
        torch.nn.init.normal_(layer.self_attn.k_proj.bias.data.view(-1, 2, 16)[..., 8:], std=30.0)
    return model


def text(length: int, seed: int = 1) -> list[int]:
    return torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def whole(model: Any, tokens: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def divergence(model: Any, served: BlockModel, request: int, tokens: list[int], prompt: int) -> float:
    """Mean KL divergence of the model's answer, token by token behind a prompt, from that over blocks."""
    served.read(request, tokens[:prompt])
    result = torch.cat([served.read(request, [token]) for token in tokens[prompt:]])
    wanted = whole(model, tokens)[prompt:].log_softmax(-1)
    return float((wanted.exp() * (wanted - result.log_softmax(-1))).sum(-1).mean())


@pytest.mark.parametrize(
    ("method", "most"),
    [
        ("full:bits=8", 1e-4), ("full:bits=4", 0.01), ("full:key_bits=8:value_bits=4", 0.01),
        ("full:bits=3", 0.03), ("full:bits=2", 0.1),
    ],
)  # fmt: skip
def test_answers_are_those_of_the_model(method: str, most: float) -> None:
    model = llama()
    served = BlockModel(model, method)
    first = served.read(0, text(90))
    # A prompt attends to itself as it is.
    torch.testing.assert_close(first, whole(model, text(90)), atol=1e-4, rtol=1e-4)
    assert divergence(model, served, 1, text(120, seed=2), 100) < most


def test_the_center_of_one_text_serves_another_where_keys_have_a_common_part() -> None:
    model, tokens = biased(), text(120, seed=2)
    own, other, none = (BlockModel(model, "full:key_bits=4:value_bits=4") for _ in range(3))
    other.read(0, text(100))
    for layer in none.layers:
        layer.known = ENOUGH  # stays at zero
    by_own, by_other, by_none = (divergence(model, each, 1, tokens, 100) for each in (own, other, none))
    assert by_other < 0.02 and by_other < 2 * by_own
    assert by_none > 10 * by_other


def test_a_short_first_prompt_is_replaced_by_a_longer_one() -> None:
    model, tokens = biased(), text(60, seed=2)
    served = BlockModel(model, "full:bits=8")
    served.read(0, text(1))
    assert {layer.known for layer in served.layers} == {0}
    served.read(1, tokens[:30])
    assert {layer.known for layer in served.layers} == {26}
    centers = served.layers[0].key_center.clone()
    served.read(2, text(60, seed=3))  # not much longer
    assert torch.equal(centers, served.layers[0].key_center)
    served.read(3, text(ENOUGH + 4, seed=4))
    assert {layer.known for layer in served.layers} == {ENOUGH}
    assert not torch.equal(centers, served.layers[0].key_center)
    centers = served.layers[0].key_center.clone()
    served.read(4, text(3 * ENOUGH, seed=5))
    assert torch.equal(centers, served.layers[0].key_center), "centers that are good enough have moved"
    # What was written around the first centers is read around the last.
    wanted = whole(model, tokens)[30:]
    result = torch.cat([served.read(1, [token]) for token in tokens[30:]])
    assert (wanted - result).abs().max() < 0.1


def test_chunks_read_their_past_from_blocks() -> None:
    model, tokens = llama(), text(200)
    chunked = BlockModel(model, "full:bits=8")
    result = torch.cat(
        [chunked.read(0, tokens[start:end]) for start, end in ((0, 70), (70, 71), (71, 150), (150, 200))]
    )
    assert (result - whole(model, tokens)).abs().max() < 0.05


def layer_of(device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[BlockLayer, Tensor]:
    shape = BlockShape(2, Codec(4, 32), Codec(4, 32))
    return BlockLayer.of(shape, 0.2, device), torch.zeros(9, shape.nbytes, dtype=torch.uint8, device=device)


def test_nothing_is_learnt_from_tests_or_from_what_is_not_finite() -> None:
    layer, pool = layer_of(torch.device("cpu"))
    k, v = torch.randn(600, 2, 32), torch.randn(600, 2, 32)
    for slots in (torch.full((600,), -1), torch.arange(600)):  # padding, and vLLM's null block
        layer.learn(layer.blocks(pool), 0, k, v, slots)
        assert layer.known == 0
    k[7, 1, 3] = float("inf")
    layer.learn(layer.blocks(pool), 0, k, v, torch.arange(600) + TOKENS)
    assert layer.known == 0 and not layer.key_center.any() and not layer.value_center.any()


def test_centers_have_all_digits_whatever_the_default_is() -> None:
    """vLLM loads a model under that model's dtype as the default one."""
    given = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = BlockLayer.of(BlockShape(2, Codec(4, 32, seed=7), Codec(4, 32, seed=7)), 0.2, torch.device("cpu"))
        codec, cpu = layer.shape.key, torch.device("cpu")
        held = [layer.key_center, layer.value_center, codec.signs(cpu), codec.rotation(cpu)]
    finally:
        torch.set_default_dtype(given)
    assert [each.dtype for each in held] == [torch.float32] * 4


def test_memory_is_measured_of_a_prompt_and_of_chunks_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, read = BlockLayer.of(BlockShape(2, Codec(4, 32), Codec(4, 32)), 0.2, torch.device("cpu")), []
    monkeypatch.setattr(
        BlockLayer, "read_chunks",
        lambda self, blocks, chunks, q, *_: read.append((self.known, chunks.seen, len(q), bool(blocks.pool.any()))),
    )  # fmt: skip
    layer.measure(*(torch.randn(ENOUGH + 9, heads, 32) for heads in (4, 2, 2)))
    known, count = ENOUGH + 9 - 4, ENOUGH + 9
    assert read == [(known, *each, True) for each in (([0], count), ([count], count), ([count], 64), ([count], 2))]
    assert layer.known == 0 and not layer.key_center.any(), "what is measured is no text"


def test_a_request_in_a_batch_is_that_request_alone() -> None:
    """Rows of any length, one that shares a block with another, and one that stands for nobody."""
    layer, pool = layer_of(torch.device("cpu"))
    g = torch.Generator().manual_seed(0)
    k, v = torch.randn(8 * TOKENS, 2, 32, generator=g), torch.randn(8 * TOKENS, 2, 32, generator=g)
    layer.learn(layer.blocks(pool), 0, k, v, torch.arange(len(k)) + TOKENS)
    layer.write(layer.blocks(pool), k, v, torch.arange(len(k)) + TOKENS)
    table = torch.tensor([[3, 1, 8], [3, 5, 0], [0, 0, 0], [7, 0, 0]], dtype=torch.int32)
    lengths, q = torch.tensor([150, 100, 0, 1], dtype=torch.int32), torch.randn(4, 4, 32, generator=g)
    joint = layer.decode(layer.blocks(pool), Reading.of(table, lengths, layer.shape), q)
    for i in (0, 1, 3):
        alone = layer.decode(
            layer.blocks(pool), Reading.of(table[i : i + 1], lengths[i : i + 1], layer.shape), q[i : i + 1]
        )
        torch.testing.assert_close(joint[i], alone[0])
    assert not joint[2].any()


def filled() -> tuple[BlockLayer, Tensor]:
    """A layer with 512 tokens in blocks 1 to 8, whose keys have a large common part."""
    layer, pool = layer_of(torch.device("cpu"))
    g = torch.Generator().manual_seed(0)
    k, v = (torch.randn(8 * TOKENS, 2, 32, generator=g) for _ in range(2))
    k += 10 * torch.randn(32, generator=g)
    layer.learn(layer.blocks(pool), 0, k, v, torch.arange(len(k)) + TOKENS)
    layer.write(layer.blocks(pool), k, v, torch.arange(len(k)) + TOKENS)
    return layer, pool


def test_chunks_that_are_read_together_are_those_alone() -> None:
    """Behind 150, 100, 0 and 1 tokens; two requests share a block, one has read nothing."""
    layer, pool = filled()
    table = torch.tensor([[3, 1, 8], [3, 5, 0], [0, 0, 0], [7, 0, 0]], dtype=torch.int32)
    starts, seen = [0, 3, 40, 60, 62], [150, 100, 0, 1]
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(62, heads, 32, generator=g) for heads in (4, 2, 2))
    together = layer.read_chunks(layer.blocks(pool), Chunks.of(starts, seen, table), q, k, v)
    for i, (start, end) in enumerate(pairwise(starts)):
        new = slice(start, end)
        chunk = Chunks.of([0, end - start], seen[i : i + 1], table[i : i + 1])
        alone = layer.read_chunks(layer.blocks(pool), chunk, q[new], k[new], v[new])
        torch.testing.assert_close(together[new], alone)


def test_chunks_read_no_more_blocks_than_hold_their_tokens() -> None:
    """vLLM's table has room for the longest request."""
    table = torch.arange(4 * 512, dtype=torch.int32).view(4, 512)
    chunks = Chunks.of([0, 20, 25], [TOKENS + 1, 3], table, [1, 3])
    assert chunks.table.tolist() == [[512, 513], [3 * 512, 3 * 512 + 1]]
    assert Chunks.of([0, 20], [0], table[:1]).table.tolist() == [[0]]


def test_a_chunk_sees_what_blocks_hold_and_itself() -> None:
    layer, pool = filled()
    table = torch.tensor([[3, 1, 8]], dtype=torch.int32)
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(20, heads, 32, generator=g) for heads in (4, 2, 2))
    result = layer.read_chunks(layer.blocks(pool), Chunks.of([0, 20], [150], table), q, k, v)
    past = [part.of_requests(table.long()).decoded(torch.float32)[0, :, :150] for part in layer.blocks(pool).parts]
    keys, values = (torch.cat([old, new.transpose(0, 1)], 1) for old, new in zip(past, (k, v), strict=True))
    seen = torch.ones(20, 170, dtype=torch.bool).tril(150)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), keys.repeat_interleave(2, 0), values.repeat_interleave(2, 0), seen, scale=layer.scale
    )
    torch.testing.assert_close(result, wanted.transpose(0, 1), atol=1e-4, rtol=1e-4)
