"""docs/sizing.md and the pages it names: memory and speed of users on a GPU, from formulas and records.

`kvsketch report --docs` writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvsketch import advice, sizing
from kvsketch_lab.report import blocks, docs

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

SIZING = """\
# How many users, how long a context

`kvsketch recommend --gpu` says what fits on a GPU, and how fast it would be:

    kvsketch recommend --gpu rtx-4090 --model config.json --context 100000
    kvsketch recommend --gpu h100 --model config.json --context 32000 --users 50 --document 30000

Give it the `config.json` of your own model. Three questions that come up often have a page each:

- [My 24 GB card runs out at 100,000 tokens](out_of_memory.md)
- [Fifty users of one handbook](many_users.md)
- [vLLM needs more requests at a time](vllm_concurrency.md)

{how}
"""
HOW = """\
The tables are what that command computes for a Llama of 8B and a Qwen of 32B parameters in bf16. Bytes are bounds: the
weights, what each method promises for the shapes of the model, and a tenth of the memory kept free. Tokens/s are
estimates, from what our own decode steps read in a second on an H200 ([benchmarks](benchmarks.md)) and the bandwidth
of the GPU. `rehearse:budget=40%` takes an eighth of the bytes, `budget=20%:replay=exact` a sixteenth; [what they
lose](results.md#the-same-bytes-any-question)."""
CARD = """\
# My 24 GB card runs out at 100,000 tokens

The weights of an 8B model take 16 GB in bf16. What is left has to hold the KV cache, and a full cache of 100,000 tokens
is larger than that. Sequences that fit at a time, and the bytes of each:

{card}

## What to do

1. Ask what fits. This needs no GPU and no weights, only the model's `config.json`:

       kvsketch recommend --gpu rtx-4090 --model config.json --context 100000

2. Start with `full:bits=4`. It keeps every token. If that is too large, take `rehearse:budget=40%`:

       kvsketch generate --model MODEL --method full:bits=4 --file report.txt "What changed in 1981?"
       kvsketch generate --model MODEL --method rehearse:budget=40% --file report.txt "What changed in 1981?"

3. Reading needs memory too: while a prompt is read, its full keys and values are there. `--prefill stream` reads it in
   chunks, and only one chunk is held whole ([contexts longer than memory](long_contexts.md)):

       kvsketch generate --model MODEL --method rehearse:budget=40% --prefill stream --file report.txt "What changed?"

4. Or say how much memory there is, and let kvsketch choose the budget:

       kvsketch generate --model MODEL --method rehearse --memory 4GB --file report.txt "What changed in 1981?"

5. Ask several questions? Read the text once, then ask the file that this leaves:

       kvsketch read report.pdf --out report.kvs --model MODEL --method rehearse:budget=40%
       kvsketch chat report.kvs

In Python it is one line: `cache = kvsketch.CompressedCache(model, "rehearse:budget=40%")`, and `past_key_values=cache`
for `model.generate`.

A model that was trained on fewer tokens than your text breaks down whatever the cache does ([where positions
end](long_contexts.md#where-positions-end)). If the weights themselves are too large, kvsketch does not help.

## Where the numbers come from

{how}
"""
USERS = """\
# Fifty users of one handbook

Every user asks about the same long text. A server should read it once and hold it once, and each user should pay for
their own words only. Each user below has 2,000 tokens of their own beside a handbook of 30,000:

{handbook}

Without sharing, every user holds the whole handbook:

{alone}

## What to do

    pip install 'kvsketch[serve]'
    kvsketch recommend --gpu h100 --model config.json --context 32000 --users 50 --document 30000
    kvsketch serve MODEL --method rehearse:budget=40% --rows 50
    curl -F file=@handbook.pdf http://127.0.0.1:8000/v1/documents

The answer to the upload names the document. A request that gives this name reads only its own question; the handbook
waits in memory. [Serving](serving.md#documents) has the fields of a request, in curl and in Python.

With vLLM the handbook is stored by one request and named by the others ([documents in
vLLM](vllm.md#documents-that-requests-share)). Measured there:

{vllm_documents}

On our own server, with 64 users of one document: [benchmarks](benchmarks.md#users-of-one-document). Joining the two
parts of a cache costs a little more than the estimates above.

## Where the numbers come from

{how}
"""
REQUESTS = """\
# vLLM needs more requests at a time

vLLM runs as many requests at once as their KV caches fit beside the weights. When requests wait although the GPU has
time, the cache is the limit, and a smaller cache lets more of them run. Users of 32,768 tokens each that fit, 8B model:

{requests}

## What to do

    pip install 'kvsketch[vllm]'
    vllm serve MODEL --attention-backend CUSTOM --additional-config '{{"kvsketch": "full:bits=4"}}'

`full:bits=4` keeps every token, and vLLM's prefix caching, chunked prefill and preemption work as before. `rehearse` is
smaller and faster, but prefix caching finds nothing:

    vllm serve MODEL --attention-backend CUSTOM --additional-config '{{"kvsketch": "rehearse:budget=16384"}}' \\
        --no-enable-chunked-prefill --max-num-batched-tokens 34000 --max-model-len 33800

Nothing of vLLM is patched; without `--attention-backend CUSTOM` nothing changes. "Maximum concurrency" in vLLM's log is
the number of requests that fit. Measured, beside vLLM's own caches:

{vllm}

Read [vLLM](vllm.md) for what does not work there, and [fifty users of one handbook](many_users.md) where many requests
begin with the same text.

## Where the numbers come from

{how}
"""


def pages(root: Path) -> dict[str, str]:
    """The pages as they should read, by file name; measured numbers come from the records of a checkout."""
    numbers = docs.Numbers(root)
    measured = {name: _block(name, numbers.words(name)) for name in ("vllm", "vllm_documents")}
    words = {"how": HOW, **measured}
    return {
        "sizing.md": SIZING.format(**words),
        "out_of_memory.md": CARD.format(card=_card(), **words),
        "many_users.md": USERS.format(handbook=_users(30_000), alone=_users(0), **words),
        "vllm_concurrency.md": REQUESTS.format(requests=_requests(), **words),
    }


def _block(name: str, words: str) -> str:
    """As `docs.pages` leaves it."""
    return f"<!-- kvsketch report --docs: {name} -->\n\n{words}\n\n<!-- end -->"


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
