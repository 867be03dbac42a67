"""Which methods at which budgets an experiment compares, and budgets that are equal in bytes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvsketch.cache.compressed import CompressedCache
from kvsketch.methods import METHODS, Method, parse_method
from kvsketch.methods.budget import Size
from kvsketch.slots.table import SlotTable

UNITS = ("tokens", "bytes")
# Every method, as it is compared at equal budgets.
ALL = tuple(":".join(filter(None, (name, method.compared_with))) for name, method in METHODS.items())


def takes_budget(method: str) -> bool:
    """Whether the method of this text form has a budget."""
    return any(field.name == "budget" for field in dataclasses.fields(parse_method(method)))


def with_budget(method: str, budget: str | int) -> str:
    """The text form with the budget; without it where there is none (`budget` empty)."""
    return f"{method}:budget={budget}" if budget != "" else method


def contenders(methods: str, budgets: str) -> list[tuple[str, str]]:
    """(method, budget) for every method, those with a budget at every budget; a budget given with a method counts."""
    sizes = [budget.strip() for budget in budgets.split(",") if budget.strip()]
    for size in sizes:
        Size.parse(size, "--budgets")
    found: list[tuple[str, str]] = []
    for text in _names(methods):
        method, own = _split(text)
        if own:
            found.append((method, own))
        elif takes_budget(method):
            found += [(method, size) for size in sizes]
        else:
            found.append((method, ""))
    for method, budget in found:
        parse_method(with_budget(method, budget))
    return list(dict.fromkeys(found))


def _names(methods: str) -> Sequence[str]:
    chosen = [text.strip() for text in methods.split(",") if text.strip()]
    return ALL if chosen in ([], ["all"]) else chosen


def _split(text: str) -> tuple[str, str]:
    """A text form without its budget, and the budget."""
    parts = text.split(":")
    own = [part.partition("=")[2] for part in parts if part.startswith("budget=")]
    return ":".join(part for part in parts if not part.startswith("budget=")), own[0] if own else ""


@dataclass(frozen=True)
class Shapes:
    """What decides the bytes of a cache: layers, query heads for each KV head, head sizes, dtype."""

    layers: int
    group: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: str = "cpu"

    @classmethod
    def of(cls, model: Any) -> Shapes:
        """The shapes of a model's full-attention layers, as its cache shows them."""
        config = model.config.get_text_config(decoder=True)
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        group = heads // (getattr(config, "num_key_value_heads", None) or heads)
        layers = len(CompressedCache(model, "full").slot_layers)
        return cls(layers, group, size, size, model.dtype, str(model.device))


def in_bytes(method: str) -> str:
    """The text form that budgets in bytes are measured and run with: a recall method keeps its tokens on the host.

    Without that it holds everything on the device whatever its budget is; the answers are the same.
    """
    recalls = parse_method(method).family == "recall"
    return f"{method}:offload=host" if recalls and ":offload=" not in method else method


def text_form(model: Any, method: str, budget: str, prompt: int, unit: str) -> tuple[str, dict[str, Any]]:
    """The text form that a method runs with on a prompt of so many tokens, and what the record says of it.

    With budgets in bytes the budget is the number of tokens that fit into that share of the full cache's bytes.
    """
    if unit == "tokens" or not budget:
        return with_budget(method, budget), {}
    method = in_bytes(method)
    tokens = tokens_within(method, budget, prompt, Shapes.of(model))
    return with_budget(method, tokens), {"budget_tokens": tokens, "measured_as": method}


@functools.cache
def tokens_within(method: str, budget: str, prompt: int, shapes: Shapes) -> int:
    """The budget in tokens that brings the cache of a prompt nearest to `budget` of a full cache's bytes, from below.

    `budget` is a share of the bytes, or a number of tokens of the full cache. Exact to a thousandth of the prompt.
    """
    limit = Size.parse(budget).of(prompt) / prompt
    if limit >= 1:
        return prompt
    fits, too_many = _least(method), prompt
    low, high = share_of_bytes(method, fits, prompt, shapes), 1.0
    if low > limit:
        raise ValueError(
            f"{method}: no budget fits into {budget} of the bytes of a full cache of {prompt} tokens, {fits} tokens "
            f"take {low:.1%}; use a share of more than that, or --budgets-in tokens"
        )
    step = max(1, prompt // 1000)
    while too_many - fits > step:
        # Bytes grow nearly in proportion, so the line between the two ends finds the place in a few steps.
        guess = fits + int((limit - low) / max(high - low, 1e-9) * (too_many - fits))
        middle = max(fits + 1, min(max(guess, fits + step), too_many - step))
        share = share_of_bytes(method, middle, prompt, shapes)
        if share <= limit:
            fits, low = middle, share
        else:
            too_many, high = middle, share
    return fits


def _least(method: str) -> int:
    """The smallest number of tokens that the method takes as its budget."""
    for tokens in range(1, 4096):
        try:
            parse_method(with_budget(method, tokens))
        except ValueError:
            continue
        return tokens
    raise ValueError(f"{method}: takes no budget below 4,096 tokens; give it smaller sinks and windows")


@torch.no_grad()
def share_of_bytes(method: str, tokens: int, prompt: int, shapes: Shapes) -> float:
    """Device bytes of the cache of a prompt with a budget of `tokens`, in units of the full cache's bytes.

    Measured on tables that the method has compressed, one KV head of random keys in each, so weights, indices and
    state count. Layers in which the method behaves alike are measured once.
    """
    chosen = parse_method(with_budget(method, tokens))
    tables = [SlotTable(layer, shapes.layers, prompt_tokens=prompt) for layer in range(shapes.layers)]
    # The first layers of a recall method read everything.
    skipped = getattr(chosen, "skip_layers", 0)
    kinds = [(chosen.budget_tokens(table), table.layer_idx < skipped) for table in tables]
    found = {
        kind: _table_bytes(chosen, table, prompt, shapes)
        for table, kind in zip(tables, kinds, strict=True)
        if kinds.index(kind) == table.layer_idx
    }
    each = prompt * (shapes.key_size + shapes.value_size) * shapes.dtype.itemsize
    return sum(found[kind] for kind in kinds) / (shapes.layers * each)


def _table_bytes(method: Method, table: SlotTable, prompt: int, shapes: Shapes) -> int:
    chance = torch.Generator(shapes.device).manual_seed(0)

    def random(heads: int, size: int) -> torch.Tensor:
        shape = (1, heads, prompt, size)
        return torch.randn(shape, generator=chance, device=shapes.device, dtype=torch.float32).to(shapes.dtype)

    keys, values = random(1, shapes.key_size), random(1, shapes.value_size)
    table.note_scale(shapes.key_size**-0.5)
    method.prepare(table, keys, values)
    table.append(keys, values)
    method.compress(table, random(shapes.group, shapes.key_size))
    return sum(tensor.numel() * tensor.element_size() for tensor in table.tensors())
