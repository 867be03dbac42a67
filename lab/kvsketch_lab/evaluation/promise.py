"""Whether a promise of the loss holds: on passages that were not tried, and for answers about lines.

    kvsketch eval promise --model qwen2.5-coder-1.5b --texts held-out:50 --tokens 2048 --methods rehearse:loss=2%

A text is a speech, or so many lines as in LongEval (`--lines`). A method with a promise reads it and chooses its budget
by chunks that the model repeats. Then other passages of the text are repeated, between these chunks, and, of lines, the
numbers of some lines are asked for.

    bytes       share of a full cache; chosen: the method that was kept
    tried       loss of the chunks that decided, in nats by token, with the cache that was kept
    loss        loss of the other passages
    kept        1 where that is within the promise
    answers     loss of the answers' tokens, of lines
    right       share of answers whose every token is the argmax; full_right: with the full cache
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsketch.cache.compressed import CompressedCache
from kvsketch.cache.promise import LENGTH, chunks, likelihoods
from kvsketch.cache.streaming import prefill
from kvsketch.decode.asking import chat_frame, document_ids, repeat_instruction
from kvsketch.models import texts
from kvsketch_lab.evaluation import line_records, passages
from kvsketch_lab.evaluation.experiment import Cell, Experiment, ExperimentOptions, apart, methods_option, model_option
from kvsketch_lab.evaluation.lines import OPENING
from kvsketch_lab.options import option

Data = dict[str, Any]


@dataclass
class PromiseOptions(ExperimentOptions):
    model: str = model_option("qwen2.5-coder-0.5b")
    methods: str = methods_option("rehearse:loss=2%,rehearse:loss=10%")
    texts: str = passages.texts_option("held-out:4")
    tokens: int = option(2048, "tokens of a speech that are read", least=256)
    lines: int = option(0, "read texts of so many lines instead of speeches; 0: speeches", least=0)
    questions: int = option(8, "lines of each text that are asked for", least=1)


class Promises(Experiment):
    name, metric, rows = "promise", "kept", ("method",)
    columns = "bytes:.1%" + "".join(f" | {each}:.4f" for each in ("tried", "loss", "answers", "right", "full_right"))
    options: PromiseOptions

    @property
    def samples(self) -> list[str]:
        if self.options.lines:
            count = int(self.options.texts.removeprefix(passages.HELD_OUT))
            return [f"lines={self.options.lines} text={number}" for number in range(count)]
        return passages.names(self.options.texts)

    def cells(self) -> list[Cell]:
        setting = (*self.setting, ("tokens", 0 if self.options.lines else self.options.tokens))
        methods = [each.strip() for each in self.options.methods.split(",")]
        return [
            Cell(method, "", sample, seed, setting)
            for seed in self.seeds
            for sample in self.samples
            for method in methods
        ]

    def alike(self, cell: Cell) -> Hashable:
        return cell.sample, cell.seed

    def measure(self, cells: list[Cell]) -> Iterator[tuple[Cell, Data]]:
        text = Text(self, cells[0])
        return apart(cells, lambda cell: text.outcome(cell.method))


class Text:
    """One text, what the full cache says of it, and questions."""

    def __init__(self, of: Promises, cell: Cell) -> None:
        self.model, tokenizer, options = of.model, of.tokenizer, of.options
        self.said = repeat_instruction(tokenizer).to(self.model.device)
        self.questions: list[tuple[Tensor, Tensor]] = []
        if options.lines:
            number = int(cell.sample.rpartition("=")[2])
            records = [
                line_records.generate(options.lines, cell.seed, number, each) for each in range(options.questions)
            ]
            self.ids = document_ids(tokenizer, records[0].text).to(self.model.device)
            self.questions = [self._question(tokenizer, record) for record in records]
        else:
            self.ids = document_ids(tokenizer, texts.document(cell.sample))[:, : options.tokens].to(self.model.device)
        tried = chunks(self.ids.shape[1])
        # Passages of the same length in the middle between two chunks that decide.
        self.spans = [
            ((a + b) // 2, (a + b) // 2 + LENGTH)
            for (a, _), (b, _) in itertools.pairwise(tried) if b - a >= 2 * LENGTH
        ] or tried  # fmt: skip
        self.full, self.full_answers = self._told(self._read("full"))

    def _question(self, tokenizer: Any, record: Any) -> tuple[Tensor, Tensor]:
        asked = record.question + chat_frame(tokenizer).after + OPENING.format(name=record.name)
        return tuple(  # type: ignore[return-value]
            torch.tensor([tokenizer(part, add_special_tokens=False)["input_ids"]], device=self.model.device)
            for part in (asked, str(record.expected))
        )

    def _read(self, method: str) -> CompressedCache:
        cache = CompressedCache(self.model, method)
        prefill(self.model, self.ids, cache, instruction=self.said)
        return cache

    @torch.no_grad()
    def _told(self, cache: CompressedCache) -> tuple[Tensor, Tensor]:
        """Log-likelihoods of the passages [K], and of answers with whether they are right [questions, 2]."""
        said = likelihoods(cache, self.model, self.ids, self.said, self.spans)[0]
        answers = [self._answer(copy.deepcopy(cache), *each) for each in self.questions]
        return said, torch.tensor(answers, dtype=torch.float64).view(-1, 2)

    def _answer(self, cache: CompressedCache, asked: Tensor, answer: Tensor) -> tuple[float, float]:
        tokens = torch.cat([asked, answer[:, :-1]], 1)
        logits = self.model(tokens, past_key_values=cache, use_cache=True).logits[:, -answer.shape[1] :].double()
        told = logits.log_softmax(-1).gather(2, answer.unsqueeze(-1))
        return float(told.mean()), float((logits.argmax(-1) == answer).all())

    def outcome(self, method: str) -> Data:
        cache = self._read(method)
        promise = cache.promise
        assert promise is not None, f"{method} promises nothing; use rehearse:loss=2%"
        rung = next(rung for rung in promise.curve if rung.method == promise.kept)
        said, answers = self._told(cache)
        lost = float((self.full - said).mean())
        result: Data = {
            "prompt_tokens": self.ids.shape[1], "promised": promise.loss, "chosen": promise.kept, "bytes": rung.bytes,
            "tried": rung.loss, "loss": lost, "kept": float(lost <= promise.loss), "curve": promise.as_dict()["curve"],
            "full_nll": -float(self.full.mean()),
        }  # fmt: skip
        if len(answers):
            moved, right = (self.full_answers - answers).mean(0)[0], answers.mean(0)[1]
            result |= {
                "answers": float(moved),
                "right": float(right),
                "full_right": float(self.full_answers.mean(0)[1]),
            }
        return result
