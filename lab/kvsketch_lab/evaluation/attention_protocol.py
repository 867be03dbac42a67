"""The two protocols for the attention error of a compressed cache, on the queries, keys and values of a layer.

    error = mean over queries and heads of  |out - exact| / |exact|

- prefix: the queries read a cache of the tokens before all of them. Every method may read 16 sinks, the 64 most recent
  tokens and one in `rate` of those between.
- balancekv: as in figure 2 of BalanceKV. The cache holds all tokens, those of the queries included, which read it
  causally; the first and the last 256 are kept and one in `rate` of those between. (The code of the figure divides by
  the norm of the positive coordinates only, about 0.7 of the full norm, so its errors are larger by that factor.)

A bounded method compresses all tokens at once, and every query reads what it kept. A recall method indexes all but the
recent tokens, which are added afterwards, and each query reads its own selection. `oracle` reads the tokens with the
largest inner products, which no method can know without reading all keys. Layers that recall methods skip by default
are measured like the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvsketch import CompressedCache, ops
from kvsketch.methods import Method, parse_method
from kvsketch.slots import LayerContext, SlotTable
from kvsketch.slots.positions import CACHE

ORACLE = "oracle"


class Protocol(NamedTuple):
    """What all methods keep, and whether the queries' own tokens are part of the cache."""

    name: str
    sinks: int
    recent: int
    causal: bool

    def reads(self, tokens: int, rate: int) -> int:
        """Tokens of a cache of `tokens` that a query may read."""
        return self.sinks + self.recent + (tokens - self.sinks - self.recent) // rate

    def parts(self, method: Method) -> str:
        """The parameters that make `method` keep the common sinks and recent tokens."""
        wanted = {"sinks": self.sinks, "recent": self.recent, "window": self.recent, "skip_layers": 0}
        fields = {field.name: field.init for field in dataclasses.fields(method)}
        return ":".join(f"{key}={value}" for key, value in wanted.items() if fields.get(key))


PREFIX = Protocol("prefix", 16, 64, causal=False)
BALANCEKV = Protocol("balancekv", 256, 256, causal=True)
PROTOCOLS = {protocol.name: protocol for protocol in (PREFIX, BALANCEKV)}


class Captured(NamedTuple):
    """What one layer computed for a text: queries [1, Hq, n, D], keys and values [1, H, n, D]."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    layer: int
    num_layers: int


class Outcome(NamedTuple):
    error: float
    tokens_read: float
    bytes: int  # of all tensors the table of the layer holds
    mass: float | None = None  # the weights of its tokens in the denominator over the tokens seen; None: all weigh 1


@dataclass(frozen=True)
class Recorder(Method):
    """Keeps everything and records what the chosen layers compute."""

    name: ClassVar[str] = "recorder"
    family: ClassVar[str] = "full"
    layers: tuple[int, ...] = ()
    captured: dict[int, Captured] = field(default_factory=dict, compare=False)

    def compress(self, table: SlotTable, queries: Tensor) -> None:
        if table.context.layer_idx in self.layers:
            self.captured[table.context.layer_idx] = Captured(
                queries.clone(),
                table.key_slots(),
                table.value_slots(),
                table.forward.scale,
                table.context.layer_idx,
                table.context.num_layers,
            )


@torch.no_grad()
def capture(model: Any, ids: Tensor, layers: Iterable[int]) -> dict[int, Captured]:
    """Queries, keys and values of `layers` after one forward over `ids` [1, n]."""
    recorder = Recorder(layers=tuple(layers))
    cache = CompressedCache(model, recorder)
    absent = set(recorder.layers) - {layer.table.context.layer_idx for layer in cache.slot_layers}
    if absent:
        have = ", ".join(str(layer.table.context.layer_idx) for layer in cache.slot_layers)
        raise ValueError(f"layers {sorted(absent)} cannot be compressed; the model's full-attention layers are {have}")
    model(ids, past_key_values=cache, logits_to_keep=1)
    return recorder.captured


def configured(
    text: str, total: int, context: int, protocol: Protocol = PREFIX, parse: Callable[[str], Method] = parse_method
) -> Method:
    """The method `text`, set to read or keep `total` of `context` tokens, sinks and recent ones included."""
    method = parse(text)
    # Tokens that are in no cluster yet are read in addition to the budget.
    budget = total - protocol.recent if method.reads_newest and total < context else total
    method = parse(f"{text}:{protocol.parts(method)}:budget={budget}")
    if method.read_positions == CACHE:
        raise ValueError(f"{text}: errors are against attention at the positions of the text; use positions=text")
    return method


@torch.no_grad()
def measure(text: str, rate: int, layer: Captured, queries: int, protocol: Protocol = PREFIX, seed: int = 0) -> Outcome:
    """The error of a method, or of the oracle, for the last `queries` of a layer."""
    seen = layer.keys.shape[2]
    context = seen if protocol.causal else seen - queries
    asked = layer.queries[:, :, seen - queries :]
    keys, values = layer.keys[:, :, :context], layer.values[:, :, :context]
    visible = _visible(torch.arange(context, device=keys.device), seen, queries) if protocol.causal else None
    exact = ops.weighted_attention(asked, keys, values, None, None, layer.scale, bias=visible)
    total = protocol.reads(context, rate)
    if text == ORACLE:
        best = _best_tokens(asked, keys, values, layer.scale, total, protocol, visible)
        return Outcome(relative_error(best, exact), total, _bytes([keys, values]))
    method = configured(text, total, context, protocol)
    table = new_table(layer, seed)
    if method.family == "recall":
        out = _recalled(method, table, layer, queries, protocol)
    else:
        feed(method, table, layer, 0, context)
        out = from_slots(method, table, asked, seen if protocol.causal else None)
    read, held = _tokens_read(method, table, asked), _bytes(table.tensors())
    return Outcome(relative_error(out, exact), read, held, _mass(table))


def _mass(table: SlotTable) -> float | None:
    weights = table.log_weights()[1]
    return None if weights is None else float((weights.double().exp().sum(-1) / table.seen).mean())


def relative_error(out: Tensor, exact: Tensor) -> float:
    """Mean over queries and heads of |out - exact| / |exact|."""
    return float(((out - exact).float().norm(dim=-1) / exact.float().norm(dim=-1)).mean())


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _visible(index: Tensor, seen: int, queries: int) -> Tensor:
    """Which tokens, by index [..., S], the last `queries` of `seen` tokens may see: [..., queries, S], of rank 4."""
    query = torch.arange(seen - queries, seen, device=index.device)
    visible = index.unsqueeze(-2) <= query.unsqueeze(-1)
    return visible.view(*[1] * (4 - visible.dim()), *visible.shape)


def new_table(layer: Captured, seed: int, angles: tuple[float, ...] = ()) -> SlotTable:
    """An empty table of the layer; `angles` of the model's rotary embedding, for methods that rotate queries."""
    table = SlotTable(LayerContext(layer.layer, layer.num_layers, seed, rotary=angles))
    table.forward.scale = layer.scale
    return table


