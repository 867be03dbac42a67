"""Multi-head latent attention: slots of latents against transformers' own cache and its own expanded attention."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, DynamicCache

import kvsketch
from kvsketch import CompressedCache
from kvsketch.cache import attention, latent, rollback, rotary
from kvsketch.cache.latent import Absorbed, LatentLayer, expands
from kvsketch.cache.memory import sizes_of
from kvsketch.decode.sampling import Draw
from kvsketch.decode.shared import SharedRows
from kvsketch.methods import parse_method, supporting
from kvsketch.slots.heads import head_share
from kvsketch.slots.table import stored_vectors
from tests.cache.test_tensor_parallel import Mesh
from tests.helpers import zoo
from tests.helpers.common import also, generate, held, padded, thinned, with_budget
from tests.serve.test_engine import AsksNothing

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
    "mscale": 1.0, "mscale_all_dim": 0.7,
}  # fmt: skip
MODELS = {
    "v2": ("deepseek_v2", {}),
    "v2 with small queries, yarn": ("deepseek_v2", {"q_lora_rank": 8, "rope_parameters": YARN}),
    "v3": ("deepseek_v3", {}),
    "v3 with whole queries, yarn": ("deepseek_v3", {"q_lora_rank": None, "rope_parameters": YARN}),
    "v3 rotated by halves": ("deepseek_v3", {"rope_interleave": False}),
    "v3 eager": ("deepseek_v3", {"attn_implementation": "eager"}),
}
METHODS = ["streamingllm", "uniform", "h2o", "keyformer", "snapkv", "pyramidkv", "kcenter", "rehearse:refit=none"]
RANK, ROTARY, LAYERS = 16, 8, 2
DOCS = Path(__file__).parents[2] / "docs"


def build(name: str, **changes: Any) -> Any:
    family, settings = MODELS[name]
    return zoo.build(family, **{**settings, **changes})


@torch.no_grad()
def fed(model: Any, cache: Any, ids: Tensor, pieces: list[int], mask: Tensor | None = None) -> Tensor:
    """Logits of all tokens, fed in pieces."""
    mask = torch.ones_like(ids) if mask is None else mask
    positions, logits, start = (mask.cumsum(-1) - 1).clamp_min(0), [], 0
    for piece in pieces:
        end = start + piece
        out = model(
            ids[:, start:end], attention_mask=mask[:, :end], position_ids=positions[:, start:end], past_key_values=cache
        )
        logits.append(out.logits)
        start = end
    return torch.cat(logits, 1)


def own_cache(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config)


def apart(ours: Tensor, expected: Tensor) -> float:
    return float((ours - expected).norm() / expected.norm())


# everything is kept


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pads", [*also([0]), [0, 4, 17]], ids=["alone", "left-padded"])
@pytest.mark.parametrize("pieces", [*also([50], [1] * 24), [30, 1, 1, 1, 16, 1]], ids=["whole", "by token", "turns"])
def test_full_gives_the_logits_of_dynamic_cache(name: str, pads: list[int], pieces: list[int]) -> None:
    model = build(name)
    ids, mask = padded(zoo.tokens(len(pads), sum(pieces)), pads)
    cache = CompressedCache(model, "full")
    expected = fed(model, own_cache(model), ids, pieces, mask)
    assert apart(fed(model, cache, ids, pieces, mask)[mask.bool()], expected[mask.bool()]) < 2e-6
    assert all(isinstance(layer, LatentLayer) for layer in cache.layers)


@pytest.mark.parametrize("pieces", [[50], [20, 30]], ids=["whole", "turns"])
def test_several_tokens_are_read_by_the_models_own_attention(pieces: list[int]) -> None:
    model, ids = build("v2"), zoo.tokens(2, 50)
    ours = fed(model, CompressedCache(model, "full"), ids, pieces)
    assert torch.equal(ours, fed(model, own_cache(model), ids, pieces))


@pytest.mark.parametrize("name", ["v2", "v3"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "temperature": 0.8}], ids=str)
def test_generate_gives_the_tokens_of_the_model(name: str, options: dict[str, Any]) -> None:
    model, ids = build(name), zoo.tokens(2, 30)
    torch.manual_seed(0)
    own = model.generate(ids, max_new_tokens=16, **options)
    torch.manual_seed(0)
    ours = kvsketch.generate(model, ids, CompressedCache(model, "full"), max_new_tokens=16, **options)
    assert torch.equal(ours, own)


@pytest.mark.parametrize("method", ["full", "full:bits=8", "snapkv:budget=100"])
def test_a_stream_of_chunks_reads_everything_while_nothing_goes(method: str) -> None:
    model, ids = build("v3"), zoo.tokens(1, 90)
    cache = CompressedCache(model, method, prefill="stream", chunk=40)
    expected = fed(model, own_cache(model), ids, [90])
    assert apart(fed(model, cache, ids, [90]), expected) < (2e-2 if "bits" in method else 2e-6)


def test_gradients_of_a_prompt_reach_the_latents() -> None:
    model, ids = build("v3"), zoo.tokens(1, 20)
    weight = model.model.layers[0].self_attn.kv_a_proj_with_mqa.weight
    own = torch.autograd.grad(model(ids, use_cache=False).logits.sum(), weight)[0]
    ours = torch.autograd.grad(model(ids, past_key_values=CompressedCache(model, "full")).logits.sum(), weight)[0]
    assert torch.allclose(ours, own, rtol=1e-4, atol=1e-5)


# something goes


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How far each read of slots was from the model's own attention over the same slots, expanded."""
    result: list[float] = []
    real = attention._attend_latents

    def compared(view: Any, module: Any, query: Tensor, scale: float, *rest: Any, **options: Any) -> Any:
        if not view.appended or expands(view):
            return real(view, module, query, scale, *rest, **options)
        size = module.qk_rope_head_dim
        slots = view.layer.table.key_slots()
        latents, rotary = slots[..., size:], view.layer.neighbours(slots[..., :size])
        keys, values = module.expand_kv(latents, rotary)
        logits = query @ keys.mT * scale
        logits = logits if view.log_den is None else logits + view.log_den.unsqueeze(2)
        expected = logits.softmax(-1) @ values
        output, weights = real(view, module, query, scale, *rest, **options)
        result.append(apart(output.transpose(1, 2), expected))
        return output, weights

    monkeypatch.setattr(attention, "_attend_latents", compared)
    return result


