"""Facts of texts of seven kinds, asked for after compression: right answers, and how likely they are.

    kvsketch eval facts --model qwen2.5-coder-1.5b --kinds keys,code,prose --texts 5 --tokens 2048 --bytes 1/8,1/16

A text is of one of seven kinds (`text_kinds`), with as many facts as fill `--tokens`. It is read once; every method
compresses a copy, and each question and the answer that is right go through a copy of that cache, in one forward.

    score    1 where every token of the answer is the model's first choice, as a greedy answer would have it
    nll      nats per token of the answer: tells caches apart where few questions are asked
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsketch import CompressedCache
from kvsketch.compare import budgets
from kvsketch.compare.budgets import UNITS
from kvsketch.compare.shared_prefill import memory, shared_prefill
from kvsketch.decode.asking import chat_frame, document_ids, repeat_instruction
from kvsketch_lab.evaluation import text_kinds
from kvsketch_lab.evaluation.experiment import (
    Cell,
    Experiment,
    ExperimentOptions,
    apart,
    budgets_option,
    cache_seed,
    failure,
    methods_option,
    model_option,
    text_sha256,
)
from kvsketch_lab.lists import grouped
from kvsketch_lab.options import Options, option


@dataclass
class FactOptions(Options):
    """Which texts of facts an experiment makes."""

    kinds: tuple[str, ...] = option("all", "kinds of texts, comma-separated", choices=("all", *text_kinds.KINDS))
    texts: int = option(4, "texts of each kind and seed", least=1)
    tokens: int = option(2048, "tokens of a text", least=128)
    questions: int = option(8, "facts of each text that are asked for", least=1)

    @property
    def chosen_kinds(self) -> list[str]:
        return [*text_kinds.KINDS] if "all" in self.kinds else [*self.kinds]

    def made(self, tokenizer: Any, kind: str, seed: int, number: int) -> text_kinds.Text:
        """Text `number` of a kind with as many facts as fit, at least as many as are asked for."""
        result = text_kinds.fill(
            kind, seed, number, self.tokens, lambda text: document_ids(tokenizer, text).shape[1]
        )  # fmt: skip
        if len(result.asks) < self.questions:
            raise ValueError(
                f"--tokens {self.tokens} hold {len(result.asks)} facts of {kind}, and --questions {self.questions} "
                "asks for more; use more tokens, or fewer questions"
            )
        return result

    def require_room(self, tokenizer: Any, seed: int) -> None:
        """Raises ValueError where a kind of texts has no room for the facts that are asked for."""
        for kind in self.chosen_kinds:
            self.made(tokenizer, kind, seed, 0)


class Told(NamedTuple):
    """What a cache makes of the answer that is right."""

    log_likelihood: float  # mean over its tokens, in nats
    right: bool  # every token is the model's first choice


@torch.no_grad()
def told(model: Any, tokenizer: Any, cache: CompressedCache, ask: text_kinds.Ask) -> Told:
    """Asks a copy of the cache, behind whose text the question comes."""

    def tokens(text: str) -> Tensor:
        return torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]], device=model.device)

    before = tokens(ask.question + chat_frame(tokenizer).after + ask.opening)
    answer = tokens(ask.answer)
    ids = torch.cat([before, answer[:, :-1]], 1)
    logits = model(ids, past_key_values=copy.deepcopy(cache), use_cache=True).logits[:, -answer.shape[1] :].double()
    said = logits.log_softmax(-1).gather(2, answer.unsqueeze(-1))
    return Told(float(said.mean()), bool((logits.argmax(-1) == answer).all()))


@dataclass
class FactsOptions(FactOptions, ExperimentOptions):
    model: str = model_option("qwen2.5-coder-0.5b")
    methods: str = methods_option("full,full:bits=4,rehearse")
    budgets: str = budgets_option("1/8,1/16")
    budgets_in: str = option("bytes", "what is equal across methods", choices=UNITS)


class Facts(Experiment):
    name, by = "facts", "text_kind"
    columns = "nll:.3f | " + Experiment.columns
    options: FactsOptions

    def cells(self) -> list[Cell]:
        options = self.options
        samples = itertools.product(options.chosen_kinds, range(options.texts), range(options.questions))
        return [
            Cell(
                method,
                budget,
                f"kind={kind} text={text} question={question}",
                seed,
                (*self.setting, ("text_kind", kind), ("tokens", options.tokens)),
            )
            for seed, (kind, text, question) in itertools.product(self.seeds, samples)
            for method, budget in self.contenders
        ]

    def check(self) -> None:
        self.options.require_room(self.tokenizer, self.seeds[0])

    def alike(self, cell: Cell) -> Hashable:
        return cell.seed, cell.text

    @functools.cached_property
    def said(self) -> Tensor:
        return repeat_instruction(self.tokenizer).to(self.model.device)

    def measure(self, cells: list[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
        first = cells[0]
        text = self.options.made(self.tokenizer, first["text_kind"], first.seed, int(first.parts["text"]))
        prefilled = shared_prefill(self.model, document_ids(self.tokenizer, text.text).to(self.model.device))
        prefilled.instruction = self.said
        length = prefilled.input_ids.shape[1]
        for (method, budget), own in grouped(cells, lambda cell: (cell.method, cell.budget)).items():
            try:
                sized, known = budgets.sized(self.model, method, budget, length, self.options.budgets_in)
                cache = prefilled.cache(sized, cache_seed(first.seed, first.text))
            except Exception as error:
                yield from ((cell, failure(error)) for cell in own)
                continue
            known |= {"prompt_tokens": length, **memory(cache)}
            yield from apart(own, functools.partial(self._answer, text, cache, known))

    def _answer(
        self, text: text_kinds.Text, cache: CompressedCache, known: dict[str, Any], cell: Cell
    ) -> dict[str, Any]:
        ask = text.asks[int(cell.parts["question"])]
        result = told(self.model, self.tokenizer, cache, ask)
        identity = {"expected": ask.answer, "text_sha256": text_sha256(text.text + ask.question)}
        return {"score": float(result.right), "nll": -result.log_likelihood, **known, **identity}
