"""A saved cache goes on exactly as the one in memory, and so does a copy."""

from __future__ import annotations

import copy
import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import kvsketch
from kvsketch import CompressedCache
from kvsketch.cache.saving import sealed_file
from tests.helpers import zoo
from tests.helpers.common import FED, padded, thinned, with_budget

# Small clusters and pages, so that a short text passes through everything several times.
SMALL = {"clusterkv": ":recluster=8:recluster_into=2:tokens_per_cluster=4", "quest": ":page=2"}
METHODS = [with_budget(name, 16) + SMALL.get(name, "") for name in FED]
RECALL = [m for m in METHODS if kvsketch.METHODS[m.split(":")[0]].family == "recall"]
VARIANTS = [
    *METHODS,
    *(f"{method}:offload=host" for method in RECALL),
    "snapkv:budget=25%:sinks=2:window=4",
    "subgen:budget=16:sinks=2:recent=4:normalizer=clipped:policy=grow",
    "subgen:budget=16:sinks=2:recent=4:sampling=mixed",
    "balancekv:budget=50%:sinks=2:recent=4",
]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def step(model: Any, ids: torch.Tensor, cache: Any, mask: torch.Tensor) -> torch.Tensor:
    """One forward; the mask covers everything the cache has seen."""
    positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    with torch.no_grad():
        return model(ids, past_key_values=cache, attention_mask=mask, position_ids=positions).logits


def read(model: Any, method: str, steps: int, pads: list[int]) -> tuple[CompressedCache, torch.Tensor]:
    """A cache after a prompt of 40 tokens and `steps` more, and the mask of what it has read."""
    ids, mask = padded(zoo.tokens(len(pads), 40 + steps), pads)
    cache = CompressedCache(model, method, seed=3)
    step(model, ids[:, :40], cache, mask[:, :40])
    for i in range(40, 40 + steps):
        step(model, ids[:, i : i + 1], cache, mask[:, : i + 1])
    return cache, mask


def continued(model: Any, cache: Any, mask: torch.Tensor) -> list[torch.Tensor]:
    """Logits of single tokens, then of several at once, then of single ones again."""
    rows, logits = mask.shape[0], []
    for number, new in enumerate([1] * 5 + [5] + [1] * 2):
        mask = torch.cat([mask, mask.new_ones(rows, new)], 1)
        logits.append(step(model, zoo.tokens(rows, new, seed=number).to(mask.device), cache, mask))
    return logits


def assert_goes_on_alike(model: Any, first: CompressedCache, *others: CompressedCache, mask: torch.Tensor) -> None:
    for name in ("tokens_seen", "tokens_stored", "hit_rate"):
        assert all(getattr(first, name) == getattr(other, name) for other in others)
    expected = continued(model, first, mask)
    for other in others:
        assert first is not other
        assert all(torch.equal(a, b) for a, b in zip(expected, continued(model, other, mask), strict=True))
        assert first.tokens_stored == other.tokens_stored
        assert first.device_bytes == other.device_bytes


@pytest.mark.parametrize("method", thinned(VARIANTS))
@pytest.mark.parametrize(("steps", "pads"), [(0, [0]), (11, [0, 7])], ids=["prompt", "padded rows, some steps"])
def test_loaded_and_copied_caches_go_on_as_the_saved_one(
    method: str, steps: int, pads: list[int], tmp_path: Path
) -> None:
    model = zoo.build("llama")
    cache, mask = read(model, method, steps, pads)
    cache.save(tmp_path / "prompt.kvs")
    loaded = CompressedCache.load(tmp_path / "prompt.kvs", model)
    assert os.listdir(tmp_path) == ["prompt.kvs"]
    assert loaded.method == cache.method
    assert_goes_on_alike(model, cache, loaded, *([copy.deepcopy(cache)] if steps else []), mask=mask)


def held_tensors(cache: CompressedCache) -> list[torch.Tensor]:
    """All that bounded tables hold, room that nobody has written as zeros."""
    return [t.nan_to_num() for layer in cache.slot_layers for t in layer.table.tensors()]


