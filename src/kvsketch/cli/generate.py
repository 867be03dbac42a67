"""kvsketch generate: continue a prompt with a compressed cache, and say what the cache took."""

from __future__ import annotations

import dataclasses
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsketch.cli.options import DEFAULT_MODEL, DeviceOption, DtypeOption, JsonOption, ModelOption
from kvsketch.cli.output import megabytes, print_json, remarks

# A number of tokens, not a share: a share of a short prompt leaves next to nothing.
DEFAULT_METHOD = "streamingllm:budget=1024"


@dataclass(frozen=True)
class Generation:
    """A text and the memory its cache took; full_bytes is what an uncompressed cache holds after the same tokens."""

    model: str
    method: str
    text: str
    prompt_tokens: int
    new_tokens: int
    seconds: float
    tokens_seen: int
    tokens_stored: int
    device_bytes: int
    host_bytes: int
    full_bytes: int

    def memory_line(self) -> str:
        share = (self.device_bytes + self.host_bytes) / max(self.full_bytes, 1)
        host = f" + {megabytes(self.host_bytes)} in host memory" if self.host_bytes else ""
        return (
            f"{self.method}: {self.tokens_seen:,} tokens seen, {self.tokens_stored:,} stored; "
            f"cache {megabytes(self.device_bytes)}{host}, full cache {megabytes(self.full_bytes)} ({share:.0%}); "
            f"{self.new_tokens} tokens in {self.seconds:.1f} s"
        )


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - reads standard input.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from a text file.")] = None,
    model: ModelOption = DEFAULT_MODEL,
    method: Annotated[str, typer.Option(help="name:key=value:...; see `kvsketch methods`.")] = DEFAULT_METHOD,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy; above 0 samples.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Sample from this much probability mass.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt without the chat template.")] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Generate text with a compressed cache; the memory line goes to standard error."""
    text = read_prompt(prompt, file)

    import kvsketch
    from kvsketch import models

    parsed = kvsketch.parse_method(method)
    loaded, tokenizer = models.load(model, dtype=dtype, device=device)
    inputs = tokenizer(text, return_tensors="pt") if raw else models.encode_chat(tokenizer, text)
    _note_beyond_context(loaded, inputs["input_ids"].shape[1] + max_new_tokens)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        options |= {"temperature": temperature, "top_p": top_p}
    generation = _run(model, loaded, tokenizer, inputs, parsed, seed, options, stream=not as_json)
    if as_json:
        print_json(dataclasses.asdict(generation))
    else:
        remarks().print(generation.memory_line(), markup=False, soft_wrap=True)


def _run(
    name: str, model: Any, tokenizer: Any, inputs: Any, method: Any, seed: int, options: dict[str, Any], stream: bool
) -> Generation:
    import torch
    from transformers import TextStreamer

    from kvsketch import CompressedCache
    from kvsketch import generate as captured_generate

    cache = CompressedCache(model, method)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None
    torch.manual_seed(seed)
    start = time.perf_counter()
    inputs = inputs.to(model.device)
    if model.device.type == "cuda":
        output = captured_generate(model, inputs, cache, streamer=streamer, **options)
    else:
        output = model.generate(**inputs, past_key_values=cache, streamer=streamer, **options)
    seconds = time.perf_counter() - start
    prompt_tokens = inputs["input_ids"].shape[1]
    new = output[0, prompt_tokens:]
    return Generation(
        model=name,
        method=str(method),
        text=tokenizer.decode(new, skip_special_tokens=True),
        prompt_tokens=prompt_tokens,
        new_tokens=len(new),
        seconds=round(seconds, 3),
        tokens_seen=cache.tokens_seen,
        tokens_stored=cache.tokens_stored,
        device_bytes=cache.device_bytes,
        host_bytes=cache.host_bytes,
        full_bytes=full_cache_bytes(model, cache.tokens_seen),
    )


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from the one source that was named, or from a pipe."""
    if prompt is not None and file is not None:
        raise ValueError("both a prompt and --file were given; give one of them")
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{file} is not UTF-8 text; --file takes a plain text file") from None
    elif prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        text = sys.stdin.read()
    else:
        text = prompt or ""
    if not text.strip():
        raise ValueError("the prompt is empty; give a prompt, --file FILE, or - to read standard input")
    return text


def full_cache_bytes(model: Any, tokens: int) -> int:
    """Bytes of the model's own cache after `tokens` tokens, measured on one token; a sliding layer keeps its window."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True)
    total = 0
    for layer in cache.layers:
        window = getattr(layer, "sliding_window", None)
        kept = min(tokens, window - 1) if window else tokens
        total += kept * sum(t.nbytes for t in (getattr(layer, n, None) for n in ("keys", "values")) if t is not None)
    return total


def _note_beyond_context(model: Any, tokens: int) -> None:
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context and tokens > context:
        remarks().print(f"note: {tokens:,} tokens go beyond the {context:,} that this model was trained for")
