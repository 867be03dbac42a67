"""Which model families kvsketch serves: builds each one tiny and compares its tokens; writes docs/models.md.

    python -m scripts.families               all causal language models of transformers, some minutes; writes the page
    python -m scripts.families llama doge    some of them; prints what came out

A family is served when `full` and a bounded method with room for every token give the model's own tokens, and a small
budget is kept. The models are random, of a few layers, made from their config alone; nothing is downloaded.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from kvsketch import CompressedCache
from kvsketch.cache.families import ADAPTED
from kvsketch.cache.latent import LatentLayer
from kvsketch.cache.layer import SlotLayer
from tests.helpers import zoo

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
MARKS = ("<!-- python -m scripts.families -->\n", "<!-- end -->\n")
MOST_PARAMETERS = 10_000_000
PROMPT, NEW, BUDGET = 40, 12, 16
METHODS = ("full", "streamingllm:budget=64", f"streamingllm:budget={BUDGET}:sinks=2")

# What makes a model small, by whatever name its config has for it.
SMALL: dict[str, Any] = dict(
    vocab_size=zoo.VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=True,
    hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    max_position_embeddings=512, n_embd=32, n_layer=2, n_head=4, n_positions=512, n_inner=48, rotary_dim=4,
    d_model=32, n_heads=4, n_layers=2, max_seq_len=512, d_ff=48, ffn_dim=48, word_embed_proj_dim=32, embedding_size=32,
    num_layers=2, num_heads=4, attention_heads=4, attention_types=[[["global"], 1]], query_pre_attn_scalar=8,
    window_size=8, sliding_window=8, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8,
    swa_v_head_dim=8, num_experts=2,
    num_local_experts=2, n_routed_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
    shared_expert_intermediate_size=16, top_k_experts=1, n_shared_experts=1, n_group=1, topk_group=1, moe_topk=1,
    first_k_dense_replace=1, expert_ffn_hidden_size=16, ffn_hidden_size=48, zero_expert_num=1, moe_layer_start_index=1,
    kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, num_kv_shared_layers=0,
    index_n_heads=2, index_head_dim=8, index_topk=16, hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=zoo.VOCABULARY,
    mamba_d_state=8, mamba_n_heads=4, mamba_d_head=16, mamba_expand=2, mamba_n_groups=1, mamba_chunk_size=8,
    mamba_d_ssm=64, mamba_num_heads=4, mamba_head_dim=16, state_size=8, n_groups=1, chunk_size=8, time_step_rank=4,
    attn_layer_period=2, attn_layer_offset=1, attn_layer_indices=[1], num_memory_blocks=1, attention_hidden_size=32,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    dropout=0.0, attention_dropout=0.0, hidden_dropout=0.0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
# Tried one after the other until a model has a layer of full attention and runs by itself.
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"sliding_window": None},
    {"num_key_value_heads": 4, "head_dim": 4},
    {"layer_types": [SLIDING, FULL, SLIDING, FULL]},
    {"layer_types": ["linear_attention", FULL] * 2},
    {"layer_types": ["mamba", "attention"] * 2},
    {"layer_types": [FULL] * 4, "sliding_window": None, "num_key_value_heads": 4, "head_dim": None},
    {"sliding_window": None, "num_key_value_heads": 4, "head_dim": 4},
)


class Row(NamedTuple):
    """What came out for a family: served, refused or not tried, and what is to be said about it."""

    family: str
    outcome: str
    text: str


def try_family(family: str) -> Row:
    """Builds a tiny model of the family and compares the tokens of compressed caches with its own."""
    if family == "qwen3_vl":
        return _compare(family, zoo.qwen3_vl())
    try:
        default = AutoConfig.for_model(family)
    except Exception as error:
        return Row(family, "not tried", _no_model(error))
    if default.is_encoder_decoder or default.get_text_config(decoder=True) is not default:
        return Row(family, "not tried", "encoder-decoder or multimodal")
    if family in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return Row(family, "not tried", "encoder")
    rows = []
    for changes in VARIANTS:
        settings = {**SMALL, **changes}
        try:
            known = default.to_dict()
            model = _build(type(default)(**{name: value for name, value in settings.items() if name in known}))
            rows.append(_compare(family, model))
        except Exception as error:
            rows.append(Row(family, "not tried", _no_model(error)))
        if rows[-1].outcome == "served":
            break
    return max(reversed(rows), key=lambda row: ("not tried", "refused", "served").index(row.outcome))


def _no_model(error: Exception) -> str:
    return f"no tiny model: {type(error).__name__}"


def _build(config: Any) -> Any:
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(3.0) if parameter.dim() > 1 else None
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def _compare(family: str, model: Any) -> Row:
    ids = zoo.tokens(1, PROMPT)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False, "use_cache": True}
    own = model.generate(ids, **options)
    for method in METHODS:
        small = f"budget={BUDGET}:" in method
        try:
            cache = CompressedCache(model, method)
            tokens = model.generate(ids, past_key_values=cache, **options)
        except ValueError as error:
            return Row(family, "refused", str(error))
        if not small and not torch.equal(tokens, own):
            return Row(family, "refused", f"{method} gives other tokens than the model")
        if cache.tokens_seen != PROMPT + NEW - 1 or (small and cache.tokens_stored > BUDGET):
            return Row(family, "refused", f"{method} stores {cache.tokens_stored} of {cache.tokens_seen} tokens")
    native = Counter(type(layer).__name__ for layer in cache.layers if not isinstance(layer, SlotLayer))
    kinds = [kind for word, kind in (("Sliding", "sliding-window"), ("Linear", "linear")) if word in " ".join(native)]
    notes = [f"its {' and '.join(kinds or ['other'])} layers stay native"] if native else []
    if any(isinstance(layer, LatentLayer) for layer in cache.layers):
        notes.append("its latent vectors are compressed")
    return Row(family, "served", "; ".join([*notes, *(["adapter"] if family in ADAPTED else [])]))


def page_text(rows: list[Row]) -> str:
    """The part of docs/models.md between its marks."""
    served = by_text([row for row in rows if row.outcome == "served"])
    refused, untried = (
        by_text([row for row in rows if row.outcome == outcome]) for outcome in ("refused", "not tried")
    )
    counts = [sum(len(names) for names in result.values()) for result in (served, refused)]
    lines = [f"transformers {transformers.__version__}: {counts[0]} families served, {counts[1]} refused."]
    for title, result in (("served", served), ("refused, and the message", refused), ("not tried", untried)):
        lines += ["", f"| {title} | families |", "| --- | --- |"]
        lines += [f"| {text} | {', '.join(f'`{name}`' for name in names)} |" for text, names in sorted(result.items())]
    return "\n".join(lines) + "\n"


def by_text(rows: list[Row]) -> dict[str, list[str]]:
    """The families of which the same is to be said, with the model's name and layer left out."""
    result: dict[str, list[str]] = {}
    for row in rows:
        text = row.text.partition(" (If the last")[0].replace(row.family, "the model")
        text = re.sub(r" \(layer \d+\)", "", text).replace("<", "").replace(">", "")
        result.setdefault(text or "all layers of attention are compressed", []).append(row.family)
    return result


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(logging.CRITICAL)
    rows = [try_family(name) for name in sorted(names or [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "qwen3_vl"])]
    if names:
        print(*("  ".join(row) for row in rows), sep="\n")
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    PAGE.write_text(f"{before}{MARKS[0]}{page_text(rows)}{MARKS[1]}{after}", encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main(sys.argv[1:])