@pytest.mark.touchy
@pytest.mark.parametrize("method", ["rehearse", "snapkv:share=model", "h2o:share=layer"])
@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
def test_heads_of_different_sizes_are_cut_up_as_they_were(method: str, bits: int, device: str, tmp_path: Path) -> None:
    """The work list of a kernel too: other pieces would take other bytes, and round otherwise."""
    model = zoo.build("llama").to(device)
    cache = CompressedCache(model, f"{method}:budget=50%:bits={bits}")
    mask = torch.ones(1, 300, dtype=torch.long, device=device)
    step(model, zoo.tokens(1, 300).to(device), cache, mask)
    assert all(layer.table.layout is not None for layer in cache.slot_layers)
    cache.save(tmp_path / "prompt.kvs")
    loaded = CompressedCache.load(tmp_path / "prompt.kvs", model)
    assert loaded.device_bytes == cache.device_bytes
    assert all(torch.equal(*pair) for pair in zip(held_tensors(cache), held_tensors(loaded), strict=True))
    assert_goes_on_alike(model, cache, loaded, mask=mask)


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "gptj"])
def test_layers_of_transformers_own_are_saved_too(family: str, tmp_path: Path) -> None:
    """Sliding windows of 8 tokens, which had to let tokens go."""
    model = zoo.build(family)
    cache, mask = read(model, "snapkv:budget=16:sinks=2:window=4", 5, [0])
    cache.save(tmp_path / "prompt.kvs")
    assert_goes_on_alike(model, cache, CompressedCache.load(tmp_path / "prompt.kvs", model), mask=mask)


