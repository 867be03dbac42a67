"""Models whose layers differ, inside stock vLLM (its CPU build): windows, sinks, soft caps, linear attention.

Their tokens are those of kvsketch on transformers, where layers of full attention alone are compressed too.
`make test-vllm` runs it.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import kvsketch
from kvsketch.integrations.vllm import settings
from tests.integrations.test_vllm import engine, prompts, require_same, served

NEW = 16
SNAPKV, REHEARSE = "snapkv:budget=24:window=8", "rehearse:budget=40:wait=64:recent=8:bits=16"
SHAPE: dict[str, Any] = dict(
    vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, initializer_range=0.3,
    tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
WINDOWS: dict[str, Any] = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", {
        **SHAPE, **WINDOWS, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0, "tie_word_embeddings": True,
    }),
    "gemma3": ("gemma3_text", {
        **SHAPE, "sliding_window": 32, "query_pre_attn_scalar": 32,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    }),
    # More of ours than of vLLM's: they share one block another way.
    "gemma3, few windows": ("gemma3_text", {
        **SHAPE, "sliding_window": 32, "query_pre_attn_scalar": 32,
        "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
    }),
    "gpt_oss": ("gpt_oss", {**SHAPE, **WINDOWS, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "mistral": ("mistral", {**SHAPE, "sliding_window": 32}),
    # vLLM's kernel for a CPU reads heads of 128 channels in bfloat16.
    "qwen3_next": ("qwen3_next", {
        **SHAPE, "layer_types": ["linear_attention", "linear_attention", "full_attention", "full_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "mlp_only_layers": [0, 1, 2],
    }),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Random models whose next tokens are far from ties, by name."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            kind, settings = MODELS[name]
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
            for part, weights in model.named_parameters():
                if part.endswith("sinks"):
                    weights.data += 3.0
                elif settings["tie_word_embeddings"] and "embed" in part:
                    weights.data *= 0.1  # or every token would be followed by itself
            made[name] = tmp_path_factory.mktemp("model")
            model.save_pretrained(made[name])
        return made[name]

    return folder


def wanted(
    folder: Path,
    method: str,
    texts: list[list[int]],
    new: int = NEW,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> list[tuple[list[int], torch.Tensor]]:
    """What kvsketch on transformers says after each text by itself, and the logits [new, vocabulary] behind it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    result = []
    for text in texts:
        ids = torch.tensor([text])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, output_logits=True,
            past_key_values=kvsketch.CompressedCache(model, method, **options), return_dict_in_generate=True,
        )  # fmt: skip
        result.append((out.sequences[0, len(text) :].tolist(), torch.cat(out.logits).float()))
    return result


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("gemma2", SNAPKV),
        ("gemma2", "h2o:budget=24"),
        ("gemma2", REHEARSE),
        ("gemma3", SNAPKV),
        ("gemma3", REHEARSE),
        ("gemma3, few windows", "pyramidkv:budget=24:window=8"),
        ("gemma3, few windows", REHEARSE),
        ("gpt_oss", "h2o:budget=24"),
        ("gpt_oss", REHEARSE),
    ],
)
def test_tokens_are_those_of_transformers(folders: Any, name: str, method: str) -> None:
    # Two requests run at a time, so that pages change hands.
    llm = engine(folders(name), method, max_num_seqs=2)
    texts = prompts(70, 300, 90, 100, 77)
    answers = wanted(folders(name), method, texts)
    assert len({tuple(tokens) for tokens, _ in answers}) == len(texts) and len({*answers[0][0]}) > 4
    require_same(served(llm, texts), answers, tie=0.002)
    # Prefix caching is on, as it is by default: what it finds in layers with a window must not be skipped in ours.
    require_same(served(llm, texts[:2]), answers[:2], tie=0.002)


def test_new_tokens_are_rehearsed_beside_windows(folders: Any) -> None:
    method, texts = REHEARSE, prompts(70, 130)
    llm, answers = engine(folders("gpt_oss"), method), wanted(folders("gpt_oss"), method, texts, 70)
    require_same(served(llm, texts, 70), answers, tie=0.002)
    later = wanted(folders("gpt_oss"), method.replace("wait=64", "wait=128"), texts[:1], 70)
    assert later[0][0] != answers[0][0], "nothing was rehearsed behind the prompt"


def test_chunked_prefill_is_a_streamed_prompt(folders: Any) -> None:
    llm = engine(folders("gpt_oss"), SNAPKV, max_num_batched_tokens=68, long_prefill_token_threshold=16)
    texts = prompts(70, 90, 43, 100, 64)
    require_same(served(llm, texts), wanted(folders("gpt_oss"), SNAPKV, texts, prefill="stream", chunk=16), tie=0.002)


def test_two_processes_share_the_heads(folders: Any) -> None:
    texts = prompts(70, 41, 100)
    llm = engine(folders("gpt_oss"), SNAPKV, tensor_parallel_size=2)
    require_same(served(llm, texts), wanted(folders("gpt_oss"), SNAPKV, texts), tie=0.002)


# Sums in bfloat16 are rounded otherwise in each library: vLLM's own cache differs from transformers' as much.
@pytest.mark.skipif(
    platform.machine() == "aarch64" and "bf16" not in Path("/proc/cpuinfo").read_text(),
    reason="vLLM's linear attention on an ARM processor uses bfloat16 instructions",
)
@pytest.mark.parametrize("method", [SNAPKV, REHEARSE])
def test_linear_attention_stays_vllms_own(folders: Any, method: str) -> None:
    llm = engine(folders("qwen3_next"), method, dtype="bfloat16", max_num_seqs=2, enable_prefix_caching=False)
    texts = prompts(70, 130, 90, 100)
    require_same(served(llm, texts), wanted(folders("qwen3_next"), method, texts, dtype=torch.bfloat16), tie=0.3)


def test_the_whole_model_is_counted(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    words = settings.one_request

    def one_request(*given: Any) -> str:
        told.append(words(*given))
        return told[-1]

    monkeypatch.setattr(settings, "one_request", one_request)
    engine(folders("gemma3"), "streamingllm:budget=100")
    # Five blocks of 128 tokens in each of the others: all 512 tokens may be new, and begin inside a block.
    assert "in 1 of 4 layers; a request of 512 tokens takes" in told[0]
    assert "1.0 MB in the other 3, whose attention and cache are vLLM's own" in told[0]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("mistral", {}, "every layer of this model has a sliding window of 32 tokens; drop --attention-backend CUSTOM"),
        ("gemma3", {"disable_hybrid_kv_cache_manager": True}, "leave out --disable-hybrid-kv-cache-manager"),
        ("qwen3_next", {"dtype": "bfloat16"}, "--no-enable-prefix-caching"),
    ],
)
def test_what_vllm_cannot_mix_ends_the_start(folders: Any, name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine(folders(name), SNAPKV, **options)
