"""Budgets from bytes: what a cache takes is computed before it exists, and measured here."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from transformers import LlamaConfig

import kvsketch
from kvsketch import CompressedCache, prefill
from kvsketch.byte_sizes import parsed
from kvsketch.cache.memory import USUAL, in_tokens, sizes_of
from kvsketch.methods.budget import Size
from tests.helpers import zoo
from tests.helpers.common import also, thinned, with_budget

MODEL = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 3}
CONTEXT = 500
FORMS = [
    *(name for name, method in kvsketch.METHODS.items() if name != "full" and not method.budget_is_mean),
    "snapkv:share=model",
    "h2o:bits=4:share=layer",
    "streamingllm:bits=8",
    "kcenter:key_bits=4",
    "clusterkv:bits=2",
    "clusterkv:offload=host",
    "quest:bits=4:offload=host",
    "infinigen:offload=host",
    "balancekv:form=stream:bits=4",
    "balancekv:den_weight=pow2",
    "subgen:normalizer=clipped:bits=4",
    "pyramidkv:budget_is=mean",
]


def measured(model: torch.nn.Module, cache: CompressedCache, rows: int = 1, steps: int = 3) -> int:
    ids = zoo.tokens(rows, CONTEXT)
    with torch.no_grad():
        prefill(model, ids[:, : CONTEXT - steps], cache)
        for i in range(CONTEXT - steps, CONTEXT):
            model(ids[:, i : i + 1], past_key_values=cache)
    return cache.device_bytes


@pytest.mark.parametrize(
    ("form", "family"),
    [*thinned((form, "llama") for form in FORMS), ("snapkv:share=model", "gemma3"), ("clusterkv", "gemma3")],
)
def test_what_is_measured_is_below_what_was_promised_and_near_it(form: str, family: str) -> None:
    model = zoo.build(family, **({**MODEL, "num_hidden_layers": 2} if family == "llama" else {}))
    name, _, rest = form.partition(":")
    plain = with_budget(name, 80)
    text = ":".join(filter(None, [*(p for p in plain.split(":") if not p.startswith("budget=")), rest]))
    whole = measured(model, CompressedCache(model, ":".join(filter(None, [plain, rest]))), rows=2)
    cache = CompressedCache(model, text, memory=whole + whole // 8, context=CONTEXT, batch=2)
    held = measured(model, cache, rows=2)
    assert held <= whole + whole // 8
    if kvsketch.METHODS[name].family != "recall" or "offload" in form:
        assert held > 0.75 * (whole + whole // 8), (str(cache.method), held, whole)


@pytest.mark.parametrize("form", ["rehearse", "rehearse:bits=16:share=head", "kvzip", "snapkv:bits=4:share=model"])
def test_what_a_prompt_leaves_is_computed(form: str) -> None:
    model, ids = zoo.build("llama", **MODEL), zoo.tokens(1, CONTEXT)
    cache = CompressedCache(model, f"{form}:budget=1/2")
    prefill(model, ids, cache)
    expected = sizes_of(model, CONTEXT).bytes(cache.method, more=0)
    assert expected is not None and 0.97 * expected < cache.device_bytes <= expected


@pytest.mark.parametrize("text", ["full", "full:bits=4", "quest", "clusterkv"])
def test_what_keeps_every_token_fits_or_is_refused(text: str) -> None:
    model = zoo.build("llama", **MODEL)
    needed = measured(model, CompressedCache(model, text))
    cache = CompressedCache(model, text, memory=int(1.5 * needed), context=CONTEXT)
    assert str(cache.method) == text and measured(model, cache) <= 1.5 * needed
    with pytest.raises(ValueError, match=r"is too little for 500 tokens, which take .*; use "):
        CompressedCache(model, text, memory=needed // 2, context=CONTEXT)


def test_what_would_fit_is_named() -> None:
    config = zoo.build("llama", **MODEL).config
    with pytest.raises(ValueError, match="use bits=8, which take"):
        CompressedCache(config, "full", memory=300_000, context=CONTEXT)
    with pytest.raises(
        ValueError, match=r"memory=1\.00 kB is too little .* with budget=6, which sinks .*smaller sinks"
    ):
        CompressedCache(config, "h2o:sinks=2:recent=4", memory=1000, context=CONTEXT)
    with pytest.raises(ValueError, match="snapkv:budget=64 both set the size of the cache"):
        CompressedCache(config, "snapkv:budget=64", memory="1MB")
    with pytest.raises(ValueError, match="its tables grow with the text; use form=stream; or leave out memory"):
        CompressedCache(config, "balancekv:form=paper", memory="1MB")
    with pytest.raises(ValueError, match="context=0 and batch=1 must be"):
        CompressedCache(config, "snapkv", memory="1MB", context=0)
    with pytest.raises(ValueError, match="batch='2' must be"):
        CompressedCache(config, "snapkv", memory="1MB", batch="2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="need memory"):
        CompressedCache(config, "snapkv", context=CONTEXT)


def test_tokens_that_wait_are_part_of_what_rehearse_promises() -> None:
    model = zoo.build("llama", **MODEL)
    cache = CompressedCache(model, "rehearse:chunk=64", memory=800_000, context=CONTEXT)
    assert cache.method.budget.tokens and measured(model, cache, steps=30) <= 800_000


@pytest.mark.parametrize("tokens", [70, *also(20, 200)])
@pytest.mark.parametrize(
    ("form", "steps"),
    [
        ("rehearse:wait=16:refit=none", 60),
        ("rehearse:wait=128:bits=16:refit=none", 200),
        ("kvzip:wait=64", 100),
        ("expected", 200),
        *also(("rehearse:wait=64:refit=none", 200)),
    ],
)
def test_room_for_tokens_that_wait_is_no_more_than_may_wait(form: str, steps: int, tokens: int) -> None:
    model, ids = zoo.build("llama", **{**MODEL, "num_hidden_layers": 2}), zoo.tokens(1, tokens + steps)
    cache = CompressedCache(model, f"{form}:budget=40")
    prefill(model, ids[:, :tokens], cache)
    near = 0.0
    with torch.no_grad():
        for more in range(1, steps):
            model(ids[:, tokens + more - 1 : tokens + more], past_key_values=cache)
            promised = sizes_of(model, tokens).bytes(cache.method, more=more)
            assert promised is not None and cache.device_bytes <= promised, more
            near = max(near, cache.device_bytes / promised)
    assert near > 0.85


def test_few_tokens_are_promised_as_they_are_before_they_are_coded() -> None:
    model = zoo.build("llama", **MODEL)
    cache = CompressedCache(model, "full:bits=4", memory="1MB", context=63)
    prefill(model, zoo.tokens(1, 62), cache)
    model(zoo.tokens(1, 1), past_key_values=cache)
    promised = sizes_of(model, 63).bytes(cache.method)
    assert promised is not None and cache.device_bytes <= promised


@pytest.mark.parametrize("share", ["1/2", "1/32", *also("1/4", "1/8", "1/16")])
@pytest.mark.parametrize("form", ["rehearse", "h2o:bits=8", *also("kvzip:bits=4", "snapkv", "streamingllm:bits=4")])
def test_a_share_of_bytes_is_what_is_taken(form: str, share: str) -> None:
    model = zoo.build("llama", **MODEL).bfloat16()
    cache = CompressedCache(model, f"{form}:bytes={share}")
    for tokens in (USUAL, 4 * USUAL):
        sizes = sizes_of(model, tokens)
        held = sizes.bytes(cache.method, more=0)
        assert held is not None and held <= Fraction(share) * sizes.full
        # Where every token is kept, no more can be.
        assert held > 0.9 * Fraction(share) * sizes.full or cache.method.budget == Size.parse("100%")


def test_a_share_of_bytes_is_measured_and_counts_numbers_of_16_bits() -> None:
    kept = []
    for dtype in (torch.bfloat16, torch.float32):
        model = zoo.build("llama", **{**MODEL, "num_hidden_layers": 2}).to(dtype)
        cache = CompressedCache(model, "rehearse:bytes=1/8:chunk=64")
        with torch.no_grad():
            prefill(model, zoo.tokens(1, 1200), cache)
        kept.append(str(cache.method))
        # What is beside the slots of a short text is the larger part of it.
        assert 0.9 / 8 < cache.device_bytes / (1200 * 2 * 2 * 2 * 32 * 2) < 1.3 / 8
    assert kept[0] == kept[1]


def test_fewer_bytes_have_fewer_bits_unless_bits_are_given() -> None:
    config = zoo.build("llama", **MODEL).config
    chosen = [in_tokens(f"rehearse:bytes={share}", config) for share in ("1/4", "1/8", "1/16", "1/32")]
    assert [method.stored_bits.pair for method in chosen] == [(4, 4), (4, 4), (4, 2), (3, 2)]
    for bits, pair in (("bits=8", (8, 8)), ("value_bits=3", (4, 3)), ("key_bits=4:value_bits=4", (4, 4))):
        assert in_tokens(f"rehearse:bytes=1/16:{bits}", config).stored_bits.pair == pair
    assert in_tokens("kvzip:bytes=1/16:bits=4", config).stored_bits.pair == (4, 4)
    # More tokens fit in fewer bits, and all say the same of themselves when they are read again.
    shares = [float(in_tokens(f"rehearse:bytes=1/16:value_bits={bits}", config).budget.share) for bits in (8, 4, 3, 2)]
    assert shares == sorted(shares) and len(set(shares)) == 4
    for method in chosen:
        assert kvsketch.parse_method(str(method)) == method == in_tokens(method, config)


def test_shares_of_tokens_are_those_that_pages_name() -> None:
    config = LlamaConfig(
        hidden_size=1536, num_attention_heads=12, num_key_value_heads=2, head_dim=128, num_hidden_layers=28,
        dtype=torch.bfloat16,
    )  # fmt: skip
    shares = [str(in_tokens(f"rehearse:bytes={share}", config).budget) for share in ("1/8", "1/16", "1/32")]
    assert shares == ["41.8%", "25.7%", "13.6%"]  # docs/quantisation.md


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rehearse:bytes=1/8:budget=40%", "no budget beside bytes"),
        ("rehearse:bytes=1/8:loss=2%", "no bytes together with loss"),
        ("snapkv:bytes=1024", "a share such as 1/8"),
        ("snapkv:bytes=3/2", "outside"),
        ("rehearse:bytes=1/5000", r"bytes=1/5000 cannot be had: .* is too little"),
        ("full:bytes=1/8", "unknown parameter 'bytes'"),
        ("rehearse:bytes=1/8:wait=compact", "its tokens wait until they are compacted"),
    ],
)
def test_a_share_of_bytes_that_cannot_be_says_why(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CompressedCache(zoo.build("llama", **MODEL), text)
    with pytest.raises(ValueError, match="both set the size of the cache"):
        CompressedCache(zoo.build("llama", **MODEL), "rehearse:bytes=1/8", memory="1MB")


def test_sizes_of_memory() -> None:
    assert (parsed("2GB"), parsed("1.5 GiB"), parsed("500kb"), parsed(1024)) == (2 * 10**9, 3 << 29, 500_000, 1024)
    assert (parsed("1.5G"), parsed("7"), parsed("2TB"), parsed("1 TiB")) == (15 * 10**8, 7, 2 * 10**12, 1 << 40)
    assert parsed(2e9) == 2 * 10**9
    for wrong in ("much", "2 potatoes", "0", True, "-1GB", 0.5, float("nan")):
        with pytest.raises(ValueError, match="such as 2GB"):
            parsed(wrong)
