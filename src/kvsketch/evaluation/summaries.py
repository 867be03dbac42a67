"""ROUGE of summaries against the share of the cache that is kept (Keyformer, figures 7 and 8).

    kvsketch eval summaries --data cnn_dailymail.jsonl --methods full,h2o,keyformer,streamingllm --beams 4

--data is a file of JSON lines, each with an article and a reference summary (--article-field, --reference-field). The
model is asked for a summary of each article, cut so that the prompt has at most --max-prompt tokens; ROUGE-1, ROUGE-2
and ROUGE-L are the F measures of the package rouge-score, with stemming. The defaults are those of the paper's code
for CNN/DailyMail but for the beams, of which it uses 4. All beams share the budget's rule, each with slots of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from rich.table import Table

from kvsketch.cache import CompressedCache
from kvsketch.evaluation.budgets import text_form
from kvsketch.evaluation.experiment import Cell, Experiment, failure
from kvsketch.evaluation.experiment import main as run_experiment
from kvsketch.evaluation.identity import text_sha256
from kvsketch.evaluation.longbench_encoding import chat_parts
from kvsketch.evaluation.longbench_metrics import optional
from kvsketch.evaluation.shared_prefill import memory
from kvsketch.evaluation.statistics import mean, mean_text
from kvsketch.methods import parse_method

ROUGE = ("rouge1", "rouge2", "rougeL")
INSTRUCTION = "Summarize the following news article."
FORMS = ("alpaca", "chat", "plain")


class Article(NamedTuple):
    text: str
    reference: str


def read_articles(path: str, article_field: str, reference_field: str) -> list[Article]:
    """The articles of a file of JSON lines."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"--data {path} is no file; give JSON lines with an article and its summary in each")
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{file}, line {number} is not JSON ({error.msg})") from None
        for option, name in (("--article-field", article_field), ("--reference-field", reference_field)):
            if not isinstance(row, dict) or not isinstance(row.get(name), str):
                have = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                raise ValueError(f"{file}, line {number} has no text {name!r} but: {have}; name the field by {option}")
        found.append(Article(row[article_field], row[reference_field]))
    if not found:
        raise ValueError(f"{file} holds no article")
    return found


def prompt_parts(tokenizer: Any, form: str, instruction: str) -> tuple[str, str]:
    """What stands before and after the article: Alpaca's headings, the model's chat template, or the instruction."""
    if form == "alpaca":
        return f"### Instruction:\n{instruction}\n\n### Input:\n", "\n\n### Response:\n"
    if form == "chat":
        before, after = chat_parts(tokenizer)
        if not (before or after):
            raise ValueError("--form chat: this model has no chat template; use --form alpaca or plain")
        return f"{before}{instruction}\n\n", after
    return f"{instruction}\n\n", "\n\nSummary:"


def encode(tokenizer: Any, article: str, form: str, instruction: str, max_prompt: int) -> tuple[torch.Tensor, bool]:
    """Token ids [1, n] of the prompt, and whether the end of the article was cut off to fit `max_prompt`."""
    before, after = prompt_parts(tokenizer, form, instruction)
    # A chat template writes its own special tokens.
    head = list(tokenizer(before, add_special_tokens=form != "chat")["input_ids"])
    tail = list(tokenizer(after, add_special_tokens=False)["input_ids"])
    body = list(tokenizer(article, add_special_tokens=False)["input_ids"])
    room = max_prompt - len(head) - len(tail)
    if room < 1:
        raise ValueError(f"--max-prompt {max_prompt} has no room for an article; use more than {len(head) + len(tail)}")
    return torch.tensor([[*head, *body[:room], *tail]]), len(body) > room


