"""Which methods at which budgets an experiment compares, and budgets that are equal in bytes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from kvsketch.cache.compressed import CompressedCache
from kvsketch.cache.layer import SlotLayer
from kvsketch.methods import METHODS, parse_method
from kvsketch.methods.budget import Size

UNITS = ("tokens", "bytes")
ROUNDS = 7  # caches that are made at most to find a budget in bytes
CLOSE, AIM = 0.95, 0.99  # of the bytes asked for: what is near enough, and what the next cache is meant to take
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
        method, own = split(text)
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


def split(text: str) -> tuple[str, str]:
    """A text form without its budget, and the budget."""
    parts = text.split(":")
    own = [part.partition("=")[2] for part in parts if part.startswith("budget=")]
    return ":".join(part for part in parts if not part.startswith("budget=")), own[0] if own else ""


def in_bytes(method: str) -> str:
    """The text form that budgets in bytes are measured and run with: a recall method keeps its tokens on the host.

    Otherwise it holds everything on the device with any budget; the answers are the same.
    """
    recalls = parse_method(method).family == "recall"
    return f"{method}:offload=host" if recalls and ":offload=" not in method else method


class Fitted:
    """Makes caches whose budgets are equal in bytes, and remembers which budgets these were.

    A cache is made, its bytes are measured, weights, index and state included, and it is made again with another number
    of tokens until it takes the share of a full cache's bytes that was asked for, or little less. The next prompt
    begins with the same share of its tokens.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], float] = {}

    def cache(
        self, make: Callable[[str], CompressedCache], method: str, budget: str, prompt: int, unit: str
    ) -> tuple[CompressedCache, dict[str, Any]]:
        """The cache that `make` makes of a text form, and what the record says of its budget."""
        if unit == "tokens" or not budget:
            return make(with_budget(method, budget)), {}
        method = in_bytes(method)
        limit = min(1.0, Size.parse(budget).of(prompt) / prompt)
        tried: dict[int, float] = {}
        best: tuple[int, CompressedCache] | None = None
        # Few bits leave room for more tokens.
        bits = parse_method(method).stored_bits
        tokens = round(prompt * self._kept.get((method, budget), 0.93 * limit * 32 / (bits.keys + bits.values)))
        while len(tried) < ROUNDS:
            tokens = max(least_tokens(method), min(tokens, prompt))
            if tokens in tried:
                break
            cache = make(with_budget(method, tokens))
            share = tried[tokens] = cache.device_bytes / full_bytes(cache)
            fits = share <= limit or limit == 1
            if fits and (best is None or tokens > best[0]):
                best = tokens, cache
            if fits and (share > CLOSE * limit or tokens == prompt):
                break
            tokens = _next(tried, AIM * limit)
        if best is None:
            fewest = min(tried)
            raise ValueError(
                f"{method}: no budget fits into {budget} of the bytes of a full cache of {prompt} tokens, {fewest} "
                f"tokens take {tried[fewest]:.1%}; use a share of more than that, or --budgets-in tokens"
            )
        self._kept[method, budget] = best[0] / prompt
        return best[1], {"budget_tokens": best[0], "measured_as": method}


def _next(tried: dict[int, float], aim: float) -> int:
    """The number of tokens that should take `aim` of the bytes, which grow nearly in proportion."""
    nearest = sorted(tried.items(), key=lambda each: abs(each[1] - aim))[:2]
    (first, low), (second, high) = nearest if len(nearest) == 2 else (nearest[0], (0, 0.0))
    slope = (high - low) / (second - first)
    return int(first + (aim - low) / slope) if slope > 0 else min(tried) // 2


@functools.cache
def least_tokens(method: str) -> int:
    """The smallest number of tokens that the method takes as its budget."""
    for tokens in range(1, 4096):
        try:
            parse_method(with_budget(method, tokens))
        except ValueError:
            continue
        return tokens
    raise ValueError(f"{method}: takes no budget below 4,096 tokens; give it smaller sinks and windows")


def full_bytes(cache: CompressedCache) -> int:
    """Bytes of keys and values of every token seen, in all layers."""
    total = 0
    for layer in cache.layers:
        if isinstance(layer, SlotLayer):
            total += layer.table.token_bytes() * layer.table.seen
        else:
            tensors = (getattr(layer, "keys", None), getattr(layer, "values", None))
            total += sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
    return total
