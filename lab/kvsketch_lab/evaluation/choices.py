"""What experiments share that ask which of some choices is right: the likelihoods of the choices decide.

    answer        the choice that is most likely behind the question and the opening of its answer
    choice_nll    -log of the right choice's likelihood among the choices: it tells more than right or wrong where a
                  model is near chance

Nothing is generated: one forward over the question answers it.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import Any, cast

import torch

from kvsketch import CompressedCache
from kvsketch.compare.shared_prefill import Prefilled
from kvsketch_lab.evaluation.documents import DocumentExperiment, DocumentOptions, Item
from kvsketch_lab.evaluation.questions import FedQuestion


class ChoiceExperiment(DocumentExperiment):
    """Questions about documents with a few choices each; `choices` names them, in the words of an answer."""

    options: DocumentOptions

    @abstractmethod
    def choices(self, task: str) -> list[str]:
        """How the answers of a task may begin, behind its opening."""

    def expected(self, item: Item) -> dict[str, str]:
        return {"task": item.task, "answer": item.answer}

    def score(self, answer: str, expected: Any) -> float:
        return float(answer == expected["answer"])

    def _answers_apart(
        self, texts: Prefilled, cache: CompressedCache, rows: list[int], asked: list[FedQuestion], size: int
    ) -> list[tuple[str, dict[str, Any]]]:
        result = []
        for number, each in enumerate(asked):
            own = cache if number == len(asked) - 1 else copy.deepcopy(cache)
            read = texts
            if len(texts.input_ids) > 1:
                own.batch_select_indices(torch.tensor([rows.index(each.row)], device=self.model.device))
                read = texts.rows([rows.index(each.row)])
            ids = torch.tensor([each.after], dtype=torch.long) if each.after else None
            task, right = (str(each.question.expected[name]) for name in ("task", "answer"))
            known = self.choices(task)
            likely = read.next_logits(own, ids)[0].double()[self._tokens(task)].log_softmax(-1)
            nll = -float(likely[known.index(right)])
            result.append((known[int(likely.argmax())], {"choice_nll": round(nll, 6)}))
        return result

    def _tokens(self, task: str) -> list[int]:
        """The first token of each choice behind the opening of its task."""
        opening = self.wording(task).opening
        begun = self.tokenizer(opening, add_special_tokens=False)["input_ids"]
        whole = [self.tokenizer(opening + each, add_special_tokens=False)["input_ids"] for each in self.choices(task)]
        tokens = [cast(int, ids[len(begun)]) for ids in whole]
        if len(set(tokens)) < len(tokens) or any(ids[: len(begun)] != begun for ids in whole):
            raise ValueError(
                f"the choices {', '.join(self.choices(task))} do not differ in their first token after {opening!r} "
                f"with the tokenizer of {self.options.model}; use another model"
            )
        return tokens