@pytest.mark.parametrize("method", thinned(METHODS))
@pytest.mark.parametrize(
    ("name", "bits"), [("v2", 16), ("v2", 4), ("v3 with whole queries, yarn", 8), ("v3 rotated by halves", 2)]
)
def test_a_step_reads_what_the_heads_of_the_model_would(name: str, method: str, bits: int, steps: list[float]) -> None:
    model, ids = build(name), zoo.tokens(2, 110)
    cache = CompressedCache(model, with_budget(f"{method}:bits={bits}", 24))
    fed(model, cache, ids, [80, *[1] * 5, 20, *[1] * 5])
    assert len(steps) == 10 * LAYERS and max(steps) < 1e-5
    assert held(cache) <= 24


@pytest.mark.parametrize(("bits", "most"), [(8, 0.02), (4, 0.15), (2, 0.5)])
def test_codes_of_latents_and_of_rotary_keys_have_the_error_of_their_bits(bits: int, most: float) -> None:
    model, ids = build("v3"), zoo.tokens(1, 300)
    exact, coded = (CompressedCache(model, method) for method in ("full", f"full:bits={bits}"))
    for cache in (exact, coded):
        fed(model, cache, ids, [300])
    parts = zip(*(stored_vectors(cache.slot_layers[0].table) for cache in (exact, coded)), strict=True)
    for own, held_so in parts:
        error = apart(held_so[:, :, :300], own)
        assert most / 20 < error < most


