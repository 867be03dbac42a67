"""Models to time: checkpoints, or named shapes with random weights, since speed does not depend on the weights. Also
what benchmarks of whole models share: prompts, prefills, the check of a prefilled cache.
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvsketch import CompressedCache, models, prefill
from kvsketch.cache.replay import fitting, repetition
from kvsketch.methods import Method, Rehearse, parse_method
from kvsketch.methods.rehearse import LEARNED
from kvsketch.methods.waiting import WaitingMethod
from kvsketch.models import texts
from kvsketch_lab.benchmark.device import Device
from kvsketch_lab.benchmark.runner import Benchmark
from kvsketch_lab.options import option

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": dict(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=1 << 21, rope_theta=5e5,
    ),
    "llama-3.2-1b": dict(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=1 << 21, rope_theta=5e5, tie_word_embeddings=True,
    ),
    "llama-2-7b": dict(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, head_dim=128, max_position_embeddings=1 << 21,
    ),
    "tiny": dict(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1 << 21,
    ),
}  # fmt: skip


HELP = f"a shape with random weights ({', '.join(sorted(SHAPES))}), or a checkpoint: short name, folder or hub name"


def build(name: str, layers: int | None = None, seed: int = 0, device: str = "cuda") -> Any:
    """A Llama of the named shape on the device, or a checkpoint; its first `layers` where these are given."""
    if name not in SHAPES:
        return _checkpoint(name, layers, device)
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {**SHAPES[name], **({"num_hidden_layers": layers} if layers else {})}
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(Device(device).dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(LlamaConfig(**settings)).eval()
    finally:
        torch.set_default_dtype(before)


def _checkpoint(name: str, layers: int | None, device: str) -> Any:
    model: Any = models.load(name, dtype=Device(device).dtype, device=device)[0]
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
    return sum(p.nbytes for p in parameters)


def make_prompt(tokens: int, device: Device, seed: int, vocabulary: int) -> Tensor:  # [1, tokens]
    return torch.randint(10, vocabulary, (1, tokens), generator=device.generator(seed), device=device.name)


def make_cache(model: Any, method: str | Method | None) -> Any:
    """The cache of a method; transformers' own without one."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config) if method is None else CompressedCache(model, method)