def test_linear_attention_layers_are_saved_too(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "qwen3_next", vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    cache, mask = read(model, "streamingllm:budget=16:sinks=2", 3, [0])
    assert len(cache.slot_layers) < len(cache.layers)
    cache.save(tmp_path / "prompt.kvs")
    assert_goes_on_alike(model, cache, CompressedCache.load(tmp_path / "prompt.kvs", model), mask=mask)


def test_an_empty_cache_and_one_with_a_draft_that_may_be_taken_back(tmp_path: Path) -> None:
    model = zoo.build("llama")
    CompressedCache(model, "h2o:budget=16:recent=4").save(tmp_path / "empty.kvs")
    assert CompressedCache.load(tmp_path / "empty.kvs", model).tokens_seen == 0
    cache, mask = read(model, f"{RECALL[0]}:offload=host", 3, [0, 9])
    cache.activate_past_recording()
    mask = torch.cat([mask, torch.ones(2, 3, dtype=mask.dtype)], 1)
    step(model, zoo.tokens(2, 3), cache, mask)
    assert all(layer.table.exact and layer.table.host is not None for layer in cache.slot_layers)
    cache.save(tmp_path / "draft.kvs")
    loaded = CompressedCache.load(tmp_path / "draft.kvs", model)
    for draft in (cache, loaded):
        draft.crop(-2)
    assert_goes_on_alike(model, cache, loaded, mask=mask[:, :-2])


def test_how_a_prompt_is_read_is_kept_and_half_a_prompt_is_not_saved(tmp_path: Path) -> None:
    model, path = zoo.build("llama"), tmp_path / "prompt.kvs"
    cache = CompressedCache(model, "subgen:budget=16:sinks=2:recent=4", prefill="stream", chunk=8, seed=5)
    with pytest.raises(ValueError, match="in the middle of a prompt"):
        kvsketch.prefill(model, zoo.tokens(1, 30), cache, after_chunk=lambda tokens: cache.save(path))
    cache.reset()
    kvsketch.prefill(model, zoo.tokens(1, 30), cache)
    cache.save(path)
    loaded = CompressedCache.load(path, model)
    assert (loaded.prefill, loaded.chunk, loaded.slot_layers[0].forward.chunk) == ("stream", 8, 8)
    assert_goes_on_alike(model, cache, loaded, mask=torch.ones(1, 30, dtype=torch.long))


def test_generation_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    """The everyday use: a prompt is read once, saved, and continued by `generate` any number of times."""
    model, prompt = zoo.build("llama"), zoo.tokens(1, 40)
    method = "snapkv:budget=16:sinks=2:window=4"
    whole = model.generate(prompt, past_key_values=CompressedCache(model, method), max_new_tokens=12, do_sample=False)
    cache = CompressedCache(model, method)
    with torch.no_grad():
        model(prompt[:, :-1], past_key_values=cache)
    cache.save(tmp_path / "prompt.kvs")
    answers = [
        model.generate(prompt, past_key_values=c, max_new_tokens=12, do_sample=False).tolist()
        for c in (cache, *(CompressedCache.load(tmp_path / "prompt.kvs", model) for _ in range(2)))
    ]
    assert answers[0] == answers[1] == answers[2]
    assert whole.shape == (1, 52)


def test_a_file_is_safetensors_and_holds_no_more_than_the_cache(tmp_path: Path) -> None:
    model = zoo.build("llama")
    cache, _ = read(model, "streamingllm:budget=16:sinks=2", 3, [0])
    cache.save(tmp_path / "prompt.kvs")
    tensors = load_file(tmp_path / "prompt.kvs")
    assert sum(t.numel() * t.element_size() for t in tensors.values()) == cache.device_bytes
    (tmp_path / "other").touch()
    assert (tmp_path / "prompt.kvs").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_cache_whose_forward_broke_off_is_not_saved(tmp_path: Path) -> None:
    model = zoo.build("llama")
    cache, _ = read(model, "full", 0, [0])
    cache.slot_layers[0].table.seen += 1
    with pytest.raises(ValueError, match=r"interrupted.*reset"):
        cache.save(tmp_path / "prompt.kvs")
    assert not list(tmp_path.iterdir())


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = zoo.build("llama"), tmp_path / "prompt.kvs"
    cache, _ = read(model, "full", 0, [0])
    cache.save(path)
    before = path.read_bytes()
    left_by_a_process_that_is_gone = tmp_path / f"{sealed_file._prefix(path)}999999999-1.tmp"
    left_by_a_process_that_is_gone.mkdir()

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sealed_file, "_seal", fail)
        with pytest.raises(OSError, match="No space left"):
            cache.save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["prompt.kvs"]
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        cache.save(tmp_path / "none" / "prompt.kvs")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        cache.save(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="needs a limit on the size of files")
def test_a_full_disk_names_the_file_and_the_way_out(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: safetensors reports either as an error of its own."""
    import resource

    model, path = zoo.build("llama"), tmp_path / "prompt.kvs"
    cache, _ = read(model, "full", 0, [0])
    path.write_text("before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
    try:
        with pytest.raises(OSError, match=r"prompt\.kvs is as it was before\. Free some space") as failure:
            cache.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert failure.value.errno == errno.EFBIG
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["prompt.kvs"]


@pytest.mark.skipif(os.name != "posix", reason="needs links")
@pytest.mark.parametrize("there", [True, False])
def test_a_save_through_a_link_writes_what_it_leads_to(tmp_path: Path, there: bool) -> None:
    model = zoo.build("llama")
    cache, _ = read(model, "full", 0, [0])
    (tmp_path / "disk").mkdir()
    target, link = tmp_path / "disk" / "real.kvs", tmp_path / "link.kvs"
    target.touch() if there else None
    link.symlink_to(Path("disk") / "real.kvs")
    cache.save(link)
    assert link.is_symlink() and not target.is_symlink()
    assert CompressedCache.load(target, model).tokens_seen == CompressedCache.load(link, model).tokens_seen == 40
    assert sorted(os.listdir(tmp_path)) == ["disk", "link.kvs"] and os.listdir(tmp_path / "disk") == ["real.kvs"]
    dangling = tmp_path / "dangling.kvs"
    dangling.symlink_to(tmp_path / "none" / "prompt.kvs")
    with pytest.raises(FileNotFoundError, match=f"there is no folder {tmp_path / 'none'}"):
        cache.save(dangling)


class Adapted(nn.Module):
    """A linear layer as peft's LoRA wraps it, as far as a cache looks at it."""

    def __init__(self, base_layer: nn.Linear, seed: int) -> None:
        super().__init__()
        self.base_layer, self.disable_adapters, self.active_adapters = base_layer, False, ["tuned"]
        self.lora_A = nn.ModuleDict({"tuned": nn.Linear(base_layer.in_features, base_layer.out_features, bias=False)})
        torch.manual_seed(seed)
        nn.init.normal_(self.lora_A["tuned"].weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base_layer(x)
        return out if self.disable_adapters else out + self.lora_A["tuned"](x)


def with_adapter(seed: int) -> tuple[Any, Adapted]:
    model: Any = zoo.build("llama")
    model.model.layers[0].self_attn.k_proj = adapted = Adapted(model.model.layers[0].self_attn.k_proj, seed)
    return model, adapted


def test_a_cache_belongs_to_the_adapters_that_were_on(tmp_path: Path) -> None:
    model, adapted = with_adapter(seed=1)
    plain = zoo.build("llama")
    for name, each in (("tuned", model), ("plain", plain)):
        read(each, "full", 0, [0])[0].save(tmp_path / name)
    CompressedCache.load(tmp_path / "tuned", model)
    with pytest.raises(ValueError, match="no adapter was on when it was saved, and adapter tuned is on here"):
        CompressedCache.load(tmp_path / "plain", model)
    with pytest.raises(ValueError, match="adapter tuned has other weights"):
        CompressedCache.load(tmp_path / "tuned", with_adapter(seed=2)[0])
    adapted.disable_adapters = True
    CompressedCache.load(tmp_path / "plain", model)
    for each in (plain, model):
        with pytest.raises(ValueError, match="adapter tuned was on when it was saved, and no adapter is on here"):
            CompressedCache.load(tmp_path / "tuned", each)
