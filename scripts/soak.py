"""Long generation: memory and time per token of every bounded method while a model generates on and on.

    python -m scripts.soak --tokens 100000 --processes 3 --out results/soak.jsonl

A prompt is read, then tokens are generated one by one: as captured CUDA graphs on a GPU, eagerly on a CPU. At regular
intervals the bytes of the cache, the tokens it holds and the time per token are noted. The run fails when the bytes
change, the budget is exceeded, or the second half is slower than the first. One record for each method.

The model is a small random Llama unless --model names another; what the text says does not matter here.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvsketch
from kvsketch import CompressedCache, models
from kvsketch.decode import captured as decoding
from kvsketch.decode.sampling import Sampler
from kvsketch_lab import records
from kvsketch_lab.benchmark.device import Device

RANDOM = "random"
BOUNDED = [
    name
    for name, method in kvsketch.METHODS.items()
    if method.family in ("evict", "summarise") and not method.budget_is_mean
]
# A busy machine makes single intervals slow; a cache that costs more with every token makes all later ones slow.
SLOWER = 1.2
LARGER = 1.02
WARM_UP = 64  # tokens before the first interval: kernels are compiled, the step is captured


def random_model(layers: int, device: str, dtype: torch.dtype) -> Any:
    """A small Llama whose weights are drawn; its positions have no end."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1 << 20,
        initializer_range=0.1,
    )
    model: Any = LlamaForCausalLM(config)
    return model.to(device, dtype).eval()


def generator(model: Any, cache: CompressedCache, prompt: torch.Tensor, tokens: int) -> Callable[[], None]:
    """A function that generates one more token; the prompt has been read when this returns."""
    total = prompt.shape[1] + tokens
    sampler = Sampler([], prompt, total, None, None, do_sample=True)
    sampler.before_step()
    token = sampler.choose(model(prompt, past_key_values=cache, use_cache=True).logits[:, -1])
    if model.device.type == "cuda":
        return decoding.Step(model, cache, sampler, token, total).run
    position = torch.full_like(token, prompt.shape[1])

    def step() -> None:
        sampler.before_step()
        logits = model(token, past_key_values=cache, position_ids=position, use_cache=True).logits
        token.copy_(sampler.choose(logits[:, -1]))
        position.add_(1)

    return step


