"""docs/sizing.md: memory and speed of users on a GPU, from formulas and records. `kvsketch report --docs` writes it."""

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

PAGE = """\
# How many users, how long a context

Three questions, with numbers. The tables are what `kvsketch recommend --gpu` computes for a Llama of 8B and a Qwen of
32B parameters in bf16; give it the `config.json` of your own model. Bytes are bounds: the weights, what each method
promises for the shapes of the model, and a tenth of the memory kept free. Tokens/s are estimates, from what our own
decode steps read in a second on an H200 ([benchmarks](benchmarks.md)) and the bandwidth of the GPU.
`rehearse:budget=40%` is an eighth of the bytes, `budget=20%:replay=exact` a sixteenth; [what they
lose](results.md#the-same-bytes-any-question).

## My 24 GB card runs out at 100,000 tokens

Sequences that fit at a time beside the weights of the 8B model (16 GB), on a card of 24 GB:

{card}

    kvsketch recommend --gpu rtx-4090 --model config.json --context 100000
    kvsketch generate --model MODEL --method rehearse:budget=40% --file report.txt "What changed in 1981?"

While a prompt is read, its full keys and values are there too; `prefill="stream"` bounds that ([long
contexts](long_contexts.md)).

## Fifty users of one handbook

Each user has 2,000 tokens of their own beside a handbook of 30,000, which lies in memory once. The 8B model on an
H100 and an L40S, the 32B model on an H200:

{handbook}

Without the shared handbook every user holds all of it:

{alone}

    kvsketch recommend --gpu h100 --model config.json --context 32000 --users 50 --document 30000
    kvsketch serve MODEL --method rehearse:budget=40% --rows 50

Each request names the [document](serving.md#documents). Joining the two parts of a cache costs a little more than the
estimate; measured with 64 users of one document: [benchmarks](benchmarks.md#users-of-one-document).

## vLLM needs more requests at a time

The cache decides how many requests vLLM runs at once. Users of 32,768 tokens each that fit, 8B model:

{requests}

The plugin is one option of `vllm serve`; measured there, beside vLLM's own caches: [vLLM](vllm.md).
"""


def page() -> str:
    """The page as it should read."""
    return PAGE.format(card=_card(), handbook=_users(30_000), alone=_users(0), requests=_requests())


def _card() -> str:
    contexts = (16_000, 32_000, 64_000, 100_000)
    plans = [_plans("8B", sizing.Demand(context, 1), "rtx-4090") for context in contexts]
    head = ["method", *(f"{context:,} tokens" for context in contexts)]
    return blocks.table(head, [[blocks.Code(m), *(_fit(each[i]) for each in plans)] for i, m in enumerate(SMALL)])


def _users(document: int) -> str:
    head = ["method", "GPU", "model", "GB in all", "users that fit", "tokens/s of 50"]
    rows = []
    for gpu, model in (("h100", "8B"), ("l40s", "8B"), ("h200", "32B")):
        for method, plan in zip(SMALL, _plans(model, sizing.Demand(32_000, 50, document), gpu), strict=True):
            speed = f"{plan.tokens_per_s:,.0f}" if plan.tokens_per_s else "does not fit"
            rows.append(
                [blocks.Code(method), gpu, model, f"{plan.total_bytes / 1e9:,.0f}", f"{plan.users_that_fit:,}", speed]
            )
    return blocks.table(head, rows)


def _requests() -> str:
    gpus = ("l4", "l40s", "a100-80gb", "h100", "h200")
    plans = [_plans("8B", sizing.Demand(32_768, 1), gpu) for gpu in gpus]
    return blocks.table(
        ["method", *gpus], [[blocks.Code(m), *(_fit(e[i]) for e in plans)] for i, m in enumerate(SMALL)]
    )


def _plans(model: str, demand: sizing.Demand, gpu: str) -> Sequence[sizing.Plan]:
    from transformers import LlamaConfig

    return sizing.plans(LlamaConfig(**SHAPES[model]), SMALL, demand, sizing.GPUS[gpu], advice.speeds())


def _fit(plan: sizing.Plan) -> str:
    return f"{plan.users_that_fit:,} of {plan.user_bytes / 1e9:.2f} GB"
