"""kvsketch bench: the benchmarks, a command each."""

from __future__ import annotations

from kvsketch.cli.lazy import group

BENCHMARKS = {
    "decode": "One decode step, captured, for any method and batch, beside full-cache baselines.",
    "step-profile": "Device time of a decode step by kernel.",
    "prefill": "A whole prefill under any method, beside transformers' own cache.",
    "rehearse": "What rehearse adds to a prefill: score, choice, refit, encoding.",
    "kernels": "The decode kernel beside SDPA's flash and cuDNN kernels.",
    "linear": "The linear layers of a decode step beside torch's.",
    "offload": "A decode step with the cache in host memory, beside the same step on the device.",
    "hit-rate": "How often an offloaded query finds its tokens on the device, on a real model.",
    "serve": "Requests that share a decode step: throughput, first tokens, joins, beside the full cache.",
    "vllm": "A decode step of vLLM: its own caches beside kvsketch's plugin.",
    "document": "First token of an answer about a document: read again, from its file, held ready.",
    "stream": "Prompts of any length read chunk by chunk: time, memory, flatness.",
    "chunk": "The attention of a chunk beside flash attention.",
    "mass": "The column sums of attention that H2O and Keyformer need.",
    "kcenter": "Farthest-first centers, exact and coarse.",
    "balance": "The balancing walk of BalanceKV.",
    "subgen": "SubGen's streaming structure.",
    "pages": "Quest's choice of pages.",
    "recall": "Clustering, selection and indexed attention of the recall methods.",
}

bench_app = group(
    "benchmark", BENCHMARKS, "Measure speed; `kvsketch bench NAME --help` lists the options of a benchmark."
)
