"""Whether a promise of the loss holds: on passages that were not tried, and for answers to questions.

    kvsketch eval promise --model qwen2.5-coder-1.5b --kinds lines,keys,code --texts 5 --tokens 2048 --seeds 100

A text is of one of seven kinds (`text_kinds`), with as many facts as fill `--tokens`. A method with a promise reads it
and chooses its budget (`cache.promise`). Then passages that lie anywhere in the text are repeated, and some of its
facts are asked for.

    bytes       share of a full cache; chosen: the method that was kept
    tried       loss of the passages that checked the cache that was kept, in nats by token
    loss        loss of other passages; worst: of the worst of them
    kept        1 where the loss is within the promise
    answers     loss of the answers' tokens
    right       share of answers whose every token is the argmax; full_right: with the full cache
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvsketch import CompressedCache, prefill
from kvsketch.cache.replay.probes import Probes
from kvsketch.decode.asking import document_ids, repeat_instruction
from kvsketch_lab.evaluation.experiment import Cell, Experiment, ExperimentOptions, apart, methods_option, model_option
from kvsketch_lab.evaluation.facts import FactOptions, told
from kvsketch_lab.options import option

Data = dict[str, Any]


@dataclass
class PromiseOptions(FactOptions, ExperimentOptions):
    model: str = model_option("qwen2.5-coder-0.5b")
    methods: str = methods_option("rehearse:loss=5%")
    tokens: int = option(2048, "tokens of a text", least=256)


class Promises(Experiment):
    name, metric, rows, by = "promise", "kept", ("method",), "text_kind"
    columns = "bytes:.1%" + "".join(f" | {each}:.4f" for each in ("tried", "loss", "answers", "right", "full_right"))
    options: PromiseOptions

    def cells(self) -> list[Cell]:
        methods = [each.strip() for each in self.options.methods.split(",")]
        return [
            Cell(
                method,
                "",
                f"text={number}",
                seed,
                (*self.setting, ("text_kind", kind), ("tokens", self.options.tokens)),
            )
            for seed in self.seeds
            for kind in self.options.chosen_kinds
            for number in range(self.options.texts)
            for method in methods
        ]

    def check(self) -> None:
        self.options.require_room(self.tokenizer, self.seeds[0])

    def alike(self, cell: Cell) -> Hashable:
        return cell.sample, cell.seed, dict(cell.setting)["text_kind"]

    def measure(self, cells: list[Cell]) -> Iterator[tuple[Cell, Data]]:
        text = Text(self, cells[0])
        return apart(cells, lambda cell: text.outcome(cell.method))


class Text:
    """One text, what the full cache says of it, and questions."""

    def __init__(self, of: Promises, cell: Cell) -> None:
        self.model, self.tokenizer, options = of.model, of.tokenizer, of.options
        kind, number = dict(cell.setting)["text_kind"], int(cell.sample.rpartition("=")[2])
        text = options.made(self.tokenizer, kind, cell.seed, number)
        self.ids = document_ids(self.tokenizer, text.text).to(self.model.device)
        self.said = repeat_instruction(self.tokenizer).to(self.model.device)
        self.asks = text.asks[: options.questions]
        self.probes = Probes.drawn(self.ids, [], f"{cell.seed} report")

    @cached_property
    def full(self) -> tuple[Tensor, Tensor]:
        return self._told(self._read("full"))

    def _read(self, method: str) -> CompressedCache:
        cache = CompressedCache(self.model, method)
        prefill(self.model, self.ids, cache, instruction=self.said)
        return cache

    @torch.no_grad()
    def _told(self, cache: CompressedCache) -> tuple[Tensor, Tensor]:
        """Log-likelihoods of the passages [K], and of answers with whether they are right [questions, 2]."""
        said = self.probes.ask(cache, self.model, self.ids, self.said).passages[0]
        return said, torch.tensor(
            [told(self.model, self.tokenizer, cache, ask) for ask in self.asks], dtype=torch.float64
        )

    def outcome(self, method: str) -> Data:
        cache = self._read(method)
        promise = cache.promise
        assert promise is not None, f"{method} promises nothing; use rehearse:loss=2%"
        rung = promise.checked or next(rung for rung in promise.curve if rung.method == promise.kept)
        (said, answers), (full, full_answers) = self._told(cache), self.full
        lost = full - said
        return {
            "prompt_tokens": self.ids.shape[1], "promised": promise.loss, "chosen": promise.kept, "bytes": rung.bytes,
            "tried": rung.loss, "lookups_loss": rung.answers, "lookups": rung.asked,
            "lookups_lost": rung.lost, "probed": promise.probed,
            "loss": float(lost.mean()), "worst": float(lost.max()), "kept": float(lost.mean() <= promise.loss),
            "curve": promise.as_dict()["curve"], "full_nll": -float(full.mean()),
            "answers": float((full_answers - answers).mean(0)[0]), "right": float(answers.mean(0)[1]),
            "full_right": float(full_answers.mean(0)[1]), "asked": len(self.asks),
        }  # fmt: skip
