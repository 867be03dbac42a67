"""What the full cache's own long answers cost under a compressed cache, in nats per token.

    kvsketch eval long-answers --data test.jsonl --model qwen2.5-coder-0.5b --texts 64 --problems 2 --bytes 1/4

The full cache answers problems of GSM8K (`gsm8k`), greedily and once. Each method then gets this answer token by token,
as if it had said it, and compresses it as it comes. No method errs because of an earlier error, so each token tells:

    cost         -log p of the answer's tokens, less that with the full cache; of its second half `late_cost`
    same         share of tokens that are the most likely one too
    share_after  share of a full cache's bytes at the end of the answer; `share_during`: the mean over its tokens

All caches of some prompts read a token in one forward (`abreast.py`). Prompts of a batch are of about the same length,
and line breaks before the problems make it the same, so that none is padded.
`--bytes` is a share of a full cache of prompt and answer, which a method that drops tokens is sized for; bytes are
those of a 16-bit model. The rules of `protected.py` are methods here, such as kvsketch_lab.evaluation.protected:Prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsketch import CompressedCache
from kvsketch.cache.overview import full_bytes
from kvsketch.compare import budgets
from kvsketch.compare.shared_prefill import Prefilled, shared_prefill
from kvsketch.models import encode_chat
from kvsketch.slots.codes import PlainSlots
from kvsketch_lab import records
from kvsketch_lab.evaluation.abreast import Abreast
from kvsketch_lab.evaluation.experiment import (
    Cell,
    ExperimentOptions,
    cache_seed,
    end_tokens,
    failure,
    records_path,
    text_sha256,
)
from kvsketch_lab.evaluation.gsm8k import ProblemExperiment, text_of
from kvsketch_lab.evaluation.next_token import losses
from kvsketch_lab.lists import grouped
from kvsketch_lab.options import option
from kvsketch_lab.records import FAILED

FULL = "full"
PROTECTED = "kvsketch_lab.evaluation.protected"
METHODS = (
    "full:key_bits=3:value_bits=2",
    "h2o:bits=4",
    "rehearse:wait=64",
    "rehearse:wait=16",
    *(f"{PROTECTED}:{rule}:wait=16" for rule in ("Prompt", "Even", "Values", "Random")),
    f"{PROTECTED}:Window:bits=4",
)


@dataclass
class LongAnswersOptions(ExperimentOptions):
    methods: str = option(",".join(METHODS), "methods beside the full cache, separated by commas")
    bytes: str | None = option("1/4", "shares of the full cache's bytes, separated by commas")
    data: str = option("", "GSM8K's test.jsonl")
    texts: int = option(64, "prompts, of the file's first problems", least=1)
    problems: int = option(2, "problems of a prompt", least=1)
    max_new_tokens: int = option(160, "tokens of an answer, at most", least=4)
    batch: int = option(6, "prompts read together", least=1)


class LongAnswers(ProblemExperiment):
    name = "long-answers"
    metric = "cost"
    form = ".3f"
    columns = (
        "second half=late_cost:.3f | same token=same:.1% | bytes, end=share_after:.1% | bytes, mean=share_during:.1%"
    )
    options: LongAnswersOptions

    def prompt(self, sample: str) -> str:
        """The text of `prompt=3`."""
        return text_of(self.prompts[int(sample.partition("=")[2])])

    @property
    def contenders(self) -> list[tuple[str, str]]:
        """The full cache first: it answers."""
        return [(FULL, ""), *(each for each in super().contenders if each != (FULL, ""))]

    @property
    def setting(self) -> tuple[tuple[str, Any], ...]:
        own = ("problems", self.options.problems), ("max_new_tokens", self.options.max_new_tokens)
        return (*super().setting, *own)

    def cells(self) -> list[Cell]:
        samples = [f"prompt={number}" for number in range(len(self.prompts))]
        return [
            Cell(method, budget, sample, seed, self.setting)
            for seed in self.seeds
            for sample in samples
            for method, budget in self.contenders
        ]

    def groups(self) -> Iterable[list[Cell]]:
        """Prompts of about the same length are padded little."""
        for cells in grouped(self.cells(), lambda cell: cell.seed).values():
            by = grouped(cells, lambda cell: cell.sample)
            samples = sorted(by, key=lambda sample: len(self.prompt(sample)))
            size = self.options.batch
            batches = [samples[start : start + size] for start in range(0, len(samples), size)]
            # The first batch is of the usual length, so that an interrupted run tells as much as it can.
            for batch in sorted(batches, key=lambda batch: abs(batches.index(batch) - len(batches) // 2)):
                yield [cell for sample in batch for cell in by[sample]]

    def check(self) -> None:
        cache = CompressedCache(self.model)
        if len(cache.slot_layers) < len(cache.layers):
            raise ValueError(
                f"{self.options.model}: its sliding-window or linear layers are not compressed, and long-answers reads "
                "all caches in one forward; use a model of full attention alone"
            )

    def measure(self, cells: list[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
        samples = list(dict.fromkeys(cell.sample for cell in cells))
        ids = self.aligned([encode_chat(self.tokenizer, self.prompt(s))["input_ids"][0].tolist() for s in samples])
        prompts = shared_prefill(self.model, torch.tensor(ids))
        answers = self._answers(samples, prompts, cells[0].seed)
        facts = [
            {"prompt_tokens": len(own), "answer_tokens": len(said), "text_sha256": text_sha256(self.prompt(sample))}
            for own, said, sample in zip(ids, answers, samples, strict=True)
        ]
        named = dict(zip(samples, facts, strict=True))
        for cell in (cell for cell in cells if cell.method == FULL):
            said = answers[samples.index(cell.sample)]
            told = {"answer_ids": said, "answer": self.tokenizer.decode(said, skip_special_tokens=True)}
            nothing = {"cost": 0.0, "late_cost": 0.0, "same": 1.0, "share_after": 1.0, "share_during": 1.0}
            yield cell, told | nothing | named[cell.sample]
        caches, outcomes = self._caches(prompts, [cell for cell in cells if cell.method != FULL], answers)
        for cell, outcome in outcomes:
            yield cell, outcome
        if not caches:
            return
        fed = Fed.of(prompts, [cache for cache, _, _ in caches], answers)
        for number, (_, own, facts_of_budget) in enumerate(caches, 1):
            for cell in own:
                yield cell, fed.outcome(number, samples.index(cell.sample)) | facts_of_budget | named[cell.sample]

    def aligned(self, prompts: list[list[int]]) -> list[list[int]]:
        """The prompts with line breaks behind what they have in common, as many as the longest is longer."""
        line_break = self.tokenizer("\n", add_special_tokens=False)["input_ids"]
        shared = next((at for at, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1), 0)
        longest = max(map(len, prompts))
        return [[*ids[:shared], *line_break[:1] * (longest - len(ids)), *ids[shared:]] for ids in prompts]

    def _answers(self, samples: list[str], prompts: Prefilled, seed: int) -> list[list[int]]:
        """The full cache's answers, those of an earlier run where it made them."""
        wanted = {name: value for name, value in self.setting if name != "budgets_in"}
        known = {
            record["data"]["sample"]: record["data"]["answer_ids"]
            for record in records.read(records_path(self))
            if "answer_ids" in record["data"] and record["seed"] == seed
            and all(record["data"].get(name) == value for name, value in wanted.items())
        }  # fmt: skip
        if any(sample not in known for sample in samples):
            ends = end_tokens(self.model)
            tokens = prompts.generate(prompts.cache(FULL), self.options.max_new_tokens).tolist()
            known = dict(zip(samples, (_until_end(row, ends) for row in tokens), strict=True))
        return [known[sample] for sample in samples]

    def _caches(
        self, prompts: Prefilled, cells: list[Cell], answers: list[list[int]]
    ) -> tuple[list[tuple[CompressedCache, list[Cell], dict[str, Any]]], list[tuple[Cell, dict[str, Any]]]]:
        """A cache with its cells for each method at each budget, and the outcomes of those that cannot be had."""
        caches, failed = [], list[tuple[Cell, dict[str, Any]]]()
        width, more = prompts.input_ids.shape[1], max(map(len, answers)) - 1
        for (method, budget), own in grouped(cells, lambda cell: (cell.method, cell.budget)).items():
            seed = cache_seed(own[0].seed, own[0].sample)
            try:
                text, facts = budgets.sized(
                    self.model, method, budget, width, self.options.budgets_in, more, halves=True
                )
                cache = prompts.cache(text, seed)
            except Exception as error:
                failed += [(cell, failure(error)) for cell in own]
                continue
            facts.pop("measured_as", None)
            caches.append((cache, own, facts | ({"cache_seed": seed} if cache.method.random else {})))
        return caches, failed


