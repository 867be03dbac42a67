"""What the vLLM plugin refuses, without vLLM: one line that names the value, the choices, the next step."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from kvsketch.cache.memory import in_tokens
from kvsketch.cache.replay import fitting
from kvsketch.cache.saving.model_identity import ModelIdentity
from kvsketch.integrations.vllm import register
from kvsketch.integrations.vllm.settings import (
    SERVED,
    Share,
    block_codecs,
    bound_captures,
    chosen_full,
    chosen_method,
    host_places,
    keeps_all,
    most_whole,
    one_request,
    rank_of,
    refuse_bits,
    refuse_block_size,
    refuse_config,
    refuse_drafts,
    refuse_host,
    refuse_layer,
    refuse_maps,
    refuse_pages,
    refuse_share,
    refuse_windows,
)
from kvsketch.methods import Rehearse, parse_method
from kvsketch.methods.replay_map import ReplayMap


@pytest.mark.parametrize("bits", ["", ":bits=4", ":key_bits=8:value_bits=3"])
def test_every_served_method_is_found(bits: str) -> None:
    assert [chosen_method({"kvsketch": f"{name}:budget=256{bits}"}).name for name in SERVED] == list(SERVED)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ["CUSTOM", "--additional-config", "h2o:budget=1024"]),
        ({"kvsketch": "h3o:budget=24"}, ["h3o", "did you mean 'h2o'"]),
        ({"kvsketch": "subgen:budget=64"}, ["subgen cannot be served", "snapkv", "rehearse"]),
        ({"kvsketch": "snapkv:budget=50%"}, ["budget=50%", "budget=1024", "rehearse"]),
        ({"kvsketch": "snapkv:bytes=1/8"}, ["bytes=1/8", "budget=1024", "rehearse"]),
        ({"kvsketch": "rehearse:budget=64:wait=32"}, ["wait=32 leaves no room", "use wait=64 or more"]),
        ({"kvsketch": "rehearse:budget=64:replay=exact"}, ["replay=exact", "use replay=virtual"]),
        ({"kvsketch": "rehearse:budget=64:replay=learned"}, ["map=FILE", "kvsketch fit", "use replay=virtual"]),
        ({"kvsketch": "quest"}, ["quest cannot be served", "snapkv", "full:bits=4"]),
        ({"kvsketch": "keyformer"}, ["budget=60%", "budget=1024"]),
        ({"kvsketch": "h2o:budget=64:bits=5"}, ["bits=5", "2, 3, 4, 8, or 16"]),
        ({"kvsketch": "h2o:budget=64:share=layer"}, ["share=layer", "use share=head"]),
        ({"kvsketch": "kcenter:budget=64:slide=false"}, ["slide=false", "use slide=true"]),
        ({"kvsketch": "streamingllm:positions=cache"}, ["positions=cache", "use positions=text"]),
    ],
)
def test_a_method_that_cannot_be_served_is_refused_in_one_line(given: Any, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as error:
        chosen_method(given)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("text", ["rehearse", "rehearse:budget=1/4:bits=16"])
def test_a_share_of_a_prompt_is_served_where_its_length_is_told(text: str) -> None:
    method = chosen_method({"kvsketch": text})
    refuse_share(method, connected=True)
    refuse_share(chosen_method({"kvsketch": "rehearse:budget=64"}), connected=False)
    with pytest.raises(
        ValueError, match=r"\A[^\n]*--kv-transfer-config '{\"kv_connector\": \"KVSketchDocuments\"[^\n]*\Z"
    ):
        refuse_share(method, connected=False)


def test_a_share_of_bytes_is_that_of_a_cache_on_transformers() -> None:
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=256)
    method = chosen_method({"kvsketch": "rehearse:bytes=1/8"}, config)
    assert method == in_tokens("rehearse:bytes=1/8", config) and method.budget_size.share is not None


def test_learned_maps_are_those_of_the_file_that_is_named(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    config, path = LlamaConfig(**shape), tmp_path / "maps.safetensors"
    maps = ReplayMap({0: torch.zeros(4, 34, 16)}, {0: torch.zeros(2, 8, 1)})
    fitting.save(path, fitting.Learned(maps, None), ModelIdentity(config, config).describe())
    given = {"kvsketch": f"rehearse:budget=64:replay=learned:map={path}"}
    method = chosen_method(given, config)
    assert isinstance(method, Rehearse) and method.learned == maps
    refuse_maps(method, SimpleNamespace(tensor_parallel_size=1))
    with pytest.raises(ValueError, match=r"\A[^\n]*tensor_parallel_size=2: [^\n]*use tensor_parallel_size=1"):
        refuse_maps(method, SimpleNamespace(tensor_parallel_size=2))
    with pytest.raises(ValueError, match=r"belongs to another model: num_attention_heads is 4 in the file and 8 here"):
        chosen_method(given, LlamaConfig(**(shape | {"num_attention_heads": 8})))


@pytest.mark.parametrize(("free", "tokens"), [(None, 2000), (10**9, 2000), (10**6, 125)])
def test_prompts_that_are_held_whole_take_an_eighth_of_the_memory(free: int | None, tokens: int) -> None:
    assert most_whole(1000, 1000, free) == tokens


@pytest.mark.parametrize(
    "text", ["full:bits=4", "full:bits=8", "full:bits=3", "full:bits=2", "full:key_bits=8:value_bits=4"]
)
def test_all_tokens_are_served_quantised(text: str) -> None:
    given = {"kvsketch": text}
    assert keeps_all(given) and not keeps_all({"kvsketch": "h2o:budget=64"})
    key, value = block_codecs(chosen_full(given), 1, 128, 64)
    assert (key.bits, value.bits) == chosen_full(given).stored_bits.pair and (key.size, value.size) == (128, 64)


@pytest.mark.parametrize(
    ("text", "bits"), [("full:bits=4", 8), ("full:bits=8", 8), ("full:key_bits=4:value_bits=4", 4)]
)
def test_keys_of_the_first_layer_have_8_bits_unless_told_otherwise(text: str, bits: int) -> None:
    assert block_codecs(chosen_full({"kvsketch": text}), 0, 64, 64)[0].bits == bits


@pytest.mark.parametrize("text", ["full", "full:key_bits=4"])
def test_all_tokens_in_16_bits_are_left_to_vllm(text: str) -> None:
    words = rf"\A{text} cannot be served.*keys or values in 16 bits.*use bits=4.*drop --attention"
    with pytest.raises(ValueError, match=words):
        chosen_full({"kvsketch": text})


def test_heads_and_blocks_that_no_kernel_serves_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\Afull:bits=4 cannot serve heads of size 96 in vLLM, only 16, 32, 64, 128"):
        block_codecs(chosen_full({"kvsketch": "full:bits=4"}), 1, 96, 96)
    refuse_block_size(SimpleNamespace(user_specified_block_size=True, block_size=128), 64)
    refuse_block_size(SimpleNamespace(user_specified_block_size=False, block_size=16), 64)
    with pytest.raises(ValueError, match=r"--block-size 32; leave it out, or use a multiple of 64"):
        refuse_block_size(SimpleNamespace(user_specified_block_size=True, block_size=32), 64)


def test_an_engine_that_asks_for_more_is_refused() -> None:
    def config(**given: Any) -> SimpleNamespace:
        model = SimpleNamespace(
            use_mla=given.pop("use_mla", False), is_hybrid=given.pop("is_hybrid", False),
            hf_text_config=SimpleNamespace(attention_chunk_size=given.pop("chunk", None)),
        )  # fmt: skip
        parallel = SimpleNamespace(decode_context_parallel_size=given.pop("dcp", 1))
        cache = SimpleNamespace(enable_prefix_caching=given.pop("prefixes", True))
        plain = {"kv_transfer_config": None, "cache_config": cache}
        return SimpleNamespace(model_config=model, parallel_config=parallel, **(plain | given))

    refuse_config(config())
    refuse_config(config(is_hybrid=True, prefixes=False))
    transfer = SimpleNamespace(kv_connector="NixlConnector")
    wrong = {"kv_transfer_config": transfer, "dcp": 2, "use_mla": True, "is_hybrid": True, "chunk": 8192}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match="kvsketch cannot serve"):
            refuse_config(config(**{name: value}))


@pytest.mark.parametrize(
    ("method", "drafts", "words"),
    [
        ("h2o:budget=64", {}, "h2o changes its page with every token.*use rehearse"),
        ("full:bits=4", {}, "its steps read one token"),
        ("rehearse:budget=64", {"method": "eagle"}, r"a draft model \(eagle\).*use the method ngram"),
        ("rehearse:budget=64", {"is_async": True}, "add --no-async-scheduling"),
        ("rehearse:budget=64", {"connected": False}, "runs in one process"),
        ("rehearse:budget=64:wait=64", {"count": 9}, "room for 8 draft tokens"),
    ],
)
def test_drafts_that_cannot_be_taken_back_are_refused(method: str, drafts: dict[str, Any], words: str) -> None:
    given = {"method": "ngram", "count": 3, "is_async": False, "connected": True}
    for own, wrong in ((given, False), (given | drafts, True)):
        config = SimpleNamespace(
            speculative_config=SimpleNamespace(method=own["method"], num_speculative_tokens=own["count"]),
            scheduler_config=SimpleNamespace(async_scheduling=own["is_async"]),
        )
        if not wrong:
            refuse_drafts(config, parse_method("rehearse:budget=64"), connected=True)
            continue
        with pytest.raises(ValueError, match=words):
            refuse_drafts(config, parse_method(method), connected=bool(own["connected"]))
    refuse_drafts(SimpleNamespace(speculative_config=None), parse_method("h2o:budget=64"), connected=False)


@pytest.mark.parametrize(
    ("method", "given", "words"),
    [
        ("full:bits=4", {}, "full:bits=4 keeps its tokens in vLLM's blocks, and rehearse has pages"),
        ("h2o:budget=64", {}, "pages of h2o are not used again; use rehearse"),
        ("rehearse:budget=64", {"caching": False}, "drop --no-enable-prefix-caching"),
        ("rehearse:budget=64", {"pipeline": 2}, "use --tensor-parallel-size"),
        ("rehearse:budget=64", {"connected": False}, "--kv-transfer-config"),
    ],
)
def test_memory_of_the_host_that_nobody_would_use_is_refused(method: str, given: dict[str, Any], words: str) -> None:
    own = {"caching": True, "pipeline": 1, "connected": True} | given

    def config(gb: Any) -> SimpleNamespace:
        return SimpleNamespace(
            additional_config={"kvsketch": method, "kvsketch_host_gb": gb},
            cache_config=SimpleNamespace(enable_prefix_caching=own["caching"]),
            parallel_config=SimpleNamespace(pipeline_parallel_size=own["pipeline"]),
        )

    refuse_host(config(0), parse_method(method), bool(own["connected"]))
    with pytest.raises(ValueError, match=rf"\Akvsketch_host_gb: [^\n]*{words}[^\n]*\Z"):
        refuse_host(config(1), parse_method(method), bool(own["connected"]))


def test_memory_of_the_host_is_counted_in_pages() -> None:
    assert host_places({}, 10**6) == host_places({"kvsketch_host_gb": 0}, 10**6) == 0
    assert host_places({"kvsketch_host_gb": 0.0125}, 10**6) == 12
    for given, words in [("much", "'much' is no number of GB"), (-1, "-1 is no"), (True, "True is no"), (1e-4, "use")]:
        with pytest.raises(ValueError, match=rf"\Akvsketch_host_gb=[^\n]*{words}[^\n]*\Z"):
            host_places({"kvsketch_host_gb": given}, 10**6)
    with pytest.raises(ValueError, match=r"\A[^\n]*knows no 'kvsketch_hostgb'[^\n]*kvsketch_host_gb\Z"):
        chosen_method({"kvsketch": "rehearse:budget=64", "kvsketch_hostgb": 1})


def test_a_layer_with_more_than_causal_attention_is_refused() -> None:
    refuse_layer(alibi_slopes=None, kv_sharing_target_layer_name=None)
    with pytest.raises(ValueError, match=r"alibi_slopes=set in vLLM; use another attention backend"):
        refuse_layer(alibi_slopes=[0.5, 0.25])
    with pytest.raises(ValueError, match=r"kv_sharing_target_layer_name=model\.layers\.3"):
        refuse_layer(kv_sharing_target_layer_name="model.layers.3")
    with pytest.raises(ValueError, match="kv_cache_dtype=fp8 in vLLM; leave out --kv-cache-dtype"):
        refuse_layer(kv_cache_dtype="fp8")


def test_heads_that_cannot_be_coded_are_refused() -> None:
    refuse_bits(chosen_method({"kvsketch": "h2o:budget=64"}), 20)
    refuse_bits(chosen_method({"kvsketch": "h2o:budget=64:bits=4"}), 24)
    with pytest.raises(ValueError, match=r"bits=4 cannot code heads of size 20, only multiples of 8; use bits=16"):
        refuse_bits(chosen_method({"kvsketch": "h2o:budget=64:key_bits=4"}), 20)


def test_windows_that_cannot_stay_vllms_own_are_refused() -> None:
    def config(window: int | None, unified: bool, stages: int = 1) -> SimpleNamespace:
        return SimpleNamespace(
            cache_config=SimpleNamespace(sliding_window=window),
            scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=unified),
            parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        )

    refuse_windows(config(None, False))
    with pytest.raises(ValueError, match=r"nothing to compress.*window of 4096 tokens; drop --attention-backend"):
        refuse_windows(config(4096, False))
    with pytest.raises(ValueError, match="leave out --disable-hybrid-kv-cache-manager"):
        refuse_windows(config(None, True))
    with pytest.raises(ValueError, match=r"pipeline parallel.*use --tensor-parallel-size"):
        refuse_windows(config(None, False, stages=2))


def test_pages_of_all_requests_must_fit() -> None:
    refuse_pages("snapkv:budget=64", 10**6, 10**6, None)
    refuse_pages("snapkv:budget=64", 75, 10**9, 100 * 10**9)
    with pytest.raises(ValueError, match=r"max_num_seqs=76 pages of 1000.0 MB do not fit.*100.0 GB.*--max-num-seqs 75"):
        refuse_pages("snapkv:budget=64", 76, 10**9, 100 * 10**9)


def test_a_request_is_told_with_all_layers_of_the_model() -> None:
    alone = one_request("h2o:budget=64", 4096, Share(4, 2_500_000), Share(0, 0))
    assert (
        alone
        == "kvsketch: h2o:budget=64 in 4 of 4 layers; a request of 4,096 tokens takes 2.5 MB, and so does a shorter one"
    )
    mixed = one_request("h2o:budget=64", 4096, Share(4, 2_500_000), Share(20, 7_000_000))
    assert "in 4 of 24 layers; a request of 4,096 tokens takes 9.5 MB at most: 2.5 MB in these layers, 7.0 MB" in mixed


def test_layers_of_full_attention_are_counted_among_themselves() -> None:
    kinds = ["sliding_attention", "full_attention"] * 3
    assert [rank_of(i, 6, kinds) for i in (1, 3, 5)] == [(0, 3), (1, 3), (2, 3)]
    assert rank_of(5, 6, None) == (5, 6)


def test_an_older_vllm_starts_without_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.26.0"))
    with pytest.warns(UserWarning, match=r"kvsketch serves vLLM 0\.29 or newer, and this is 0\.26\.0"):
        register()


def test_another_plugin_in_vllms_slot_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {"path": "other.plugin.Backend"}

    class Slot:
        is_overridden = staticmethod(lambda: True)
        get_path = staticmethod(lambda: taken["path"])

    modules = {
        "vllm": {"__version__": "0.32.0"},
        "vllm.distributed.kv_transfer.kv_connector.factory": {
            "KVConnectorFactory": SimpleNamespace(_registry={}, register_connector=lambda *given: None)
        },
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: False)},
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": SimpleNamespace(CUSTOM=Slot),
            "register_backend": lambda slot, path: taken.update(path=path),
        },
    }
    for name, members in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**members))  # type: ignore[arg-type]
    with pytest.warns(
        UserWarning, match=r"CUSTOM, which was other\.plugin\.Backend and is kvsketch's now.*VLLM_PLUGINS"
    ):
        register()
    assert taken["path"] == "kvsketch.integrations.vllm.chosen.ChosenBackend"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register()  # vLLM may load plugins again


@pytest.mark.parametrize(
    ("free", "sizes"), [(100, [1, 2, 4, 8]), (60, [1, 2, 4]), (3, [1]), (None, [1, 2, 4, 8]), (10**6, [1, 2, 4, 8])]
)
def test_steps_are_captured_for_no_more_requests_than_memory_holds(free: int | None, sizes: list[int]) -> None:
    compilation = SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4, 8], max_cudagraph_capture_size=8)
    bound_captures(compilation, 9, free)
    assert compilation.cudagraph_capture_sizes == sizes
    assert compilation.max_cudagraph_capture_size == sizes[-1]


def test_the_plugin_imports_what_attention_needs_alone() -> None:
    """A model library that is broken, or slow to import, must not end the start of vLLM."""
    modules = "joint_layers, settings, paged, page_map, blocks"
    told = subprocess.run(
        [sys.executable, "-c", f"from kvsketch.integrations.vllm import {modules}; import sys; print(*sys.modules)"],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    rooms = {name.split(".")[1] for name in told if name.startswith("kvsketch.")}
    assert rooms == {
        "cache", "compiler", "integrations", "layer_bytes", "lru", "methods", "ops", "plural", "slots"
    }  # fmt: skip
    files = [name.split(".")[2] for name in told if name.startswith("kvsketch.cache.")]
    assert files == ["document", "rotary"]
    assert not {"transformers", "gguf", "safetensors", "accelerate", "typer", "rich"} & {*told}