def soak(method: str, options: argparse.Namespace, clock: Callable[[], float] | None = None) -> dict[str, Any]:
    """The data of one method's record; `clock` in place of that of the device."""
    torch.set_num_threads(1)
    on = Device(options.device)
    if options.model == RANDOM:
        model = random_model(options.layers, options.device, on.dtype)
    else:
        model, _ = models.load(options.model, dtype=on.dtype, device=options.device, progress=False)
    torch.manual_seed(options.seed)
    prompt = torch.randint(3, model.config.vocab_size, (options.batch, options.prompt)).to(options.device)
    cache = CompressedCache(model, method, seed=options.seed)
    intervals = []
    with torch.no_grad():
        step = generator(model, cache, prompt, options.tokens)
        # A CPU is shared: what other processes take of it must not count.
        clock = clock or (time.perf_counter if options.device == "cuda" else time.process_time)
        done = 1
        for end in [min(WARM_UP, options.tokens // 2), *ends(options.tokens, options.intervals)]:
            on.synchronize()
            start, first = clock(), done
            while done < end:
                step()
                done += 1
            on.synchronize()
            seconds = clock() - start
            if end > WARM_UP:
                intervals.append(noted(cache, done, seconds / max(1, done - first), on))
    return {
        "method": method,
        "model": options.model if options.model != RANDOM else f"random Llama, {options.layers} layers",
        "device": options.device,
        "captured": options.device == "cuda",
        "prompt": options.prompt,
        "batch": options.batch,
        "tokens": options.tokens,
        "budget": max(layer.method.budget_tokens(layer.table) or 0 for layer in cache.slot_layers),
        "tokens_seen": cache.tokens_seen,
        "intervals": intervals,
    }


def ends(tokens: int, count: int) -> list[int]:
    """Where the intervals end; the first begins after the warm-up."""
    return [tokens * (i + 1) // count for i in range(count) if tokens * (i + 1) // count > WARM_UP]


def noted(cache: CompressedCache, tokens: int, seconds: float, on: Device) -> dict[str, Any]:
    return {
        "tokens": tokens,
        "milliseconds_per_token": round(1000 * seconds, 4),
        "tokens_stored": cache.tokens_stored,
        "device_bytes": cache.device_bytes,
        "host_bytes": cache.host_bytes,
        "allocated_bytes": on.allocated,
        "resident_bytes": psutil.Process().memory_info().rss,
    }


def complaints(data: dict[str, Any], slower: float = SLOWER) -> list[str]:
    """What is not flat."""
    intervals, result = data["intervals"], []
    if data["tokens_seen"] != data["prompt"] + data["tokens"] - 1:
        result.append(f"{data['tokens_seen']} tokens seen after {data['prompt']} + {data['tokens']} - 1")
    most = max(i["tokens_stored"] for i in intervals)
    if most > data["budget"]:
        result.append(f"{most} tokens stored with a budget of {data['budget']}")
    for name in ("device_bytes", "host_bytes"):
        sizes = {i[name] for i in intervals}
        if len(sizes) > 1:
            result.append(f"{name} change: {min(sizes)} to {max(sizes)}")
    allocated = [i["allocated_bytes"] or 0 for i in intervals]
    half = len(allocated) // 2
    if max(allocated[half:]) > LARGER * max(allocated[:half]):
        result.append(f"memory on the device grows: {max(allocated[:half])} to {max(allocated[half:])} bytes")
    ratio = slowdown(data)
    if ratio > slower:
        result.append(f"the second half takes {ratio:.2f} times as long per token as the first")
    return result


def slowdown(data: dict[str, Any]) -> float:
    """Median time per token of the second half of the intervals over that of the first."""
    times = [i["milliseconds_per_token"] for i in data["intervals"]]
    half = len(times) // 2
    return statistics.median(times[half:]) / statistics.median(times[:half])


def report(data: dict[str, Any], path: str | None, seed: int) -> bool:
    """Prints and records one method; whether it stayed flat."""
    data = {**data, "slowdown": round(slowdown(data), 4), "complaints": complaints(data)}
    if path:
        records.append(path, records.make_record("soak", data, seed))
    last, wrong = data["intervals"][-1], data["complaints"]
    print(
        f"{data['method']}: {data['tokens']:,} tokens, {last['tokens_stored']} of {data['budget']} stored, "
        f"{last['device_bytes']:,} bytes, {last['milliseconds_per_token']:.3f} ms per token, second half "
        f"{data['slowdown']:.2f} of the first: {'; '.join(wrong) or 'flat'}",
        flush=True,
    )
    return not wrong


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tokens", type=int, default=100_000, help="tokens that each method generates")
    add("--methods", default=",".join(BOUNDED), help="text forms by commas, without budget")
    add("--budget", default="256", help="tokens for each KV head")
    add("--prompt", type=int, default=1024, help="length of the prompt")
    add("--batch", type=int, default=1)
    add("--intervals", type=int, default=50)
    add("--model", default=RANDOM, help="a short name or folder; random: a small random Llama")
    add("--layers", type=int, default=4, help="layers of the random model")
    add("--processes", type=int, default=1, help="methods that run at the same time")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    add("--seed", type=int, default=0)
    add("--out", default=None, help="file of records")
    options = parser.parse_args(arguments)
    if options.tokens < 4 * WARM_UP or options.intervals < 4:
        parser.error(f"use at least {4 * WARM_UP} tokens and 4 intervals")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    names = [name.strip() for name in options.methods.split(",") if name.strip()]
    methods = [str(kvsketch.parse_method(f"{name}:budget={options.budget}")) for name in names]
    if options.processes == 1:
        flat = [report(soak(method, options), options.out, options.seed) for method in methods]
    else:
        # Every process starts afresh: CUDA does not survive a fork.
        with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
            running = [pool.submit(soak, method, options) for method in methods]
            flat = [report(future.result(), options.out, options.seed) for future in as_completed(running)]
    print(f"{sum(flat)} of {len(flat)} methods stayed flat")
    return 0 if all(flat) else 1


if __name__ == "__main__":
    sys.exit(main())