class Summaries(Experiment):
    name: ClassVar[str] = "summaries"
    metric: ClassVar[str] = "rouge2"
    default_methods: ClassVar[str] = "full,keyformer,h2o,streamingllm"
    default_budgets: ClassVar[str] = "20%,30%,40%,50%,60%,70%,80%,90%"

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--data", required=True, help="file of JSON lines with articles and summaries")
        add("--article-field", default="article", help="name of the field with the text")
        add("--reference-field", default="highlights", help="name of the field with the summary")
        add("--form", choices=FORMS, default="alpaca", help="form of the prompt")
        add("--instruction", default=INSTRUCTION, help="what the model is asked to do")
        add("--max-prompt", type=int, default=1920, help="most tokens of a prompt; articles are cut at their end")
        add("--min-new-tokens", type=int, default=30)
        add("--max-new-tokens", type=int, default=128)
        add("--beams", type=int, default=1, help="1 is greedy")

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        if not 0 <= options.min_new_tokens <= options.max_new_tokens or options.max_new_tokens < 1:
            raise ValueError(
                f"--min-new-tokens {options.min_new_tokens} and --max-new-tokens {options.max_new_tokens} do not fit: "
                "use 0 <= min <= max and max >= 1"
            )
        if options.beams < 1:
            raise ValueError(f"--beams {options.beams} is too few; use 1 (greedy) or more")

    @cached_property
    def articles(self) -> dict[str, Article]:
        options = self.options
        found = read_articles(options.data, options.article_field, options.reference_field)
        # Named by content as well, so that records of another file of the same length are not taken for these.
        return {f"{i} {text_sha256(a.text + a.reference)[:12]}": a for i, a in enumerate(found)}

    def groups(self) -> Iterable[list[Cell]]:
        """The cells of one article."""
        names = ("form", "instruction", "max_prompt", "min_new_tokens", "max_new_tokens", "beams")
        setting = (*self.setting, *((name, getattr(self.options, name)) for name in names))
        for sample in self.articles:
            yield [
                Cell(method, budget, sample, seed, setting)
                for method, budget in self.contenders
                for seed in (self.seeds if parse_method(method).random else self.seeds[:1])
            ]

    def cells(self) -> list[Cell]:
        return [cell for group in self.groups() for cell in group]

    def open(self) -> None:
        rouge("", "")
        super().open()

    def measure(self, cells: list[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
        options, article = self.options, self.articles[cells[0].sample]
        ids, cut = encode(self.tokenizer, article.text, options.form, options.instruction, options.max_prompt)
        known = {"prompt_tokens": ids.shape[1], "truncated": cut}
        for cell in cells:
            try:
                outcome = self._outcome(cell, ids.to(self.model.device), article)
            except Exception as error:
                outcome = failure(error)
            yield cell, {**known, **outcome}

    def _outcome(self, cell: Cell, ids: torch.Tensor, article: Article) -> dict[str, Any]:
        options = self.options
        method, facts = text_form(self.model, cell.method, cell.budget, ids.shape[1], options.budgets_in)
        cache = CompressedCache(self.model, method, seed=cell.seed)
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            do_sample=False,
            num_beams=options.beams,
            min_new_tokens=options.min_new_tokens,
            max_new_tokens=options.max_new_tokens,
        )
        summary = self.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip()
        return {**rouge(summary, article.reference), "answer": summary, **facts, **memory(cache)}

    def table(self, data: list[dict[str, Any]]) -> Table:
        found = Table(title="summaries: ROUGE F, percent, with 95% intervals")
        for column in ("method", "budget", *ROUGE, "articles", "failed", "tokens stored", "of full bytes"):
            found.add_column(column, justify="left" if column in ("method", "budget") else "right")
        rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for each in data:
            rows.setdefault((each["method"], each["budget"]), []).append(each)
        for (method, budget), cells in rows.items():
            right = [each for each in cells if self.metric in each]
            found.add_row(
                method,
                budget,
                *(mean_text([100 * each[name] for each in right], digits=1) for name in ROUGE),
                str(len(right)),
                str(len(cells) - len(right)),
                f"{mean([each['tokens_stored'] for each in right]):,.0f}" if right else "-",
                f"{mean([each['device_bytes'] / each['full_bytes'] for each in right]):.1%}" if right else "-",
            )
        return found


def rouge(summary: str, reference: str) -> dict[str, float]:
    """F measures of ROUGE-1, ROUGE-2 and ROUGE-L, in [0, 1]."""
    scorer = optional("rouge_score.rouge_scorer", "rouge-score").RougeScorer(list(ROUGE), use_stemmer=True)
    return {name: float(found.fmeasure) for name, found in scorer.score(reference, summary).items()}


def main(arguments: list[str] | None = None) -> int:
    return run_experiment(Summaries, arguments)


if __name__ == "__main__":
    sys.exit(main())
