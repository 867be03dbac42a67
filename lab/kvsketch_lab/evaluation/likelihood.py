"""How likely the reference answer is under a compressed cache: summaries by people, in nats per token.

    kvsketch eval likelihood --data DIR --tasks qmsum,gov_report_summ --model qwen2.5-coder-1.5b --bytes 1/8,1/16

A document is compressed before the request is known; then the request and the reference are read, and each token of the
reference gets its -log p and the divergence of its distribution from the full cache's.

    nll, full_nll    mean -log p of the reference's tokens, through the method and with the full cache
    kl               mean KL(full cache || method), in nats
    kl_largest       its largest values, for percentiles over all tokens of a table

`--data` is a folder with gov_report_summ.jsonl and news_summ.jsonl of OpenLMLab/LEval (LEval-data/Open-ended-tasks) and
qmsum.jsonl, which is data/ALL/jsonl/test.jsonl of Yale-LILY/QMSum. What a method compresses, and what it holds, is
read at once; a recall method reads token by token, because tokens that are read at once see all it holds.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvsketch import CompressedCache
from kvsketch.compare.shared_prefill import Prefilled
from kvsketch.methods import parse_method
from kvsketch_lab.evaluation.documents import Document, Item, TaskExperiment, TaskOptions, Wording, json_lines
from kvsketch_lab.evaluation.experiment import Cell
from kvsketch_lab.evaluation.next_token import largest, losses
from kvsketch_lab.evaluation.questions import FedQuestion
from kvsketch_lab.options import option

QMSUM = "qmsum"
TASKS = (QMSUM, "gov_report_summ", "news_summ")
WORDING = Wording("Answer in a few sentences.", "")


def read_meetings(folder: str) -> list[Document]:
    """QMSum's meetings with all their queries."""
    rows = json_lines(Path(folder) / f"{QMSUM}.jsonl", "copy data/ALL/jsonl/test.jsonl of QMSum there by that name")
    result = []
    for row in rows:
        said = "\n".join(f"{turn['speaker']}: {turn['content']}" for turn in row["meeting_transcripts"])
        asked = [*row["general_query_list"], *row["specific_query_list"]]
        result.append(Document(said, [Item(QMSUM, each["query"], each["answer"]) for each in asked]))
    return result


@dataclass
class LikelihoodOptions(TaskOptions):
    tasks: tuple[str, ...] = option(",".join(TASKS), "tasks, separated by commas", choices=TASKS)
    max_new_tokens: int = option(256, "tokens of a reference, its first ones", least=1)


class Likelihood(TaskExperiment):
    name = "likelihood"
    metric = "nll"
    source = "OpenLMLab/LEval, Yale-LILY/QMSum"
    options: LikelihoodOptions

    def __init__(self, options: LikelihoodOptions) -> None:
        super().__init__(options)
        if options.chunk or options.turns > 1:
            raise ValueError(
                "likelihood compares with an exact prefill, one question at a time; leave out --chunk and --turns"
            )
        self._full: dict[tuple[int, ...], Tensor] = {}

    def read_task(self, task: str) -> list[Document]:
        return read_meetings(self.options.data) if task == QMSUM else super().read_task(task)

    def wording(self, task: str) -> Wording:
        return WORDING

    def score(self, answer: str, expected: Any) -> float:
        raise NotImplementedError("a reference is read, nothing is generated")

    def measure(self, cells: list[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
        self._full.clear()
        yield from super().measure(cells)

    def _answers(
        self, prompts: Prefilled | dict[str, Tensor], rows: list[int], asked: list[FedQuestion], seed: int, size: int
    ) -> list[dict[str, Any]]:
        """The likelihood of each reference, text by text."""
        assert isinstance(prompts, Prefilled)
        result: dict[int, dict[str, Any]] = {}
        for row in rows:
            text, cache, facts = self._compressed(prompts.rows([row], unpadded=True), [0], asked[0].cells[0], seed)
            for at in (at for at, each in enumerate(asked) if each.row == row):
                result[at] = self._told(text, cache, asked[at]) | facts | asked[at].question.facts
        return [result[at] for at in range(len(asked))]

    @torch.no_grad()
    def _told(self, text: Prefilled, cache: CompressedCache, asked: FedQuestion) -> dict[str, Any]:
        ids = self.tokenizer(asked.question.expected, add_special_tokens=False)["input_ids"]
        reference = torch.tensor([ids[: self.options.max_new_tokens]], device=self.model.device)
        fed = torch.cat([reference.new_tensor([asked.after]), reference[:, :-1]], 1)
        key = (*asked.question.ids, *ids)
        if key not in self._full:
            self._full[key] = self._logits(text.cache("full"), fed, reference.shape[1]).log_softmax(-1)
        logits, full = self._logits(copy.deepcopy(cache), fed, reference.shape[1]), self._full[key]
        kl = (full.exp() * (full - logits.log_softmax(-1))).sum(-1)[0].clamp_min(0)
        return {
            "nll": float(losses(logits, reference).double().mean()),
            "full_nll": float(losses(full, reference).double().mean()),
            "kl": float(kl.double().mean()),
            "kl_largest": largest(kl),
            "tokens_scored": reference.shape[1],
            "prompt_tokens": len(asked.question.ids),
        }

    def _logits(self, cache: CompressedCache, fed: Tensor, last: int) -> Tensor:  # [1, last, V] float32
        """Logits after the last tokens of `fed` [1, n], read at once, or one by one where a query reads a part."""
        recalls = parse_method(str(cache.method)).family == "recall"
        parts = fed.split([fed.shape[1] - last + 1, *([1] * (last - 1))], 1) if recalls else [fed]
        logits = [self.model(part, past_key_values=cache, use_cache=True).logits[:, -last:] for part in parts]
        logits = [logits[0][:, -1:], *logits[1:]] if recalls else logits
        return torch.cat(logits, 1).float()
