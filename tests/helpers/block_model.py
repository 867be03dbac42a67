"""A model of transformers whose layers attend through token blocks, one request after the other, without vLLM."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from kvsketch.integrations.vllm.blocks import BlockLayer, Chunks
from kvsketch.integrations.vllm.settings import KEY, block_codecs, chosen_full
from kvsketch.ops.token_blocks import TOKENS, BlockShape, Reading

ROOM = 64  # blocks of a layer


class BlockModel:
    """Reads requests in chunks; what they share, the centers, stays. Block 0 is nobody's."""

    def __init__(self, model: Any, method: str) -> None:
        self.model, config = model, model.config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        full, heads = chosen_full({KEY: method}), config.num_key_value_heads
        codecs = [block_codecs(full, layer, size, size) for layer in range(config.num_hidden_layers)]
        self.layers = [BlockLayer.of(BlockShape(heads, *each), size**-0.5, torch.device("cpu")) for each in codecs]
        self.pools = [torch.zeros(ROOM, layer.shape.nbytes, dtype=torch.uint8) for layer in self.layers]
        self.taken = 1
        self.tables: dict[int, list[int]] = {}
        self.seen: dict[int, int] = {}

    @torch.no_grad()
    def read(self, request: int, tokens: list[int]) -> Tensor:  # [n, vocabulary]
        """The logits behind each of some more tokens of a request."""
        self.request, seen = request, self.seen.setdefault(request, 0)
        table = self.tables.setdefault(request, [])
        while len(table) * TOKENS < seen + len(tokens):
            table.append(self.taken)
            self.taken += 1
        AttentionInterface.register("token_blocks", self._attend)
        before, self.model.config._attn_implementation = self.model.config._attn_implementation, "token_blocks"
        try:
            positions = torch.arange(seen, seen + len(tokens)).unsqueeze(0)
            logits: Tensor = self.model(torch.tensor([tokens]), position_ids=positions, use_cache=False).logits[0]
        finally:
            self.model.config._attn_implementation = before
        self.seen[request] += len(tokens)
        return logits

    def answer(self, request: int, tokens: list[int], new: int) -> tuple[list[int], Tensor]:
        """The most likely next tokens, and the logits [new, vocabulary] behind them."""
        logits = [self.read(request, tokens)[-1]]
        while len(logits) < new:
            logits.append(self.read(request, [int(logits[-1].argmax())])[-1])
        return [int(each.argmax()) for each in logits], torch.stack(logits)

    def _attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        layer = self.layers[module.layer_idx]
        blocks = layer.blocks(self.pools[module.layer_idx])
        seen, table = self.seen[self.request], torch.tensor(self.tables[self.request])
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        at = torch.arange(seen, seen + len(k))
        slots = table[at // TOKENS] * TOKENS + at % TOKENS
        if len(k) > 1:
            layer.learn(blocks, seen, k, v, slots)
        layer.write(blocks, k, v, slots)
        if len(k) > 1:
            chunks = Chunks.of([0, len(k)], [seen], table.int().unsqueeze(0))
            out = layer.read_chunks(blocks, chunks, q, k, v)
        else:
            reading = Reading.of(table.int().unsqueeze(0), torch.tensor([seen + 1]).int(), layer.shape)
            out = layer.decode(blocks, reading, q)
        return out.unsqueeze(0), None