def _until_end(tokens: list[int], ends: list[int]) -> list[int]:
    """The tokens up to the first that ends an answer, which is part of it."""
    end = next((at for at, token in enumerate(tokens, 1) if token in ends), len(tokens))
    return tokens[:end]


def half_bytes(cache: CompressedCache) -> int:
    """Bytes of a cache as if its model were of 16 bits."""
    plain = [each for layer in cache.slot_layers for each in (layer.table.keys, layer.table.values)]
    wide = [slots.read for slots in plain if isinstance(slots, PlainSlots) and slots.read.dtype == torch.float32]
    return cache.device_bytes - sum(tensor.nbytes for tensor in wide) // 2


class Fed:
    """What caches abreast, the full one first, said of the tokens of answers that they were fed.

    Legend: C caches, B prompts, n tokens of the longest answer but for its first, which the prompt predicts.
    """

    def __init__(self, nll: Tensor, same: Tensor, shares: Tensor, lengths: list[int]) -> None:
        self.nll, self.same = nll, same  # [C, B, n]
        self.shares = shares  # [C, n], of the bytes of a full cache, once the token is read
        self.lengths = lengths  # of what is scored of each answer

    @classmethod
    @torch.no_grad()
    def of(cls, prompts: Prefilled, caches: list[CompressedCache], answers: list[list[int]]) -> Fed:
        """Feeds the answers to the full cache and to these."""
        model, abreast = prompts.model, Abreast([prompts.cache(FULL), *caches])
        count, width = len(abreast.caches), max(map(len, answers))
        tokens = torch.tensor([each + each[-1:] * (width - len(each)) for each in answers], device=model.device)
        nll, same = (torch.zeros(count, len(answers), width - 1) for _ in range(2))
        shares = torch.zeros(count, width - 1)
        for at in range(width - 1):
            output = model(tokens[:, at : at + 1].repeat(count, 1), past_key_values=abreast, use_cache=True)
            logits, following = output.logits[:, -1], tokens[:, at + 1].repeat(count)
            nll[:, :, at] = losses(logits, following).view(count, -1).cpu()
            same[:, :, at] = (logits.argmax(-1) == following).view(count, -1).cpu()
            held = [half_bytes(cache) for cache in abreast.caches]
            shares[:, at] = torch.tensor(held) / (full_bytes(abreast.caches[0].layers) * 2 / model.dtype.itemsize)
        return cls(nll, same, shares, [len(each) - 1 for each in answers])

    def outcome(self, cache: int, row: int) -> dict[str, Any]:
        """What a record says of one answer under one cache."""
        scored = self.lengths[row]
        if scored < 2:
            return {FAILED: "ValueError: the full cache's answer has fewer than three tokens"}
        nll, full = (self.nll[which, row, :scored].double() for which in (cache, 0))
        beyond, shares = nll - full, self.shares[cache, :scored].double()
        return {
            "cost": round(float(beyond.mean()), 6),
            "late_cost": round(float(beyond[scored // 2 :].mean()), 6),
            "same": round(float(self.same[cache, row, :scored].double().mean()), 6),
            "nll": round(float(nll.mean()), 6),
            "full_nll": round(float(full.mean()), 6),
            "full_same": round(float(self.same[0, row, :scored].double().mean()), 6),
            "tokens_scored": scored,
            "share_after": round(float(shares[-1]), 6),
            "share_during": round(float(shares.mean()), 6),
        }
