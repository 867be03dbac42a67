"""What methods say of themselves: capabilities with reasons, and frozen objects that hide nothing."""

from __future__ import annotations

import dataclasses
import functools
import pickle
from typing import Any

import pytest
import torch

import kvsketch
from kvsketch import METHODS, CompressedCache, parse_method
from kvsketch.byte_sizes import parsed
from kvsketch.decode import shared
from kvsketch.integrations.vllm.settings import chosen_full, chosen_method, keeps_all
from kvsketch.methods import Method, supporting, usual
from kvsketch.methods.base import BudgetedMethod
from kvsketch.methods.capabilities import MEANINGS, OPTIONS, SUPPORTED, Capabilities, Support, no
from kvsketch.methods.replay_map import ReplayMap
from tests.helpers import zoo
from tests.helpers.common import generate, with_budget

VARIANTS = [
    *METHODS, "full:bits=4", "full:bits=auto", "kcenter:slide=false", "balancekv:form=paper", "balancekv:form=stream",
    "subgen:budget=25%", "subgen:normalizer=clipped:policy=grow", "rehearse:loss=2%", "rehearse:wait=compact",
    "rehearse:replay=exact", "rehearse:refit=none", "snapkv:share=model", "streamingllm:positions=cache",
    "clusterkv:offload=host",
]  # fmt: skip


def named(text: str) -> Method:
    """A variant as it is, a method of the index with a budget in tokens."""
    return usual(METHODS[text]) if text in METHODS else parse_method(text)


def test_a_capability_is_true_or_has_a_reason() -> None:
    assert SUPPORTED and not no("x") and no("x").reason == "x" and Support() == SUPPORTED
    fields = [each.name for each in dataclasses.fields(Capabilities)]
    assert fields == [*MEANINGS] and {*OPTIONS.values()} <= {*fields}
    with pytest.raises(dataclasses.FrozenInstanceError):
        Capabilities().batched = SUPPORTED  # type: ignore[misc]


@pytest.mark.parametrize("text", VARIANTS)
def test_reasons_are_short_sentences(text: str) -> None:
    for name, support in named(text).capabilities.named().items():
        assert support or (support.reason and "\n" not in support.reason and len(support.reason) < 120), name


@functools.cache
def model() -> Any:
    return zoo.build("llama", num_hidden_layers=2)


@functools.cache
def latents() -> Any:
    return zoo.build("deepseek_v3").config


