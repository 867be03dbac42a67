"""A transcript that grows from question to question, held in one of three ways, and greedy answers to it.

    full        everything stays
    rehearse    finished spans, such as tool results, are compacted to shares of their tokens
    summary     a full cache; once the transcript is longer than `--summary-at` tokens, the model writes a summary of
                older turns, which takes their place, and what follows is read again

The transcript is matched by its tokens with what the cache has read, as `kvsketch serve` does.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kvsketch import CompressedCache, prefill
from kvsketch.methods import parse_method
from kvsketch.serve.chats import CHAT, Chats, common
from kvsketch.serve.spans import finished_spans, parse_shares
from kvsketch.serve.text import Template
from kvsketch_lab.evaluation.experiment import (
    Cell,
    ExperimentOptions,
    budgets_option,
    end_tokens,
    methods_option,
    model_option,
)
from kvsketch_lab.options import option

Data = dict[str, Any]
Message = dict[str, Any]
Tool = dict[str, Any]
FULL, SUMMARY = "full", "summary"


@dataclass
class TranscriptOptions(ExperimentOptions):
    model: str = model_option("qwen2.5-coder-0.5b")
    methods: str = methods_option(f"{FULL},{SUMMARY},{CHAT}")
    budgets: str = budgets_option("1/8")
    summary_at: int = option(4096, "tokens of a transcript that are summarised", least=256)
    summary_tokens: int = option(512, "tokens of a summary", least=32)

    @property
    def ways(self) -> list[tuple[str, str]]:
        """(method, budget) of every way to hold a transcript; ValueError for one that is not possible."""
        methods = [each.strip() for each in self.methods.split(",")]
        shares = [each.strip() for each in self.budgets.split(",")]
        for share in shares:
            shares_of(share)
        for method in methods:
            if method not in (FULL, SUMMARY) and not getattr(parse_method(method), "told", False):
                raise ValueError(
                    f"--methods: {method} compacts no spans; use {FULL}, {SUMMARY} or rehearse:wait=compact"
                )
        return [(method, share) for method in methods for share in (shares if method not in (FULL, SUMMARY) else [""])]

    def limits(self, method: str) -> tuple[tuple[str, Any], ...]:
        """What else identifies a way to hold a transcript."""
        at = (("summary_at", self.summary_at), ("summary_tokens", self.summary_tokens))
        return at if method == SUMMARY else ()


def shares_of(budget: str) -> dict[str, str]:
    """The shares of kinds of spans: 1/8 is that of tool results, tool=1/8+tools=1/2 that of tool schemas as well."""
    if not budget:
        return {}
    return parse_shares(budget.replace("+", ",") if "=" in budget else {"tool": budget}, "--budgets")


class Answer(NamedTuple):
    """An answer, the tokens that were read for it, and bytes and tokens of the cache that it was given from."""

    text: str
    prefill: int
    bytes: int
    tokens: int
    seconds: float


def columns(answers: Sequence[Answer]) -> Data:
    """What a record holds of the answers, a list for each number."""
    return {name: [getattr(each, name) for each in answers] for name in ("prefill", "bytes", "tokens", "seconds")}


@dataclass(frozen=True)
class Prologue:
    """What every turn of a transcript has in front of it, how the model is asked for a summary, and how many turns
    before the newest a summary leaves as they are.
    """

    system: Message
    tools: list[Tool]
    ask: str
    kept: int = 2


class ReadPrologues:
    """Caches that have read a system prompt and its tools, which many transcripts begin with; each goes on in a copy.

    Only those of the newest are held.
    """

    def __init__(self, model: Any, template: Template) -> None:
        self.model, self.template = model, template
        self.of: Prologue | None = None
        self._held: dict[str, tuple[list[int], CompressedCache]] = {}

    def copied(self, method: str, prologue: Prologue) -> tuple[list[int], CompressedCache]:
        """The tokens that all transcripts of a prologue begin with, and a cache that has read them."""
        if prologue != self.of:
            self.of, self._held = prologue, {}
        if method not in self._held:
            ids = self._ids(prologue)
            cache = CompressedCache(self.model, method)
            prefill(self.model, torch.tensor([ids], device=self.model.device), cache)
            self._held[method] = ids, cache
        ids, cache = self._held[method]
        return ids, copy.deepcopy(cache)

    def _ids(self, prologue: Prologue) -> list[int]:
        one, other = (
            self.template.chat([prologue.system, {"role": "user", "content": said}], prologue.tools)
            for said in ("one", "2")
        )
        return one[: common(one, other)]


class Transcript:
    """One transcript with one way to hold it."""

    def __init__(
        self, model: Any, template: Template, cell: Cell, prologue: Prologue, options: TranscriptOptions
    ) -> None:
        self.model, self.template, self.prologue, self.options = model, template, prologue, options
        self.summarises = cell.method == SUMMARY
        self.method = FULL if self.summarises else cell.method
        self.shares = shares_of(cell.budget)
        self.chats = self._no_chats()
        self.read: ReadPrologues | None = None
        self.messages: list[Message] = [prologue.system]
        self.begins: list[int] = []  # the first message of each turn
        self._prefilled = 0

    def begin(self, read: ReadPrologues) -> int:
        """Goes on from a cache that has read system prompt and tools; how many tokens these are."""
        self.read = read
        ids, cache = read.copied(self.method, self.prologue)
        self.chats = self._no_chats()
        self.chats.close(ids, cache, self.shares)
        return len(ids)

    def _no_chats(self) -> Chats:
        return Chats(lambda: CompressedCache(self.model, self.method))

    def turn(self, messages: Iterable[Message]) -> None:
        """Begins a turn with these messages."""
        self.begins.append(len(self.messages))
        self.messages += messages

    @torch.no_grad()
    def answer(self, most: int, ended: Callable[[int], bool] = lambda token: False, keep: bool = True) -> Answer:
        """The greedy answer to the transcript, of at most so many tokens, or up to one that `ended` says is the last.

        It is not added to the messages. The cache keeps its tokens for the next turn only with `keep`.
        """
        start, self._prefilled = time.perf_counter(), 0
        if self.summarises:
            self._summarise()
        text, held = self._said(self.messages, most, ended, keep)
        return Answer(text, self._prefilled, *held, time.perf_counter() - start)

    def _said(
        self, messages: Sequence[Message], most: int, ended: Callable[[int], bool], keep: bool
    ) -> tuple[str, tuple[int, int]]:
        """A greedy answer; bytes and tokens of the cache that it was given from."""
        ids = self.template.chat(messages, self.prologue.tools)
        cache, known = self.chats.open(ids, self.shares)
        device = self.model.device
        logits = prefill(self.model, torch.tensor([ids[known:]], device=device), cache)
        self._prefilled += len(ids) - known
        if self.shares:
            spans = finished_spans(self.template, messages, self.prologue.tools)
            self._prefilled += cache.compact(spans, self.shares, self.model, torch.tensor([ids], device=device))
        held = cache.device_bytes, cache.tokens_seen
        said: list[int] = []
        ends = {self.template.tokenizer.eos_token_id, *end_tokens(self.model)}
        while len(said) < most and (token := int(logits.argmax(-1))) not in ends:
            said.append(token)
            if ended(token):
                break
            out = self.model(torch.tensor([[token]], device=device), past_key_values=cache, use_cache=True)
            logits = out.logits[:, -1]
        self.chats.close([*ids, *said] if keep else ids, cache, self.shares)
        return str(self.template.tokenizer.decode(said, skip_special_tokens=True)).strip(), held

    def _summarise(self) -> None:
        """Lets the model write a summary of what lies before the last turns, once the transcript is too long."""
        ids = self.template.chat(self.messages, self.prologue.tools)
        recent = self.prologue.kept + 1
        if len(ids) <= self.options.summary_at or len(self.begins) <= recent:
            return
        first = self.begins[-recent]
        asked = [*self.messages[:first], {"role": "user", "content": self.prologue.ask}]
        summary, _ = self._said(asked, self.options.summary_tokens, lambda token: False, True)
        told = [
            {"role": "user", "content": f"What happened so far:\n{summary}"},
            {"role": "assistant", "content": "Understood."},
        ]
        shift = 1 + len(told) - first
        self.messages = [self.messages[0], *told, *self.messages[first:]]
        self.begins = [begin + shift for begin in self.begins[-recent:]]
        if self.read is not None:
            # A cache that goes back keeps its memory; a new one has none of what the summary took the place of.
            self.begin(self.read)