@pytest.mark.parametrize("method", thinned(METHODS))
@pytest.mark.parametrize("pads", [*also([0]), [0, 6]], ids=["alone", "left-padded"])
@torch.no_grad()
def test_weights_and_padding_as_the_table_says(method: str, pads: list[int]) -> None:
    """One layer: the slots before each forward, written as a mask for all heads, give the same logits without a
    cache.
    """
    model, pieces = build("v3", num_hidden_layers=1), [30, *[1] * 14, 5, 1, 1, 1]
    ids, mask = padded(zoo.tokens(len(pads), sum(pieces)), pads)
    cache = CompressedCache(model, with_budget(method, 12))
    length, start, lowest = ids.shape[1], 0, torch.finfo(torch.float32).min
    bias, logits = torch.full((len(pads), 1, length, length), lowest), []
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    for piece in pieces:
        rows, table = slice(start, start + piece), cache.slot_layers[0].table
        bias[:, :, rows, rows] = torch.zeros(piece, piece).masked_fill(~torch.ones(piece, piece).tril().bool(), lowest)
        index = None if table.empty else table.index_slots()
        weights = table.log_weights()[1]
        for row, _, slot in [] if index is None else (index >= 0).nonzero().tolist():
            bias[row, 0, rows, index[row, 0, slot]] = 0.0 if weights is None else weights[row, 0, slot]
        out = model(
            ids[:, rows], attention_mask=mask[:, : start + piece], position_ids=positions[:, rows],
            past_key_values=cache,
        )  # fmt: skip
        logits.append(out.logits)
        start += piece
    bias = bias.masked_fill(~mask[:, None, None, :].bool(), lowest)
    bias = bias.masked_fill(torch.eye(length).bool() & (bias == lowest), 0.0)
    expected = model(ids, attention_mask=bias, position_ids=positions, use_cache=False).logits
    assert apart(torch.cat(logits, 1)[mask.bool()], expected[mask.bool()]) < 2e-5


