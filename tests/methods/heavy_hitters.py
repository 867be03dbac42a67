"""Eviction by accumulated attention, token by token in plain Python, and the same stream through a slot table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsketch.methods import H2O, Keyformer
from kvsketch.ops.attention_mass import Noise, reference
from kvsketch.ops.random import gumbel
from kvsketch.slots import LayerContext, SlotTable


@dataclass
class Stream:
    """Keys [B, H, L, D] and queries [B, Hq, L, D] of a text, fed in chunks."""

    keys: Tensor
    queries: Tensor
    chunks: list[int]
    scale: float = 0.7

    @property
    def ends(self) -> list[int]:
        return torch.tensor(self.chunks).cumsum(0).tolist()


def random_stream(chunks: list[int], batch: int = 1, heads: int = 2, group: int = 2, seed: int = 0) -> Stream:
    generator = torch.Generator().manual_seed(seed)
    length = sum(chunks)
    keys = torch.randn(batch, heads, length, 8, generator=generator)
    return Stream(keys, torch.randn(batch, heads * group, length, 8, generator=generator) * 1.5, chunks)


def tables(method: H2O, stream: Stream, padding: list[int] | None = None, seed: int = 0) -> Iterator[SlotTable]:
    """The table of one layer after each chunk."""
    table = SlotTable(LayerContext(layer_idx=1, num_layers=2, seed=seed))
    table.padding = None if padding is None else torch.tensor(padding)
    table.forward.scale = stream.scale
    for size, end in zip(stream.chunks, stream.ends, strict=True):
        keys = stream.keys[:, :, end - size : end]
        table.append(keys, keys)
        method.compress(table, stream.queries[:, :, end - size : end])
        yield table


def kept(table: SlotTable, row: int = 0) -> list[dict[int, float]]:
    """Position -> score of the tokens each head of a row holds."""
    position, score = table.position_slots()[row].tolist(), table.state.score[row].tolist()
    return [{p: s for p, s in zip(ps, ss, strict=True) if p >= 0} for ps, ss in zip(position, score, strict=True)]


def simulate(method: H2O, stream: Stream, seed: int = 0) -> Iterator[list[dict[int, float]]]:
    """What each head of the first row holds after each chunk, by the definition."""
    heads, group = stream.keys.shape[1], stream.queries.shape[1] // stream.keys.shape[1]
    held: list[dict[int, float]] = [{} for _ in range(heads)]
    prompt = 0
    for size, end in zip(stream.chunks, stream.ends, strict=True):
        prompt = end if size > 1 or prompt == 0 else prompt
        for h in range(heads):
            scores = held[h] | dict.fromkeys(range(end - size, end), 0.0)
            for query_head in range(h * group, (h + 1) * group):
                for i in range(end - size, end):
                    seen = [j for j in scores if j <= i]
                    for j, share in zip(
                        seen, shares(method, stream, query_head, i, seen, end - prompt, seed), strict=True
                    ):
                        scores[j] += share
            held[h] = survivors(method, scores, end, prompt)
        yield held


def shares(
    method: H2O, stream: Stream, query_head: int, i: int, seen: list[int], generated: int, seed: int
) -> list[float]:
    """The softmax of one query over the tokens it sees, in float64."""
    group = stream.queries.shape[1] // stream.keys.shape[1]
    x = stream.keys[0, query_head // group, seen].double() @ stream.queries[0, query_head, i].double() * stream.scale
    tau = 1.0
    if isinstance(method, Keyformer):
        tau = method.tau_init + (method.tau_end - method.tau_init) * min(generated, method.horizon) / method.horizon
        if method.noise:
            head, row = torch.tensor(query_head), torch.tensor(i)
            u = reference.pair_uniform(Noise(method.seed + seed, 1), head, row, torch.tensor(seen))
            x = x + gumbel(u.double())
    return (x / tau).softmax(-1).tolist()


def survivors(method: H2O, scores: dict[int, float], end: int, prompt: int) -> dict[int, float]:
    """The tokens that stay of those a head holds."""
    official = isinstance(method, Keyformer) and method.compat == "official"
    budget = method.budget.of(prompt)
    window = method.recent.of(budget)
    if official:
        keys = {j for j in scores if j < prompt - window}
        if len(scores) <= budget - 1:
            return scores
        best = sorted(keys, key=lambda j: scores[j])[-(budget - window) :]
        chosen = {*best, *(j for j in scores if j >= end - window + 1)}
    else:
        if len(scores) <= budget:
            return scores
        recent = [j for j in scores if j >= end - window]
        rest = sorted((j for j in scores if j < end - window), key=lambda j: scores[j])
        chosen = {*recent, *rest[len(scores) - budget :]}
    return {j: s for j, s in scores.items() if j in chosen}
