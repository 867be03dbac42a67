"""What quantised keys and values cost: error, divergence, bytes and time, ours beside what users have.

    kvsketch eval bits --model qwen2.5-coder-1.5b --texts 4 --out results/eval
    kvsketch eval bits --methods full:bits=4,quanto:bits=4,fp8 --tokens 2048

The model reads the first `--tokens` of a text, which are then quantised (bit_stores.py), and goes on for
`--steps` tokens in one forward: once with the text itself, once with a passage from the middle of what it has read,
which only a cache that still knows it can foretell.

    error         of the attention output: |out - exact| / |exact|, mean over queries behind the prompt, heads, layers
    kl            from the next-token distribution of the full cache to that of the store, in nats, mean over tokens
    again_kl      the same for the passage that comes again; again_nll, full_again_nll: -log p of its tokens
    device_bytes  measured from tensors; step_ms: eager decode step; captured_ms: captured decode step, where possible

No chance is involved. A backend that is not installed is skipped by name.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsketch import CompressedCache, ops
from kvsketch.decode import captured
from kvsketch_lab.evaluation import passages
from kvsketch_lab.evaluation.attention_protocol import capture, relative_error
from kvsketch_lab.evaluation.bit_stores import Store, store
from kvsketch_lab.evaluation.captures import full_attention_layers
from kvsketch_lab.evaluation.experiment import Cell, Experiment, ExperimentOptions, apart, methods_option, model_option
from kvsketch_lab.evaluation.next_token import STEPS_WORTH_CAPTURING, Reading, losses
from kvsketch_lab.options import option
from kvsketch_lab.records import mean

CODED = (8, 4, 3, 2)
STORES = (
    "full",
    *(f"full:{what}={bits}" for bits in CODED for what in ("bits", "key_bits", "value_bits")),
    "full:bits=auto",
    *(f"codec:bits={bits}:{without}=no" for bits in CODED for without in ("center", "rotation", "exact")),
    *(f"codec:bits={bits}:center=no:rotation=no" for bits in CODED),
    "fp8",
    *(f"{backend}:bits={bits}" for backend in ("quanto", "hqq") for bits in (4, 2)),
)
TIMED = 16
Data = dict[str, Any]


@dataclass
class BitsOptions(ExperimentOptions):
    model: str = model_option("qwen2.5-coder-0.5b")
    methods: str = methods_option(",".join(STORES))
    texts: str = passages.texts_option("4")
    tokens: int = option(4096, "tokens that are quantised", least=128)
    steps: int = option(256, "following tokens, which read these", least=2)


class Bits(Experiment):
    name, metric, form, rows = "bits", "kl", ".5f", ("method",)
    columns = (
        "attention error=error:.4f | kl, passage again=again_kl:.5f | nll, passage again=again_nll:.3f | "
        "bytes=share:.0% | step, ms=step_ms:.1f | captured, ms=captured_ms:.2f"
    )
    options: BitsOptions

    def __init__(self, options: BitsOptions) -> None:
        super().__init__(options)
        if 2 * options.steps > options.tokens:
            raise ValueError(f"--steps {options.steps} is more than half of --tokens {options.tokens}; use fewer steps")

    @property
    def stores(self) -> list[str]:
        """Those that are installed; the others are named once."""
        wanted = list(STORES) if self.options.methods == "all" else self.options.methods.split(",")
        result = []
        for text in dict.fromkeys(each.strip() for each in wanted if each.strip()):
            if absent := store(text, None).missing():
                print(f"skipped: {text}, {absent}", file=sys.stderr)
            else:
                result.append(text)
        return result

    def check(self) -> None:
        passages.require(self.tokenizer, passages.names(self.options.texts), self.options.tokens + self.options.steps)

    def cells(self) -> list[Cell]:
        setting = (*self.setting, ("tokens", self.options.tokens), ("steps", self.options.steps))
        stores = self.stores
        return [
            Cell(text, "", name, self.seeds[0], setting)
            for name in passages.names(self.options.texts)
            for text in stores
        ]

    def alike(self, cell: Cell) -> Hashable:
        """The stores of one text share what the full cache says."""
        return cell.sample

    def measure(self, cells: list[Cell]) -> Iterator[tuple[Cell, Data]]:
        first = passages.names(self.options.texts)[0]
        texts = Texts(self.model, self.tokenizer, cells[0].sample, self.options)
        return apart(cells, lambda cell: texts.outcome(store(cell.method, self.model.config), cell.sample == first))


class Texts:
    """What the full cache says of one text and of a passage that comes again."""

    def __init__(self, model: Any, tokenizer: Any, name: str, options: BitsOptions) -> None:
        self.model, self.tokens, self.steps = model, options.tokens, options.steps
        ids = passages.token_ids(tokenizer, name, options.tokens + options.steps, model.device)
        self.prompt, middle = ids[:, : options.tokens], options.tokens // 2
        self.next, self.again = ids[:, options.tokens :], ids[:, middle : middle + options.steps]
        self.captured = {
            index: layer._replace(
                queries=layer.queries[:, :, self.tokens :],
                keys=layer.keys[:, :, : self.tokens],
                values=layer.values[:, :, : self.tokens],
            )
            for index, layer in capture(model, ids, full_attention_layers(options.model)).items()
        }
        self.exact, self.exact_again = self._logits(None, self.next), self._logits(None, self.again)
        self.full_bytes = sum(t.nbytes for layer in self.captured.values() for t in (layer.keys, layer.values))

    @torch.no_grad()
    def _logits(self, kind: Store | None, after: Tensor) -> Tensor:  # [steps, V]
        """Logits behind each of the tokens that come after the prompt."""
        return self.model(after, past_key_values=self._read(kind), use_cache=True).logits[0].float()

    @torch.no_grad()
    def _read(self, kind: Store | None) -> Any:
        """The cache of a store that has read the prompt; transformers' own without one."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config) if kind is None else kind.new(self.model)
        self.model(self.prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
        if kind is not None:
            kind.prompt_read(cache)
        return cache

    @torch.no_grad()
    def outcome(self, kind: Store, timed: bool) -> Data:
        """What one store costs on this text."""
        cache = self._read(kind)
        result: Data = {"error": self._error(kind, cache)} if kind.whole else {}
        result["full_bytes"] = self.full_bytes
        if kind.held:
            result["device_bytes"] = kind.bytes(cache)
        del cache
        result["kl"] = divergence(self.exact, self._logits(kind, self.next))
        again = self._logits(kind, self.again)
        result |= {"again_kl": divergence(self.exact_again, again), "again_nll": self._loss(again)}
        result["full_again_nll"] = self._loss(self.exact_again)
        return result | (self._times(kind) if timed and kind.held else {})

    def _loss(self, logits: Tensor) -> float:
        """-log p of the passage's tokens behind its first."""
        return float(losses(logits[:-1], self.again[0, 1:]).mean())

    def _error(self, kind: Store, cache: Any) -> float:
        errors = []
        for index, layer in self.captured.items():
            # In float32, so that rounding of the output is no part of the error.
            exact, out = (
                ops.weighted_attention(layer.queries.float(), k.float(), v.float(), None, None, layer.scale)
                for k, v in ((layer.keys, layer.values), kind.read_back(cache, index))
            )
            errors.append(relative_error(out, exact))
        return mean(errors)

    def _times(self, kind: Store) -> Data:
        cache = self._read(kind)
        token = self.next[:, :1]
        seconds = []
        for _ in range(2 + TIMED):
            begun = self._now()
            self.model(token, past_key_values=cache, use_cache=True)
            seconds.append(self._now() - begun)
        result = {"step_ms": 1e3 * sorted(seconds[2:])[TIMED // 2]}
        cache = kind.new(self.model)
        if not isinstance(cache, CompressedCache) or captured.impossible(self.model, cache, {}) is not None:
            return result
        count = STEPS_WORTH_CAPTURING + 2 * TIMED
        ids = torch.cat([self.prompt, self.next.repeat(1, -(-count // self.steps))[:, :count]], 1)
        reading = Reading(self.model, self._read(kind), ids, self.tokens)
        reading.to(ids.shape[1] - TIMED)
        begun = self._now()
        reading.to(ids.shape[1])
        return result | {"captured_ms": 1e3 * (self._now() - begun) / TIMED}

    def _now(self) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()


def divergence(exact: Tensor, other: Tensor) -> float:
    """Mean over tokens of KL(exact || found) in nats, from logits [n, V]."""
    p, q = exact.log_softmax(-1), other.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())