@torch.no_grad()
def prefill_times(
    model: Any, method: str | Method | None, tokens: int, repeats: int, device: Device,
    around: Callable[[Any], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> tuple[list[float], Tensor, Any]:  # fmt: skip
    """Milliseconds of each prefill after one that warms up, the last logits, and the cache of the last.

    around: the block in which a cache is read into.
    """
    prompt = make_prompt(tokens, device, 0, model.config.vocab_size)
    chosen = None if method is None else _with_map(model, parse_method(method), prompt)
    result: list[Any] = []

    def call() -> None:
        result[:] = [make_cache(model, chosen)]
        with around(result[0]):
            result.append(model(prompt, past_key_values=result[0], logits_to_keep=1).logits)
        if chosen is not None and repetition.repeats(chosen):
            result[0].replay(model, prompt)

    times = device.milliseconds(call, repeats)
    return times, result[1], result[0]


def _with_map(model: Any, method: Method, prompt: Tensor) -> Method:
    """The method; for replay=learned with maps of this model, which are fitted to the beginning of the prompt."""
    if not isinstance(method, Rehearse) or method.replay != LEARNED or method.learned is not None:
        return method

    def read(fitting_method: Method) -> None:
        prefill(model, prompt[:, : method.chunk], CompressedCache(model, fitting_method))

    return method.with_map(fitting.fit(read))


def problem_of(cache: CompressedCache) -> str | None:
    """What is wrong with a prefilled cache: a layer beyond its budget, or numbers that are not finite."""
    tables = [layer.table for layer in cache.slot_layers]
    ragged = any(table.layout is not None for table in tables)
    budgets = [cache.method.budget_tokens(table) or 0 for table in tables]
    waiting = cache.method.queue(tables[0]).count if isinstance(cache.method, WaitingMethod) else 0
    most = sum(budgets) / len(budgets) + waiting
    if ragged and (mean := float(torch.stack([table.used_slots() for table in tables]).double().mean())) > most:
        return f"heads hold {mean:,.1f} slots on average, their budget is {most:,.0f}"
    for layer in cache.slot_layers:
        budget = layer.method.budget_tokens(layer.table)
        bounded = layer.method.family in ("evict", "summarise") and not ragged
        if bounded and budget is not None and layer.table.stored() > budget:
            return f"layer {layer.table.context.layer_idx} holds {layer.table.stored()} slots, its budget is {budget}"
        if not all(bool(t.isfinite().all()) for t in (layer.table.key_slots(), layer.table.value_slots())):
            return f"layer {layer.table.context.layer_idx} holds numbers that are not finite"
    return None


@dataclass
class ModelBenchmark(Benchmark, ABC):
    """A benchmark of methods on a whole model."""

    model: str = option("llama-3.1-8b", HELP)
    methods: str = option("", "methods, separated by commas")

    @property
    def texts(self) -> list[str]:
        """The methods, each in its text form; raises ValueError for an unknown one."""
        return list(dict.fromkeys(str(parse_method(text.strip())) for text in self.methods.split(",") if text.strip()))

    def build(self, layers: int | None) -> Any:
        return build(self.model, layers, self.seed, self.device)

    @functools.cached_property
    def built(self) -> Any:
        return self.build(getattr(self, "layers", None))


@dataclass
class ShapeBenchmark(ModelBenchmark, ABC):
    """A benchmark of decode steps after one prompt; its option is called --shape."""

    model: str = option("", "the same as --shape")
    shape: str = option("llama-3.1-8b", HELP)
    layers: int | None = option(None, "fewer layers than the shape has", least=1)
    prompt: int = option(32768, "tokens before the steps", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model = self.model or self.shape

    @functools.cached_property
    def tokens(self) -> Tensor:  # [1, prompt]
        return make_prompt(self.prompt, self.on, self.seed, min(10000, self.built.config.vocab_size))


@dataclass
class CheckedBenchmark(ShapeBenchmark, ABC):
    """One that first compares the tokens of methods, in a model of few layers."""

    check_layers: int = option(8, "layers of the model that is used for the check", least=1)

    @functools.cached_property
    def checked(self) -> Any:
        """The model of the check."""
        return self.build(min(self.check_layers, self.built.config.num_hidden_layers))


@dataclass
class TextBenchmark(Benchmark, ABC):
    """A benchmark of methods on a real model and a real text; runs on any device."""

    device: str = option("cuda" if torch.cuda.is_available() else "cpu", "cuda or cpu; a GPU where there is one")
    dtype: str = option("", "float32, bfloat16 or float16; the one that suits the device unless given")
    model: str = option("qwen2.5-coder-0.5b", "short name, folder, .gguf file or hub name")
    methods: str = option("", "methods, separated by commas")
    text: str = option("", "a text file; the longest speech of kvsketch.texts unless given")

    @functools.cached_property
    def loaded(self) -> tuple[Any, Any, str]:
        """The model, its tokenizer and the text."""
        text = Path(self.text).read_text(encoding="utf-8") if self.text else texts.document()
        return *models.load(self.model, dtype=self.dtype or None, device=self.device), text

    def ids(self, tokens: int, asked: str) -> Tensor:  # [1, tokens]
        """The beginning of the text; `asked`: the option that says how much of it."""
        model, tokenizer, text = self.loaded
        result: Tensor = tokenizer(text, return_tensors="pt")["input_ids"][:, :tokens].to(model.device)
        if result.shape[1] < tokens:
            raise ValueError(f"the text has {result.shape[1]} tokens; use a smaller {asked}")
        return result
