"""Helpers shared by the tests that run whole models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

import kvsketch
from kvsketch.cache import rotary
from kvsketch.methods.replay import repeats

# Methods for which forwards of the model are enough, without `cache.replay`.
FED = {name: method for name, method in kvsketch.METHODS.items() if not repeats(method())}

# One method for each kind of table: exact, scored, weighted, recalled, heads that differ and tokens that wait.
KINDS = ("full", "h2o", "subgen", "quest", "rehearse")


def thinned(cases: Iterable[Any]) -> list[Any]:
    """Cases that begin with a method: the usual run takes the first of each of `KINDS`, in 16 bits and in fewer, and
    the first whose heads share a budget; `make test-thorough` takes all of them.
    """
    result, taken = [], set()
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        name, *settings = values[0].split(":")
        own = "share" if "share=" in values[0] else name if name in KINDS else ""
        kind = own, any(each.startswith(("bits=", "key_bits=")) and each != "bits=16" for each in settings)
        usual = bool(own) and kind not in taken
        taken.add(kind)
        result.append(pytest.param(*values, marks=() if usual else pytest.mark.thorough))
    return result


def also(*cases: Any) -> list[Any]:
    """Cases that `make test-thorough` adds to the usual run."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.thorough) for case in cases]


def generate(model: Any, ids: torch.Tensor, cache: Any, **kwargs: Any) -> Any:
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    kwargs.setdefault("attention_mask", torch.ones_like(ids))
    if kwargs.get("num_beams"):
        options.pop("output_logits")
    return model.generate(ids, past_key_values=cache, use_cache=True, **{**options, **kwargs})


def padded(batch: torch.Tensor, pads: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.ones_like(batch)
    for row, count in enumerate(pads):
        mask[row, :count] = 0
        batch[row, :count] = 0
    return batch, mask


def with_budget(name: str, budget: int) -> str:
    """The text form of a method with a budget, small sinks and window; methods without a budget as they are.

    `name` may have settings of its own behind a colon.
    """
    name, *own = name.split(":")
    fields = kvsketch.METHODS[name].__dataclass_fields__
    wanted = {"budget": budget, "sinks": 2, "recent": 4, "skip_layers": 0}
    if fields["bits"].default != 16 and not any(setting.startswith("bits=") for setting in own):
        wanted["bits"] = 16  # quantisation is tested on its own
    settings = [f"{k}={v}" for k, v in wanted.items() if k in fields and fields[k].init]
    return ":".join([name, *settings, *own])


def require_angles(name: str, model: Any) -> None:
    """Skips where a method needs rotary angles that are not known of the model."""
    if kvsketch.METHODS[name]().needs_angles and not rotary.frequencies(model.config):
        pytest.skip(f"the rotary angles of {model.config.model_type} are not known")


def bounded() -> list[str]:
    """The methods whose heads hold a budget after every forward."""
    kept = {name: m for name, m in kvsketch.METHODS.items() if m.family in ("evict", "summarise")}
    return [name for name, method in kept.items() if not method.budget_is_mean]


def held(cache: Any) -> float:
    """What a budget bounds: slots of the largest head, or their mean where heads share it, without what waits."""
    if not cache.method.budget_is_mean:
        return cache.tokens_stored
    tables = [layer.table for layer in cache.slot_layers]
    used = torch.stack([table.used_slots() for table in tables]).double().mean((0, 2))
    return float(used.max()) - cache.method.queue(tables[0]).count


def read_pieces(
    model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor, pieces: list[tuple[int, int]]
) -> torch.Tensor:
    """The logits after each piece [start, end) of a left-padded text, fed one after the other."""
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    logits = []
    with torch.no_grad():
        for start, end in pieces:
            out = model(
                ids[:, start:end], attention_mask=mask[:, :end], position_ids=positions[:, start:end],
                past_key_values=cache,
            )  # fmt: skip
            logits.append(out.logits[:, -1])
    return torch.stack(logits)