def works(call: Any) -> str | None:
    """None if a call works; else what its ValueError says."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("text", VARIANTS)
def test_what_a_method_says_is_what_happens(text: str) -> None:
    """Every capability is asked of the part of kvsketch that it is about, which refuses with the reason it gives."""
    method = named(text)
    can = method.capabilities
    without = ":".join(part for part in str(method).split(":") if not part.startswith(("budget=", "loss=")))

    def continued() -> None:
        cache = CompressedCache(model(), method)
        kvsketch.prefill(model(), zoo.tokens(1, 20), cache)
        cache.continued()

    def serve() -> None:
        given = {"kvsketch": str(method)}
        chosen_full(given) if keeps_all(given) else chosen_method(given)

    def offload() -> None:
        parse_method(text if "offload" in text else f"{text}:offload=host")

    def share() -> None:
        parse_method(f"{text.partition(':share')[0]}:share=layer")

    asked = {
        "batched": lambda: shared.SharedRows(model(), method, rows=2, longest=60),
        "documents": continued,
        "cache_positions": lambda: parse_method(f"{text.partition(':positions')[0]}:positions=cache"),
        "latent": lambda: CompressedCache(latents(), method),
        "shared_budget": share,
        "offload": offload,
        "stream": lambda: CompressedCache(model(), method, prefill="stream"),
        "memory": lambda: CompressedCache(model(), without, memory=parsed("64MB"), context=1000),
        "vllm": serve,
    }
    assert asked.keys() == can.named().keys()
    for name, support in can.named().items():
        refused = works(asked[name])
        if name == "memory" and "bytes" not in without and without != str(method) and "loss=" in str(method):
            continue  # without its loss it is another method
        if support:
            assert refused is None, (name, refused)
        else:
            assert refused is not None and str(support.reason).partition(";")[0] in refused, (name, refused)


def test_bits_that_a_prompt_chooses_are_refused_where_tables_are_laid_out_before() -> None:
    plain, chosen = (parse_method(f"clusterkv{bits}").capabilities for bits in ("", ":bits=auto"))
    assert plain.offload and "bits=4" in str(chosen.offload.reason)
    assert "key_bits=8" in str(parse_method("rehearse:budget=64:bits=auto").capabilities.batched.reason)
    assert parse_method("rehearse:budget=64:key_bits=8").capabilities.batched


def test_methods_that_support_something_are_found() -> None:
    assert supporting("documents") == ["full", "expected", "rehearse"]
    assert supporting("offload") == ["quest", "clusterkv", "infinigen"]
    assert supporting("cache_positions") == ["streamingllm", "h2o", "snapkv"]


# frozen objects


def used(method: Method) -> None:
    """A prompt, a second turn, and generated tokens, alone and in shared tables where it can."""
    cache = CompressedCache(model(), method)
    assert cache.method is method
    kvsketch.prefill(model(), zoo.tokens(1, 90), cache)
    generate(model(), zoo.tokens(1, 100), cache, max_new_tokens=4)
    cache.reset()
    if method.capabilities.batched:
        shared.SharedRows(model(), method, rows=2, longest=60)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_its_fields(name: str) -> None:
    """It equals its copies, before and after use, and nothing is written on it."""
    text = with_budget(name, 24)
    method, other = parse_method(text), parse_method(text)
    used(method)
    assert vars(method).keys() <= {each.name for each in dataclasses.fields(method)}
    for same in (other, dataclasses.replace(method), pickle.loads(pickle.dumps(method)), parse_method(str(method))):
        assert method == same and hash(method) == hash(same) and str(method) == str(same)
    assert parse_method(method.full_text()) == method
    for each in dataclasses.fields(method):
        assert getattr(method, each.name) == getattr(other, each.name), each.name


@pytest.mark.parametrize("name", METHODS)
def test_a_method_with_another_parameter_differs(name: str) -> None:
    method: Any = usual(METHODS[name])
    for change in ({"bits": 8}, *([{"budget": 2048}, {"sinks": 5}] if isinstance(method, BudgetedMethod) else [])):
        changed = dataclasses.replace(method, **change)
        assert changed != method and dataclasses.replace(changed, **{k: getattr(method, k) for k in change}) == method


def test_a_small_budget_does_not_change_what_was_asked() -> None:
    """The sinks of a small budget are fewer, and a larger one has them again."""
    small = parse_method("balancekv:budget=64")
    assert str(small) == "balancekv:budget=64"
    assert dataclasses.replace(small, budget=1024) == parse_method("balancekv:budget=1024")
    assert small.exact_tokens(64) == (8, 8) and small.exact_tokens(1024) == (32, 32)


def test_maps_are_a_part_of_a_method() -> None:
    maps, same, others = (ReplayMap({0: torch.full((1, 2), x)}, {0: torch.zeros(1)}) for x in (1.0, 1.0, 2.0))
    plain = parse_method("rehearse:replay=learned")
    method = plain.with_map(maps)
    assert method != plain and method.learned is maps and dataclasses.replace(method) == method
    assert method == plain.with_map(same) and hash(method) == hash(plain.with_map(same))
    assert method != plain.with_map(others)
    assert str(method) == str(plain) and pickle.loads(pickle.dumps(method)) == method


def test_parameters_that_went_may_still_say_what_they_mean() -> None:
    """Files of caches name every parameter."""
    assert parse_method("uniform:budget=128:positions=text") == parse_method("uniform:budget=128")
    assert parse_method("infinigen:speculate=own") == parse_method("infinigen")
    with pytest.raises(ValueError, match=r"infinigen: speculate=previous is refused, it always means own: nothing is"):
        parse_method("infinigen:speculate=previous")