def _append(method: Method, table: SlotTable, layer: Captured, start: int, end: int) -> None:
    keys, values = layer.keys[:, :, start:end], layer.values[:, :, start:end]
    method.prepare(table, keys, values)
    table.append(keys, values)


def feed(method: Method, table: SlotTable, layer: Captured, start: int, end: int) -> None:
    """Adds the tokens [start, end) to the table and compresses it."""
    add(method, table, layer, start, end)
    method.settle([table])


def add(method: Method, table: SlotTable, layer: Captured, start: int, end: int) -> None:
    """The same, but for what layers decide together."""
    _append(method, table, layer, start, end)
    method.compress(table, layer.queries[:, :, start:end])


def _recalled(method: Method, table: SlotTable, layer: Captured, queries: int, protocol: Protocol) -> Tensor:
    """Outputs of a recall method for the last queries, one at a time; causal: after the query's own token is added."""
    seen = layer.keys.shape[2]
    start = seen - queries
    if protocol.causal:
        feed(method, table, layer, 0, start)
    else:
        feed(method, table, layer, 0, start - protocol.recent)
        feed(method, table, layer, start - protocol.recent, start)
    answers = []
    for place in range(start, seen):
        query = layer.queries[:, :, place : place + 1].contiguous()
        if protocol.causal:
            _append(method, table, layer, place, place + 1)
        answer = method.attend(table, query)
        answers.append(from_slots(method, table, query) if answer is None else answer)
        if protocol.causal:
            method.compress(table, query)
    return torch.cat(answers, 2)


def from_slots(method: Method, table: SlotTable, queries: Tensor, seen: int | None = None) -> Tensor:
    """Attention over all slots; with `seen`, of the last of so many tokens, each of which sees those up to its own."""
    visible = None if seen is None else _visible(table.index_slots(), seen, queries.shape[2])
    keys, values = table.key_slots(), table.value_slots()
    return ops.weighted_attention(
        queries, keys, values, *table.log_weights(), table.forward.scale, bias=visible, clip=method.clip
    )


def _tokens_read(method: Method, table: SlotTable, queries: Tensor) -> float:
    """Mean number of tokens that a query head reads."""
    chosen = [method.rows_chosen(table, query.contiguous()) for query in queries.split(1, dim=2)]
    counts = [(rows >= 0).sum(-1).float().mean() for rows in chosen if rows is not None]
    return float(torch.stack(counts).mean()) if counts else table.stored()


def _best_tokens(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, total: int, protocol: Protocol, visible: Tensor | None
) -> Tensor:
    """Attention over sinks, recent tokens and, for each query, the others with the largest inner products."""
    group = queries.shape[1] // keys.shape[1]
    scores = queries @ keys.repeat_interleave(group, 1).transpose(-1, -2)
    scores[..., : protocol.sinks] = scores[..., keys.shape[2] - protocol.recent :] = float("inf")
    chosen = scores.topk(min(total, keys.shape[2]), dim=-1).indices
    read = torch.zeros_like(scores, dtype=torch.bool).scatter_(3, chosen, True)
    read = read if visible is None else read & visible
    return ops.weighted_attention(queries, keys, values, None, None, scale, bias=read)
