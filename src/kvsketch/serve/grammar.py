"""Answers that must follow a grammar: which tokens may come next, as llguidance finds them."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvsketch.lru import LRU
from kvsketch.serve.tools import CLOSE, OPEN

NEEDS = "needs the package llguidance on the server: pip install 'kvsketch[serve]'"
# Models may write spaces for ever where they are free to.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
PROTOTYPES = 64  # grammars that are kept as they were parsed
AT_ONCE = 4  # grammars that are parsed at the same time
LONGEST = 2**20  # characters of a grammar
STUCK = "it allows nothing to follow; a part of the schema has no value"


class Unsatisfiable(ValueError):
    """An answer came to a place where its grammar lets nothing follow."""


class Guide:
    """Follows one answer through its grammar."""

    def __init__(self, matcher: Any, vocabulary: int, stop_ids: frozenset[int]) -> None:
        self._matcher, self._vocabulary, self._stop_ids = matcher, vocabulary, stop_ids
        self.ended = False  # whether the answer is complete
        self.tokens = 0  # that it has
        self.error = ""  # why it does not follow the grammar; empty: it does

    def put(self, token: int) -> None:
        """The answer goes on; what comes after its end does not count, nor do numbers that are no token."""
        if self.ended or token < 0:
            return
        if token in self._stop_ids:
            self.ended = True
            return
        self.tokens += 1
        if not self._matcher.consume_token(token):
            self.error = self._matcher.get_error() or f"token {token} does not follow the grammar"
        self.ended = bool(self.error) or self._matcher.is_stopped()

    def allowed(self) -> Tensor:  # [vocabulary] bool
        """The tokens that may come next, on the host; all of them after the end."""
        if self.ended:
            return torch.ones(self._vocabulary, dtype=torch.bool)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            self.error = STUCK
        return torch.from_numpy(np.unpackbits(bits, bitorder="little", count=self._vocabulary).astype(bool))


class Grammars:
    """Grammars for the tokens of one model; `vocabulary`: how many logits it has."""

    def __init__(self, tokenizer: Any, vocabulary: int, stop_ids: frozenset[int]) -> None:
        self.tokenizer, self.vocabulary, self.stop_ids = tokenizer, vocabulary, stop_ids
        self._lock = threading.Lock()
        self._turn = threading.Semaphore(AT_ONCE)
        self._prototypes: LRU[str, Future[Any]] = LRU()

    def json(self, schema: dict[str, Any]) -> str:
        """The grammar of JSON that follows a JSON Schema."""
        return f"start: answer\nanswer: {_json(schema)}\n"

    def call(self, tools: Sequence[dict[str, Any]], answer: dict[str, Any] | None = None) -> str:
        """The grammar of a call of one of the tools, or else of JSON that follows the schema `answer`."""
        functions = [tool["function"] for tool in tools]
        call, line = " | ".join(f"call{i}" for i in range(len(tools))), json.dumps("\n")
        rules = [f"start: {self._tag(OPEN)} {line} ({call}) {line} {self._tag(CLOSE)}"]
        for i, function in enumerate(functions):
            head = json.dumps(f'{{"name": {json.dumps(function["name"])}, "arguments": ')
            rules += [
                f'call{i}: {head} arguments{i} "}}"',
                f"arguments{i}: {_json(function.get('parameters') or {'type': 'object'})}",
            ]
        if answer is not None:
            rules[0] += " | answer"
            rules.append(f"answer: {_json(answer)}")
        return "\n".join(rules) + "\n"

    def _tag(self, text: str) -> str:
        """A tag as the model writes it: as one token if it has one."""
        token = self.tokenizer.get_added_vocab().get(text)
        return json.dumps(text) if token is None else f"<[{token}]>"

    def guides(self, grammar: str) -> Callable[[], Guide]:
        """Makes one for each answer, in no time; ValueError names what is wrong with the grammar, ImportError what is
        missing.
        """
        if len(grammar) > LONGEST:
            raise ValueError(f"its grammar has {len(grammar):,} characters, and {LONGEST:,} is the most; send less")
        prototype = self._prototype(grammar)
        return lambda: Guide(prototype.deep_copy(), self.vocabulary, self.stop_ids)

    def _prototype(self, grammar: str) -> Any:
        """A grammar is parsed once, whoever asks for it; those that ask for others do not wait."""
        with self._lock:
            known = self._prototypes.get(grammar)
            result = self._prototypes.setdefault(grammar, known or Future())
            self._prototypes.use(grammar)
            self._prototypes.shrink(PROTOTYPES)
        if known is None:
            try:
                with self._turn:
                    result.set_result(self._parsed(grammar))
            except BaseException as error:
                result.set_exception(error)
                with self._lock:
                    self._prototypes.pop(grammar, None)
        return result.result()

    def _parsed(self, grammar: str) -> Any:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokens, grammar)
        if matcher.is_error():
            raise ValueError(matcher.get_error().strip().splitlines()[0])
        trial = matcher.deep_copy()
        trial.compute_bitmask()
        if trial.is_error():
            raise ValueError("no answer satisfies the schema")
        return matcher

    @functools.cached_property
    def _tokens(self) -> Any:
        import llguidance.hf

        return llguidance.hf.from_tokenizer(self.tokenizer, self.vocabulary, sorted(self.stop_ids) or None)


def _json(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': SPACING})}"
