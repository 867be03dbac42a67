"""The tables of the pages that docs/sizing.md names: memory and speed of users on a GPU, from formulas and records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsketch import advice, sizing
from kvsketch_lab.report import blocks

SHAPES: dict[str, dict[str, Any]] = {
    "8B": dict(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, dtype="bfloat16",
    ),
    "32B": dict(
        vocab_size=151936, hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64,
        num_key_value_heads=8, head_dim=128, dtype="bfloat16",
    ),
}  # fmt: skip
SMALL = ("full", "full:bits=4", "rehearse:budget=40%", "rehearse:budget=20%:replay=exact")


def card() -> str:
    """Sequences of several lengths that fit on a card of 24 GB at a time."""
    contexts = (16_000, 32_000, 64_000, 100_000)
    plans = [_plans("8B", sizing.Demand(context, 1), "rtx-4090") for context in contexts]
    head = ["method", *(f"{context:,} tokens" for context in contexts)]
    return blocks.table(head, [[blocks.Code(m), *(_fit(each[i]) for each in plans)] for i, m in enumerate(SMALL)])


def users(document: int) -> str:
    """Fifty users of 32,000 tokens each, of which so many are those of a document that they share."""
    head = ["method", "GPU", "model", "GB in all", "users that fit", "tokens/s of 50"]
    rows = []
    for gpu, model in (("h100", "8B"), ("l40s", "8B"), ("h200", "32B")):
        for method, plan in zip(SMALL, _plans(model, sizing.Demand(32_000, 50, document), gpu), strict=True):
            speed = f"{plan.tokens_per_s:,.0f}" if plan.tokens_per_s else "does not fit"
            rows.append(
                [blocks.Code(method), gpu, model, f"{plan.total_bytes / 1e9:,.0f}", f"{plan.users_that_fit:,}", speed]
            )
    return blocks.table(head, rows)


def requests() -> str:
    """Users of 32,768 tokens each that fit on several GPUs."""
    gpus = ("l4", "l40s", "a100-80gb", "h100", "h200")
    plans = [_plans("8B", sizing.Demand(32_768, 1), gpu) for gpu in gpus]
    return blocks.table(
        ["method", *gpus], [[blocks.Code(m), *(_fit(e[i]) for e in plans)] for i, m in enumerate(SMALL)]
    )


def user_gb(contender: str, tokens: int) -> float:
    """What one user of so many tokens takes of the shape of an 8B model: vLLM's bf16 or fp8 cache, or a method."""
    method = "full" if contender in ("bf16", "fp8") else contender
    plan = _plans("8B", sizing.Demand(tokens, 1), "h200", (method,))[0]
    return plan.user_bytes / 1e9 / (2 if contender == "fp8" else 1)


def _plans(model: str, demand: sizing.Demand, gpu: str, methods: Sequence[str] = SMALL) -> Sequence[sizing.Plan]:
    from transformers import LlamaConfig

    sized = sizing.SizedModel.of(LlamaConfig(**SHAPES[model]))
    return sizing.plans(sized, methods, demand, sizing.GPUS[gpu], advice.speeds())


def _fit(plan: sizing.Plan) -> str:
    return f"{plan.users_that_fit:,} of {plan.user_bytes / 1e9:.2f} GB"
