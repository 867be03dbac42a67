"""Models to time: named shapes with random weights, for speed depends on shapes and not on what the weights say; or
checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": dict(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=1 << 21, rope_theta=5e5,
    ),
    "llama-3.2-1b": dict(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=1 << 21, rope_theta=5e5, tie_word_embeddings=True,
    ),
    "tiny": dict(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1 << 21,
    ),
}  # fmt: skip


HELP = f"a shape with random weights ({', '.join(sorted(SHAPES))}), or a checkpoint: short name, folder or hub name"


def build(name: str, layers: int | None = None, seed: int = 0, device: str = "cuda") -> Any:
    """A bf16 Llama of the named shape on the device, or a checkpoint; its first `layers` where these are given."""
    if name not in SHAPES:
        return _checkpoint(name, layers, device)
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {**SHAPES[name], **({"num_hidden_layers": layers} if layers else {})}
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(LlamaConfig(**settings)).eval()
    finally:
        torch.set_default_dtype(before)


def _checkpoint(name: str, layers: int | None, device: str) -> Any:
    from kvsketch import models

    model: Any = models.load(name, dtype=torch.bfloat16, device=device)[0]
    if layers and layers < model.config.num_hidden_layers:
        if not hasattr(model.model, "layers"):
            raise ValueError(f"the layers of {name} cannot be counted off; leave --layers and --check-layers out")
        model.model.layers = model.model.layers[:layers]
        model.config.num_hidden_layers = layers
        if getattr(model.config, "layer_types", None):
            model.config.layer_types = model.config.layer_types[:layers]
    return model


def weight_bytes(model: Any) -> int:
    """Bytes of the weights a decode step reads: all but the embedding table, of which it reads one row."""
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings() is not None and model.get_output_embeddings().weight is embedding
    parameters = [p for p in model.parameters() if tied or p is not embedding]
    return sum(p.numel() * p.element_size() for p in parameters)