@pytest.mark.parametrize("method", ["h2o", "snapkv:window=8", "keyformer", "streamingllm"])
@pytest.mark.parametrize("name", ["v2", "v3"])
@torch.no_grad()
def test_methods_see_the_products_of_the_models_own_heads(
    name: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a method looks at the last queries alone, and only those are absorbed."""
    model, ids = build(name, num_hidden_layers=1), zoo.tokens(1, 60)
    cache, given, absorb = CompressedCache(model, with_budget(method, 20)), [], Absorbed.queries

    def absorbed(self: Absorbed, query: Tensor) -> Tensor:
        given.append((query, absorb(self, query)))
        return given[-1][1]

    monkeypatch.setattr(Absorbed, "queries", absorbed)
    cache.activate_past_recording()
    model(ids, past_key_values=cache)
    cache.slot_layers[0].recording = "off"
    (query, queries), layer = given[0], cache.slot_layers[0]
    keys = layer.table.key_slots()
    latents, rotary = stored_vectors(layer.table)
    expanded, _ = model.model.layers[0].self_attn.expand_kv(latents, layer.neighbours(rotary))
    assert torch.allclose(queries @ keys.mT, query @ expanded.mT, rtol=1e-4, atol=1e-4)
    again = CompressedCache(model, with_budget(method, 20))
    model(ids, past_key_values=again)
    layer.compress_pending()
    assert given[1][0].shape[2] == {"snapkv:window=8": 8, "streamingllm": 2}.get(method, 60)
    assert torch.equal(layer.table.index_slots(), again.slot_layers[0].table.index_slots())


@pytest.mark.parametrize("method", ["h2o", "snapkv:window=8", "keyformer", "h2o:share=model"])
@pytest.mark.parametrize("pads", [*also([0]), [0, 6]], ids=["alone", "left-padded"])
def test_scores_from_the_logits_of_codes_are_those_of_the_decoded_keys(
    method: str, pads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step leaves its logits, in the channels of the codes; without them keys are decoded and multiplied again."""
    model = build("v2")
    ids, mask = padded(zoo.tokens(len(pads), 88), pads)
    scores = []
    for wanted in (True, False):
        cache = CompressedCache(model, with_budget(f"{method}:bits=4", 24))
        monkeypatch.setattr(type(cache.method), "wants_logits", wanted)
        fed(model, cache, ids, [80, *[1] * 8], mask)
        scores.append(torch.cat([cache.method.worth(layer.table).flatten() for layer in cache.slot_layers]))
    assert torch.allclose(*scores, rtol=1e-4, atol=1e-5)


# bytes


def test_a_latent_is_stored_once() -> None:
    model, ids = build("v3"), zoo.tokens(2, 64)
    cache, own = CompressedCache(model, "full"), own_cache(model)
    for each in (cache, own):
        fed(model, each, ids, [64])
    latents = 2 * 64 * (RANK + ROTARY) * 4 * LAYERS
    assert cache.device_bytes == latents
    assert sum(t.nbytes for layer in own.layers for t in (layer.keys, layer.values)) == latents


@pytest.mark.parametrize(
    ("method", "tokens"),
    [("full:bits=4", 40), ("snapkv:budget=32:bits=4", 40), ("h2o:budget=32", 40)]
    + [(method, 200) for method in ("full:bits=4", "snapkv:budget=32:bits=4", "h2o:budget=32", "rehearse:refit=none")],
)
def test_bytes_are_those_that_were_foretold(method: str, tokens: int) -> None:
    model = build("v3")
    cache = CompressedCache(model, method)
    fed(model, cache, zoo.tokens(2, tokens), [tokens])
    foretold = sizes_of(model, tokens, batch=2).bytes(cache.method, more=0)
    assert foretold is not None and cache.device_bytes <= foretold
    # A short text is foretold with the room that it gets when it grows.
    assert tokens < 64 or cache.device_bytes > foretold * 0.6


def test_codes_take_the_bytes_of_their_sizes() -> None:
    """Slots of 4 bits: half a byte a channel, a step of 2 bytes for c and for r; 8 bytes for number and weight."""
    model = build("v3")
    caches = [CompressedCache(model, f"snapkv:budget={budget}:bits=4") for budget in (40, 140)]
    for cache in caches:
        fed(model, cache, zoo.tokens(1, 200), [200])
    more = caches[1].device_bytes - caches[0].device_bytes
    score = 4
    assert more == LAYERS * 100 * ((RANK + ROTARY) // 2 + 2 * 2 + 8 + score)


@pytest.mark.parametrize(
    ("method", "size"), [("full:bits=8", 588), ("full:bits=4", 300), ("full:bits=2", 156), ("rehearse:refit=none", 152)]
)
def test_the_page_says_what_a_token_of_deepseek_v3_takes(method: str, size: int) -> None:
    config, tokens = AutoConfig.for_model("deepseek_v3", dtype="bfloat16"), 1_000_000
    sizes = sizes_of(config, tokens)
    assert sizes.full == tokens * config.num_hidden_layers * 1152
    held_by_all = sizes.bytes(parse_method(method), more=0)
    assert held_by_all is not None
    # A table that grows has up to a 64th more slots than tokens, and pieces of work of a large head are listed.
    assert 1.0 <= held_by_all / (tokens * config.num_hidden_layers * size) < 1.02
    assert f"{size}" in (DOCS / "latent.md").read_text(encoding="utf-8")


def test_a_budget_from_memory_counts_latents() -> None:
    model = build("v3")
    cache = CompressedCache(model, "snapkv:bits=4", memory="12kB", context=400)
    fed(model, cache, zoo.tokens(1, 400), [400])
    assert 11_500 < cache.device_bytes <= 12_000


# the verbs of a cache


@pytest.mark.parametrize("method", ["full", "full:bits=4", "snapkv:budget=40:bits=8", "rehearse:refit=none:budget=50%"])
def test_a_saved_cache_goes_on_as_before(method: str, tmp_path: Path) -> None:
    model, ids = build("v2"), zoo.tokens(1, 100)
    cache = CompressedCache(model, method)
    fed(model, cache, ids[:, :90], [80, *[1] * 10])
    cache.save(tmp_path / "latents.kvs")
    loaded, copied = CompressedCache.load(tmp_path / "latents.kvs", model), copy.deepcopy(cache)
    assert loaded.device_bytes <= cache.device_bytes == copied.device_bytes
    rest = [fed_on(model, each, ids[:, 90:]) for each in (cache, loaded, copied)]
    assert torch.equal(rest[0], rest[1]) and torch.equal(rest[0], rest[2])


@torch.no_grad()
def fed_on(model: Any, cache: Any, ids: Tensor) -> Tensor:
    return torch.cat([model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(ids.shape[1])], 1)


@pytest.mark.parametrize("method", ["full", "full:bits=4", "snapkv:budget=40"])
def test_crop_forgets_the_newest_tokens(method: str) -> None:
    model, ids = build("v2"), zoo.tokens(1, 100)
    caches = [CompressedCache(model, method) for _ in range(2)]
    for cache in caches:
        fed(model, cache, ids[:, :80], [80])
    caches[0].activate_past_recording()
    fed_on(model, caches[0], ids[:, :1])
    caches[0].crop(-1)
    rollback.end_recording(caches[0].layers)
    assert torch.equal(*(fed_on(model, cache, ids[:, 80:]) for cache in caches))


def test_rows_are_reordered_and_reset() -> None:
    model, ids = build("v3"), zoo.tokens(3, 100)
    cache, other = (CompressedCache(model, "h2o:budget=30:bits=8") for _ in range(2))
    order = torch.tensor([2, 0, 0])
    fed(model, cache, ids[:, :80], [80])
    cache.reorder_cache(order)
    fed(model, other, ids[order, :80], [80])
    assert apart(fed_on(model, cache, ids[order, 80:]), fed_on(model, other, ids[order, 80:])) < 1e-5
    cache.reset()
    assert cache.tokens_seen == 0 and cache.device_bytes == 0
    assert apart(fed(model, cache, ids, [100]), fed(model, own_cache(model), ids, [100])) < 2e-6


def test_a_model_with_its_own_cache_stays_as_it_is() -> None:
    model, ids = build("v3"), zoo.tokens(1, 20)
    before = fed(model, own_cache(model), ids, [10, 10])
    own = type(model.model.layers[0].self_attn).expand_kv
    CompressedCache(model, "snapkv:budget=64")
    assert torch.equal(fed(model, own_cache(model), ids, [10, 10]), before)
    kvsketch.uninstall()
    assert type(model.model.layers[0].self_attn).expand_kv in (own, getattr(own, "__wrapped__", own))
    assert apart(generate(model, ids, CompressedCache(model, "full")).logits[0], before[:, -1]) < 2e-6


@pytest.mark.parametrize("method", ["full", "full:bits=8", "streamingllm:budget=40:bits=8"])
@torch.no_grad()
def test_half_precision_with_a_large_common_part(method: str) -> None:
    """Latents of real models have channels far from zero: codes are centred, and bf16 stays near float32."""
    model = build("v3")
    for layer in model.model.layers:
        layer.self_attn.kv_a_layernorm.weight[0] = 30.0
    ids, pieces = zoo.tokens(1, 80), [70, *[1] * 10]
    expected, exact = (fed(model, cache, ids, pieces) for cache in (CompressedCache(model, method), own_cache(model)))
    halved, own = (
        fed(model.bfloat16(), cache, ids, pieces) for cache in (CompressedCache(model, method), own_cache(model))
    )
    assert apart(halved.float(), expected) < 1.5 * apart(own.float(), exact) + 0.01


# refused


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("subgen", "reads or rewrites values apart from keys"),
        ("balancekv", "reads or rewrites values apart from keys"),
        ("quest", "reads or rewrites values apart from keys"),
        ("clusterkv", "reads or rewrites values apart from keys"),
        ("infinigen", "reads or rewrites values apart from keys"),
        ("expected", "the norm of its value in each head"),
        ("rehearse", "refit=full rewrites values"),
        ("full:key_bits=8:value_bits=4", "key_bits=8 and value_bits=4 differ"),
    ],
)
def test_methods_that_need_values_of_their_own_are_refused(method: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"does not work with deepseek_v3.*{reason}") as raised:
        CompressedCache(build("v3"), method)
    assert "\n" not in str(raised.value)


