"""Which methods at which budgets an experiment compares, and budgets that are equal in bytes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from kvsketch.cache import memory
from kvsketch.methods import METHODS, Full, Method, parse_method
from kvsketch.methods.budget import Size

UNITS = ("tokens", "bytes")
# Every method, as it is compared at equal budgets.
ALL = tuple(":".join(filter(None, (name, method.compared_with))) for name, method in METHODS.items())


def with_budget(method: str, budget: str | int) -> str:
    """The text form with the budget; without it where there is none (`budget` empty)."""
    return f"{method}:budget={budget}" if budget != "" else method


def contenders(methods: str, budgets: str) -> list[tuple[str, str]]:
    """(method, budget) for every method, those with a budget at every budget; a budget given with a method counts."""
    sizes = [budget.strip() for budget in budgets.split(",") if budget.strip()]
    for size in sizes:
        Size.parse(size, "--budgets")
    result: list[tuple[str, str]] = []
    chosen = [text.strip() for text in methods.split(",") if text.strip()]
    for text in ALL if chosen in ([], ["all"]) else chosen:
        method, own = split(text)
        if own or ":bytes=" in method:
            result.append((method, own))
        elif hasattr(parse_method(method), "budget"):
            if not sizes:
                raise ValueError(f"--budgets is empty, and {method} has one; use for instance 1/4,1/8")
            result += [(method, size) for size in sizes]
        else:
            result.append((method, ""))
    for method, budget in result:
        parse_method(with_budget(method, budget))
    return list(dict.fromkeys(result))


def compared(methods: str, budgets: str) -> list[Method]:
    """The full cache, to compare with, and the methods at their budgets."""
    chosen = [parse_method(with_budget(*each)) for each in contenders(methods, budgets)]
    return [Full(), *(method for method in chosen if method != Full())]


def split(text: str) -> tuple[str, str]:
    """A text form without its budget, and the budget."""
    parts = text.split(":")
    own = [part.partition("=")[2] for part in parts if part.startswith("budget=")]
    return ":".join(part for part in parts if not part.startswith("budget=")), own[0] if own else ""


def sized(
    model: Any, method: str, budget: str, prompt: int, unit: str, more: int = 0, halves: bool = False
) -> tuple[str, dict[str, Any]]:
    """The text form that a prompt of so many tokens is read with, and what a record says of its budget.

    halves: bytes are counted as if the model ran in half precision, which a CPU's float32 does not.

    A budget in bytes is a share of those of a full cache. The most tokens are taken that fit after the prompt, with
    weights, index and state, as computed from the tensors that a cache will have (`cache.memory`); with `more`, after
    so many tokens behind it, and a share of a full cache of all these tokens.
    """
    if unit == "tokens" or not budget:
        return with_budget(method, budget), {}
    if parse_method(method).family == "recall" and ":offload=" not in method:
        # Otherwise it holds everything on the device with any budget; the answers are the same.
        method = f"{method}:offload=host"
    total, sizes, whole = prompt + more, memory.sizes_of(model, prompt), memory.sizes_of(model, prompt + more)
    if halves:
        sizes, whole = (dataclasses.replace(each, itemsize=2) for each in (sizes, whole))
    limit, full = min(1.0, Size.parse(budget).of(total) / total), whole.full
    fewest = min(prompt, least_tokens(method))
    taken = sizes.bytes(parse_method(with_budget(method, fewest)), more=more)
    if taken is None:
        raise ValueError(f"{method}: the bytes that it takes are not known beforehand; use --budgets-in tokens")
    tokens = total
    if limit < 1:
        if taken > limit * full:
            raise ValueError(
                f"{method}: no budget fits into {budget} of the bytes of a full cache of {total} tokens, "
                f"{fewest} tokens take {taken / full:.1%}; use a share of more than that, or --budgets-in tokens"
            )
        count = functools.partial(sizes.bytes, more=more)
        result: Any = memory.fitted(parse_method(method), int(limit * full), total, count)
        tokens = int(result.budget.of(prompt))
    return with_budget(method, tokens), {"budget_tokens": tokens, "measured_as": method}


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
