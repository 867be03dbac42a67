"""offload=host: keys and values in host memory, the same answers, device memory that does not follow the context."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import kvsketch
from kvsketch import CompressedCache
from kvsketch.serve import summary
from kvsketch.slots import host
from tests.decode.test_decoding import DEVICE, without_gpu  # noqa: F401
from tests.helpers import zoo
from tests.helpers.common import also, generate, padded, read_pieces

# Small clusters, pages and tails, so that a short text passes through everything several times.
NEAR = {
    "clusterkv": "clusterkv:budget=16:sinks=2:skip_layers=0:recluster=8:recluster_into=2:tokens_per_cluster=4",
    "clusterkv, groups": "clusterkv:budget=16:sinks=5:skip_layers=1:recluster=7:share_in_group=true:completion=false",
    "quest": "quest:budget=16:page=2:skip_layers=0",
    "infinigen": "infinigen:budget=16:skip_layers=0",
    "quest, share": "quest:budget=50%:page=4:skip_layers=1",
}
# Settings of a method change what it reads, not how tokens move: they are usual in two tests.
EACH = ["clusterkv", "quest", "infinigen", *also("clusterkv, groups", "quest, share")]


def build(family: str) -> Any:
    return zoo.build(family).to(DEVICE)


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return zoo.tokens(batch, length, seed).to(DEVICE)


def both(name: str) -> list[str]:
    return [NEAR[name], f"{NEAR[name]}:offload=host"]


def assert_same(results: list[Any]) -> None:
    assert results[0].sequences.tolist() == results[1].sequences.tolist()
    for near, far in zip(results[0].logits, results[1].logits, strict=True):
        torch.testing.assert_close(near, far, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NEAR)
@pytest.mark.parametrize("pads", [[0, 37], *also([0, 9])], ids=str)
def test_offloaded_equals_on_device(name: str, pads: list[int]) -> None:
    """The last row begins with fewer tokens than sinks and budget."""
    model = build("llama")
    ids, mask = padded(tokens(2, 40), pads)
    caches = [CompressedCache(model, method) for method in both(name)]
    assert_same([generate(model, ids, c, attention_mask=mask, max_new_tokens=20) for c in caches])
    assert caches[0].host_bytes == 0 and caches[1].host_bytes > 0
    assert caches[0].tokens_stored == caches[1].tokens_stored
    assert caches[0].hit_rate is None and 0 < caches[1].hit_rate < 1


@pytest.mark.parametrize("name", ["clusterkv", "quest", "infinigen"])
def test_without_a_hot_set_every_read_is_a_copy(name: str) -> None:
    """keep_steps=0: the same answers, and no read finds its token on the device."""
    model = build("llama")
    caches = [CompressedCache(model, f"{NEAR[name]}{more}") for more in ("", ":offload=host:keep_steps=0")]
    ids, mask = padded(tokens(2, 40), [0, 9])
    assert_same([generate(model, ids, c, attention_mask=mask, max_new_tokens=12) for c in caches])
    assert caches[1].hit_rate == 0.0


def test_tokens_in_host_memory_are_counted_as_held() -> None:
    model = build("llama")
    near, far = (CompressedCache(model, method) for method in both("quest"))
    for cache in (near, far):
        model(tokens(1, 40), past_key_values=cache)
    assert far.tokens_per_head == near.tokens_per_head == 40 and "40" in far.describe().splitlines()[1]
    device, on_host = zip(
        *(line.replace(",", "").split()[-2:] for line in far.describe().splitlines()[1:]), strict=True
    )
    assert (sum(map(int, device)), sum(map(int, on_host))) == (far.device_bytes, far.host_bytes)
    assert torch.equal(summary.shares(far), torch.ones(40))


@pytest.mark.parametrize(
    ("name", "family"),
    [("clusterkv", "qwen3"), ("quest", "gemma2"), ("infinigen", "gemma2"), ("quest", "gptj"), ("clusterkv", "gpt_oss")],
)
def test_families(name: str, family: str) -> None:
    """Normed keys, soft-capped logits, an attention of its own, sink logits; sliding layers stay as they are."""
    model, ids = build(family), tokens(1, 40)
    assert_same([generate(model, ids, CompressedCache(model, method)) for method in both(name)])


@pytest.mark.parametrize("name", EACH)
def test_a_short_prompt_moves_out_when_it_outgrows_the_budget(name: str) -> None:
    model, ids = build("llama"), tokens(1, 9)
    caches = [CompressedCache(model, method) for method in both(name)]
    assert_same([generate(model, ids, c, max_new_tokens=20) for c in caches])
    assert caches[1].host_bytes > 0


@pytest.mark.parametrize("name", NEAR)
@pytest.mark.parametrize(("length", "pads"), [(12, [0, 9]), *also((40, [0, 0]))])
def test_captured_steps(name: str, pads: list[int], length: int) -> None:
    model = build("llama")
    ids, mask = padded(tokens(2, length), pads)
    inputs = {"input_ids": ids, "attention_mask": mask}
    near, far = both(name)
    expected = model.generate(
        **inputs, past_key_values=CompressedCache(model, near), max_new_tokens=18, do_sample=False
    )
    cache = CompressedCache(model, far)
    assert kvsketch.generate(model, inputs, cache, max_new_tokens=18, do_sample=False).tolist() == expected.tolist()
    assert cache.host_bytes > 0 and cache.tokens_seen == length + 17


@pytest.mark.parametrize("name", EACH)
def test_turns_and_chunks(name: str) -> None:
    """Several tokens at once bring everything back, are read exactly, and move out again."""
    model = build("llama")
    transcripts = []
    for method in both(name):
        cache = CompressedCache(model, method)
        text = generate(model, tokens(2, 40), cache, max_new_tokens=9, prefill_chunk_size=11).sequences
        for turn in range(2):
            text = torch.cat([text, tokens(2, 3 + 9 * turn, seed=turn)], 1)
            text = generate(model, text, cache, max_new_tokens=9).sequences
        transcripts.append(text.tolist())
    assert transcripts[0] == transcripts[1]


@pytest.mark.parametrize("name", EACH)
def test_beams(name: str) -> None:
    model, ids, options = build("llama"), tokens(2, 30), {"num_beams": 3, "num_return_sequences": 3}
    sequences = [
        generate(model, ids, CompressedCache(model, m), max_new_tokens=15, **options).sequences for m in both(name)
    ]
    assert sequences[0].tolist() == sequences[1].tolist()


@pytest.mark.parametrize("name", EACH)
def test_prompt_lookup(name: str) -> None:
    model, ids = build("llama"), tokens(1, 6).repeat(1, 6)
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "prompt_lookup_num_tokens": 3}
    texts = [model.generate(ids, past_key_values=CompressedCache(model, m), **options).tolist() for m in both(name)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", EACH)
def test_copies_are_independent(name: str) -> None:
    model, ids = build("llama"), tokens(1, 40)
    cache = CompressedCache(model, both(name)[1])
    with torch.no_grad():
        model(ids, past_key_values=cache)
        branch = copy.deepcopy(cache)
        once = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(10)]
        again = [model(ids[:, i : i + 1], past_key_values=branch).logits for i in range(10)]
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    cache.reset()
    assert cache.host_bytes == cache.device_bytes == 0 and branch.host_bytes > 0


def bytes_after(method: str, length: int) -> tuple[int, int, int]:
    """(device bytes, of which index and maps, host bytes) after a prompt and a few generated tokens."""
    model = build("llama")
    cache = CompressedCache(model, method)
    generate(model, tokens(1, length), cache, max_new_tokens=4)
    growing = ("centroids", "mean_values", "sizes", "offsets", "order", "page_min", "page_max", "place_of")
    states = [state for layer in cache.slot_layers for state in (layer.table.state, layer.table.hot)]
    index = sum(tensor.nbytes for state in states for name, tensor in state.named() if name in growing)
    return cache.device_bytes, index, cache.host_bytes


@pytest.mark.parametrize("name", ["clusterkv", "quest"])
def test_device_memory_stays_flat_while_the_context_doubles(name: str) -> None:
    """All that grows on the device is the index, by the share of the keys and values that the docs give."""
    near, far = both(name)
    half, whole, near_half, near_whole = (bytes_after(m, n) for m in (far, near) for n in (1000, 2000))
    assert whole[0] - whole[1] == half[0] - half[1]
    growth, full_growth = whole[1] - half[1], near_whole[0] - near_whole[1] - (near_half[0] - near_half[1])
    # fp32, d = 8: 4 tokens per cluster, each cluster 2 x 8 x 4 + 8 bytes, 8 bytes per token for order and map; pages of
    # 2, each 2 x 8 x 4 bytes, 4 per token for the map. Buffers have an eighth to spare.
    share = {"clusterkv": (72 / 4 + 8) / 64, "quest": (64 / 2 + 4) / 64}[name]
    assert share * full_growth <= growth <= 1.14 * share * full_growth
    assert whole[2] - half[2] == full_growth and near_whole[2] == 0


def test_host_memory_that_is_not_there_is_an_error_before_work(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = build("llama"), []
    cache = CompressedCache(model, "clusterkv:budget=32:offload=host")
    monkeypatch.setattr(host, "free_host_memory", lambda: 100_000)
    model.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(MemoryError, match=r"offload=host needs .* GiB .*0\.00 GiB are free.*offload=none"):
        model(tokens(1, 400), past_key_values=CompressedCache(model, "clusterkv:budget=32:skip_layers=0:offload=host"))
    assert not calls
    model(tokens(1, 30), past_key_values=cache)


def test_free_memory_counts_the_limits_of_a_container(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 600000\ninactive_file 50000\n")
    assert host._group_memory(tmp_path) == 350_000
    (tmp_path / "memory.max").write_text("max\n")
    assert host._group_memory(tmp_path) is None
    assert host._group_memory(tmp_path / "absent") is None
    assert host.free_host_memory() > 0


def test_what_cannot_be_offloaded_says_so() -> None:
    model = build("mpt")
    with pytest.raises(ValueError, match=r"mpt reads every token.*offload=none"):
        generate(model, tokens(1, 40), CompressedCache(model, both("clusterkv")[1]))
    with pytest.raises(ValueError, match="offload=disk is not valid; use none or host"):
        kvsketch.parse_method("quest:offload=disk")
    with pytest.raises(ValueError, match="keep_steps=-1"):
        kvsketch.parse_method("clusterkv:keep_steps=-1")


@pytest.mark.parametrize("name", ["clusterkv", "quest", "infinigen"])
@pytest.mark.parametrize("pads", [[0, 10], *also([0])], ids=str)
def test_a_prompt_that_is_too_short_for_codes_moves_when_it_has_grown(name: str, pads: list[int]) -> None:
    """Its tokens go to the host in a decode step."""
    model = zoo.build("llama").to(DEVICE)
    ids, mask = padded(tokens(len(pads), 80), pads)
    near, far = (CompressedCache(model, f"{NEAR[name]}:bits=4:{where}") for where in ("offload=none", "offload=host"))
    pieces = [(0, 50), *((n, n + 1) for n in range(50, 80))]
    logits = [read_pieces(model, cache, ids, mask, pieces) for cache in (near, far)]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
    assert far.host_bytes > 0


@pytest.mark.parametrize(
    ("name", "bits"),
    [("clusterkv", "bits=4"), ("infinigen", "bits=4"), ("quest", "key_bits=8"), *also(("quest", "bits=4"))],
)
def test_codes_move_to_the_host_and_back(name: str, bits: str, tmp_path: Path) -> None:
    """What quantised tokens on the device give: steps, a second prompt, a file, other rows, a stream."""
    model = zoo.build("llama", hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16).to(DEVICE)
    ids, mask = padded(tokens(2, 120), [0, 10])
    near, far, plain = (
        CompressedCache(model, f"{NEAR[name]}:{rest}") for rest in (bits, f"{bits}:offload=host", "offload=host")
    )

    def read(cache: Any, *ends: int) -> torch.Tensor:
        seen = cache.tokens_seen
        return read_pieces(model, cache, ids, mask, list(zip([seen, *ends], ends, strict=False)))

    steps = range(81, 92)
    torch.testing.assert_close(
        *(read(cache, 80, *steps, 101, *range(102, 106)) for cache in (near, far)), atol=1e-5, rtol=1e-5
    )
    read(plain, 80, *steps, 101, *range(102, 106))
    assert 0 < far.host_bytes < (0.4 if bits == "bits=4" else 0.8) * plain.host_bytes
    far.save(tmp_path / "far.kvs")
    far = CompressedCache.load(tmp_path / "far.kvs", model)
    for cache in (near, far):
        cache.reorder_cache(torch.tensor([1, 1], device=DEVICE))
    ids, mask = ids[[1, 1]], mask[[1, 1]]
    torch.testing.assert_close(*(read(cache, *range(106, 120)) for cache in (near, far)), atol=1e-5, rtol=1e-5)
    streams = [
        CompressedCache(model, f"{NEAR[name]}:{rest}", prefill="stream", chunk=40)
        for rest in (bits, f"{bits}:offload=host")
    ]
    torch.testing.assert_close(*(kvsketch.prefill(model, ids, cache, mask) for cache in streams), atol=1e-5, rtol=1e-5)
    assert streams[1].host_bytes > 0
