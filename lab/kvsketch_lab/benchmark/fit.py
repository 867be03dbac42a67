"""What `kvsketch fit` costs, and what fewer tokens cost in quality: seconds by tokens, beside the virtual replay.

    kvsketch bench fit --fit-tokens 0,2048,4096,8192 --out results/first_fit/fit.jsonl

A model is fitted to so many tokens of the texts that Python brings along (0: not at all, the replay is virtual). Then
it reads held-out messages with `--method`, and goes on for `--steps` tokens: with the text itself, and with a passage
from its middle, which only a cache that still knows it can foretell.

    fit_s       processor seconds of all threads of the fit, directions included; wall_s: by the clock
    kl          from the next-token distribution of the full cache to that of the method, in nats, mean over tokens
    again_kl    the same for the passage that comes again; again_nll, full_again_nll: -log p of its tokens

A fit whose maps are not finite is reported as failed.
"""

from __future__ import annotations

import copy
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsketch import CompressedCache, prefill
from kvsketch.cache import learning
from kvsketch.decode.asking import repeat_instruction
from kvsketch.methods import Rehearse, parse_method
from kvsketch.models import fit_texts, texts
from kvsketch_lab.benchmark.runner import FAILED, Fields
from kvsketch_lab.benchmark.shapes import TextBenchmark
from kvsketch_lab.options import option
from kvsketch_lab.records import held_out, mean


@dataclass
class Fit(TextBenchmark):
    name, kind, title = "fit", "fit", "A fit by tokens, and the replay that it gives"
    columns = (
        "processor | model | method | fit_tokens:,d | threads | fit s=fit_s:.1f | kl=kl:.4f | kl, again=again_kl:.4f | "
        "nll, again=again_nll:.3f | nll, full=full_again_nll:.3f"
    )
    model: str = option("smollm2-135m", "short name, folder, .gguf file or hub name")
    methods: str = option("rehearse:bytes=1/8", "rehearse, without a replay")
    fit_tokens: tuple[int, ...] = option("0,2048,4096,8192", "tokens of a fit; 0: none, the replay is virtual", least=0)
    length: int = option(512, "tokens of a fit that are read at a time", least=256)
    texts: int = option(2, "held-out messages, the longest ones", least=1)
    tokens: int = option(768, "tokens of a message that are read", least=128)
    steps: int = option(64, "tokens after them", least=2)
    threads: int = option(1, "threads of torch", least=1)

    def check_options(self) -> None:
        for text in self.methods.split(","):
            if not isinstance(parse_method(text), Rehearse) or "replay=" in text:
                raise ValueError(f"--methods {text} is no rehearse without a replay; use such as rehearse:bytes=1/8")
        if 2 * self.steps > self.tokens:
            raise ValueError(f"--steps {self.steps} is more than half of --tokens {self.tokens}; use fewer steps")

    def cells(self) -> list[Fields]:
        methods = self.methods.split(",")
        return [{"model": self.model, "method": m, "fit_tokens": n} for n in self.fit_tokens for m in methods]

    def measure(self, model: str, method: str, fit_tokens: int) -> Iterator[Fields]:
        torch.set_num_threads(self.threads)
        row: Fields = {
            "model": model, "method": method, "fit_tokens": fit_tokens, "length": self.length, "threads": self.threads,
            "tokens": self.tokens, "steps": self.steps, "processor": platform.machine(),
        }  # fmt: skip
        parsed: Any = parse_method(method)
        if fit_tokens:
            maps, fields = self._fitted(fit_tokens)
            if not all(bool(x.isfinite().all()) for own in (maps.queries, maps.scores) for x in own.values()):
                yield {**row, FAILED: "the maps are not finite"}
                return
            parsed, row = parse_method(f"{method}:replay=learned").with_map(maps), row | fields  # type: ignore[attr-defined]
        found = [self._divergence(parsed, name) for name in self._names()]
        yield row | {name: mean([each[name] for each in found]) for name in found[0]} | {"samples": self._names()}

    def _fitted(self, tokens: int) -> tuple[Any, Fields]:
        """The maps of a fit, and what it took."""
        loaded, tokenizer, _ = self.loaded
        parts, said = fit_texts.parts(tokenizer, tokens, self.length), repeat_instruction(tokenizer)[0]
        began, clock = time.process_time(), time.perf_counter()
        maps = learning.learn(loaded, parts, said).maps
        return maps, {"fit_s": time.process_time() - began, "wall_s": time.perf_counter() - clock}

    def _names(self) -> list[str]:
        known = [name for name in texts.speeches() if held_out.is_held_out_text(name)]
        return sorted(known, key=lambda name: -len(texts.document(name)))[: self.texts]

    def _divergence(self, method: Any, name: str) -> Fields:
        """How far a message that was read with a method goes on from where the full cache goes on."""
        model, tokenizer, _ = self.loaded
        ids = tokenizer(texts.document(name), return_tensors="pt").input_ids[:, : self.tokens + self.steps]
        ids, middle = ids.to(model.device), self.tokens // 2
        after, again = ids[:, self.tokens :], ids[:, middle : middle + self.steps]
        caches = [CompressedCache(model, each) for each in ("full", method)]
        for cache in caches:
            prefill(model, ids[:, : self.tokens], cache)
        goes_on, repeats = ([self._logs(cache, what) for cache in caches] for what in (after, again))
        losses = [float(-logs[:-1].gather(-1, again[0, 1:, None]).mean()) for logs in repeats]
        return {
            "kl": _kl(*goes_on), "again_kl": _kl(*repeats), "full_again_nll": losses[0], "again_nll": losses[1],
            "share": caches[1].device_bytes / caches[0].device_bytes,
        }  # fmt: skip

    def _logs(self, cache: Any, ids: Tensor) -> Tensor:  # [steps, vocabulary]
        own = copy.deepcopy(cache)
        return self.loaded[0](ids, past_key_values=own, use_cache=True).logits[0].float().log_softmax(-1)


def _kl(exact: Tensor, other: Tensor) -> float:
    return float((exact.exp() * (exact - other)).sum(-1).mean())
