"""Small random models of the families kvsketch serves, built from configs; nothing is downloaded."""

from __future__ import annotations

import pickle
from typing import Any, cast

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

VOCABULARY = 97
_LLAMA = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_GPT = dict(
    vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=512, n_inner=48, rotary_dim=4,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip

_LATENT = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, q_lora_rank=8, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=4, v_head_dim=12,
    n_routed_experts=2, moe_intermediate_size=16, first_k_dense_replace=1, max_position_embeddings=512,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip

# family -> (model type, changes to the base config)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LLAMA),
    "qwen2": ("qwen2", _LLAMA),
    "qwen3": ("qwen3", _LLAMA),
    "mistral": ("mistral", {**_LLAMA, "sliding_window": None}),
    "phi3": ("phi3", _LLAMA),
    "gemma2": ("gemma2", {**_LLAMA, "sliding_window": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}),
    "gemma3": ("gemma3_text", {**_LLAMA, "num_hidden_layers": 3, "sliding_window": 8, "query_pre_attn_scalar": 8,
                               "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "glm4": ("glm4", _LLAMA),
    "gpt_neox": ("gpt_neox", {**_LLAMA, "rotary_pct": 0.5}),
    "opt": ("opt", {**_LLAMA, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "gptj": ("gptj", _GPT),
    "codegen": ("codegen", _GPT),
    "mpt": ("mpt", dict(vocab_size=VOCABULARY, d_model=32, n_heads=4, n_layers=2, max_seq_len=512, use_cache=True,
                        pad_token_id=0, bos_token_id=1, eos_token_id=2)),
    "gpt2": ("gpt2", _GPT),
    "gpt_oss": ("gpt_oss", {**_LLAMA, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 8}),
    "granite": ("granite", _LLAMA),
    "olmo2": ("olmo2", _LLAMA),
    "olmo3": ("olmo3", {**_LLAMA, "num_hidden_layers": 4, "sliding_window": 8}),
    "nanochat": ("nanochat", _LLAMA),
    "starcoder2": ("starcoder2", {**_LLAMA, "sliding_window": None}),
    "stablelm": ("stablelm", _LLAMA),
    "cohere": ("cohere", _LLAMA),
    "deepseek_v2": ("deepseek_v2", {**_LATENT, "q_lora_rank": None, "num_experts_per_tok": 1}),
    "deepseek_v3": ("deepseek_v3", {**_LATENT, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1}),
    "qwen3_moe": ("qwen3_moe", {**_LLAMA, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}),
}  # fmt: skip

# families whose attention does not hand the cached keys to AttentionInterface, and that have no adapter
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", dict(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)),
    "falcon": ("falcon", dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)),
}  # fmt: skip


_BUILT: dict[str, tuple[bytes, torch.Tensor]] = {}


def build(family: str, **changes: Any) -> PreTrainedModel:
    """A small random model of `family`, in fp32, the same at every call; the caller may change it."""
    name = f"{family} {sorted(changes.items())}"
    if name not in _BUILT:
        model = _new(family, **changes)
        # What a test draws afterwards is the same at every call, too.
        _BUILT[name] = pickle.dumps(model), torch.get_rng_state() if changes else torch.manual_seed(0).get_state()
    pickled, state = _BUILT[name]
    torch.set_rng_state(state)
    return cast(PreTrainedModel, pickle.loads(pickled))  # a third of the time of a new one


def _new(family: str, **changes: Any) -> PreTrainedModel:
    model_type, settings = {**FAMILIES, **REFUSED}[family]
    config = AutoConfig.for_model(model_type, **{**settings, **changes})
    torch.manual_seed(0)
    attention = {} if "attn_implementation" not in changes else {"attn_implementation": changes["attn_implementation"]}
    model = AutoModelForCausalLM.from_config(config, **attention).eval()
    for parameter in model.parameters():
        # Tiny random models are nearly linear; larger weights make attention matter.
        parameter.data.mul_(3.0) if parameter.dim() > 1 else None
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def qwen3_vl() -> Any:
    """A multimodal model, with a small tower for images."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    vision = dict(
        depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32, num_position_embeddings=16,
        deepstack_visual_indexes=[0],
    )  # fmt: skip
    text = {**FAMILIES["qwen3"][1], "rope_parameters": rope}
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision)).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids without the special ones."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))