def test_every_method_is_either_served_or_refused_here() -> None:
    assert {*supporting("latent")} == {*METHODS, "full", "kvzip"} - {"rehearse:refit=none"}


def test_angles_are_those_of_slots_of_latents_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that caches the keys of all heads has its rotary channels last."""
    config = build("v3").config
    assert len(rotary.frequencies(config)) == ROTARY // 2
    monkeypatch.setattr(latent, "attention_classes", lambda config: iter(()))
    assert rotary.frequencies(config) == ()
    with pytest.raises(ValueError, match="rehearse rotates queries by the rotary angles"):
        CompressedCache(config, "rehearse:refit=none")


def test_sizes_that_no_codec_takes_are_refused() -> None:
    model = build("v3", qk_rope_head_dim=4)
    with pytest.raises(ValueError, match="bits=4 cannot code heads of size 4"):
        CompressedCache(model, "full:bits=4")


def test_weights_that_are_not_plain_are_refused() -> None:
    model, ids = build("v3"), zoo.tokens(1, 10)

    class Other(nn.Linear):
        pass

    attention = model.model.layers[0].self_attn
    attention.kv_b_proj.__class__ = Other
    with pytest.raises(ValueError, match="holds kv_b_proj as Other"):
        model(ids, past_key_values=CompressedCache(model, "full"))


def test_tensor_parallel_is_refused() -> None:
    model = build("v3")
    model._device_mesh = Mesh(tp=2)
    model.tp_plan = {"model.layers.*.self_attn.q_b_proj": "colwise", "model.layers.*.self_attn.o_proj": "rowwise"}
    with pytest.raises(ValueError, match="all KV heads of deepseek_v3 but a part of the query heads"):
        head_share(model)


def test_kvzip_lets_the_model_repeat_over_latents() -> None:
    model, ids = build("v3"), zoo.tokens(1, 120)
    cache = CompressedCache(model, "kvzip:budget=50%")
    kvsketch.prefill(model, ids, cache)
    assert cache.tokens_seen == 120 and 55 <= cache.tokens_per_head <= 60


# the sizes of DeepSeek, for which some operations have no kernel

REAL = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}


def test_sizes_of_deepseek(steps: list[float]) -> None:
    model, ids = zoo.build("deepseek_v3", **REAL), zoo.tokens(1, 90)
    fed(model, CompressedCache(model, "snapkv:budget=40:window=8:bits=4"), ids, [80, *[1] * 10])
    assert len(steps) == 10 * LAYERS and max(steps) < 1e-5
    assert 0.08 < error_of_latents(model, ids, 4) < 0.13
    assert 0.004 < error_of_latents(model, ids, 8) < 0.015


def error_of_latents(model: Any, ids: Tensor, bits: int) -> float:
    """The relative error of the coded latents of the first layer."""
    exact, coded = (CompressedCache(model, method) for method in ("full", f"full:bits={bits}"))
    for cache in (exact, coded):
        fed(model, cache, ids[:, :80], [80])
    own, held_so = (stored_vectors(cache.slot_layers[0].table)[0][:, :, :80] for cache in (exact, coded))
    return apart(held_so, own)


@pytest.mark.parametrize("method", ["snapkv:budget=16:window=4:bits=4", "h2o:budget=16", "rehearse:refit=none"])
def test_a_step_asks_the_device_for_nothing(method: str) -> None:
    shared = SharedRows(build("v3"), method, rows=2, longest=60)
    shared.step(2, Draw.GREEDY)
    with AsksNothing():
        shared.step(2, Draw.GREEDY)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("method", thinned(["full", "full:bits=4", *(with_budget(f"{m}:bits=4", 40) for m in METHODS)]))
@pytest.mark.parametrize("name", ["v2", "v3"])
def test_a_gpu_computes_what_the_cpu_does(name: str, method: str) -> None:
    """Steps of the sizes of DeepSeek, eager and captured."""
    family, _ = MODELS[name]
    # Experts in float32 cannot be captured, whatever the cache.
    model = zoo.build(family, **REAL, first_k_dense_replace=LAYERS)
    ids, pieces = zoo.tokens(2, 100), [80, *[1] * 10, 10]
    on_cpu = fed(model, CompressedCache(model, method), ids, pieces)
    on_gpu = fed(model.cuda(), CompressedCache(model, method), ids.cuda(), pieces)
    # Scores that are equal up to rounding may keep other tokens, in a few rows; codes may differ by one step.
    near = 1e-3 if method == "full" else 1e-2
    same = (on_gpu.cpu() - on_cpu).norm(dim=-1) / on_cpu.norm(dim=-1) < near
    assert same.float().mean() > 0.95
    options = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    eager = model.generate(ids.cuda(), past_key_values=CompressedCache(model, method), **options)
    captured = kvsketch.generate(model, ids.cuda(), CompressedCache(model, method), **options)
    assert method == "full" or torch.equal(captured, eager)
