"""A model behind an endpoint: what a request means, which engine answers it, and how much it may ask for."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from kvsketch.cache.compressed import CompressedCache
from kvsketch.methods import Method
from kvsketch.serve.anthropic_schema import CountRequest, MessagesRequest
from kvsketch.serve.caches import WHOLE
from kvsketch.serve.documents import DocumentStore, NotReady, Unknown
from kvsketch.serve.doubtful import Retries
from kvsketch.serve.engine import BatchedEngine
from kvsketch.serve.grammar import NEEDS, Grammars, Guide
from kvsketch.serve.metrics import Metrics
from kvsketch.serve.requests import Closed, Compaction, Full, Request, Ticket, unused_settings
from kvsketch.serve.responses import Responses
from kvsketch.serve.schema import (
    DEFAULT_NEW_TOKENS,
    AnswerRequest,
    ApiError,
    ChatRequest,
    CompletionRequest,
    ResponseRequest,
    did_you_mean,
)
from kvsketch.serve.spans import APART, finished, turn_ends
from kvsketch.serve.summary import full_cache_bytes
from kvsketch.serve.text import GrowingText, Template
from kvsketch.serve.tools import Calls
from kvsketch.serve.truncation import shortened
from kvsketch.slots.positions import CACHE

BETWEEN = "@"  # model@document, for clients that cannot send a field of their own
SOON = 2  # seconds until a document that is being read is asked about again
LONGEST_RETRY = 60
ANSWER_SECONDS = 3600.0  # that an answer may take
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
)  # of requests and of generation settings
log = logging.getLogger("kvsketch.serve")


@dataclass
class Choice:
    """One of the texts that a request asked for, while it grows."""

    index: int
    ticket: Ticket
    text: GrowingText
    calls: Calls | None = None  # where tools are offered
    tokens: int = 0  # that became text


@dataclass
class Prompt:
    """What is read before an answer: a document that a cache has read, and messages."""

    ids: list[int]  # of the messages
    messages: list[dict[str, Any]]
    document: CompressedCache | None
    again: str | None = None  # the document that a doubtful answer is asked again of

    @property
    def tokens_before(self) -> int:
        return 0 if self.document is None else self.document.tokens_seen

    @property
    def tokens(self) -> int:
        return self.tokens_before + len(self.ids)


@dataclass
class Answer:
    """An accepted request, and the texts that grow from its prompts."""

    asked: AnswerRequest
    choices: list[Choice]
    id: str
    created: int
    seconds: float = ANSWER_SECONDS  # that it may take, from the request to the last token

    @property
    def prompt_tokens(self) -> int:
        """Those of a prompt count once, however many texts continue it."""
        return sum(choice.ticket.prompt_tokens for choice in self.choices[:: self.asked.n or 1])

    @property
    def cached_tokens(self) -> int:
        """Those of them that were not read: of a document, or of earlier turns of a chat."""
        return sum(choice.ticket.cached_tokens for choice in self.choices[:: self.asked.n or 1])

    @property
    def tokens(self) -> int:
        return sum(choice.tokens for choice in self.choices)

    @property
    def doubt(self) -> float:
        """That of the text of which the model was least sure."""
        return round(max(choice.ticket.doubt or 0.0 for choice in self.choices), 4)

    def cancel(self) -> None:
        for choice in self.choices:
            choice.ticket.cancel()

    def expire(self) -> None:
        """Ends it with an error, whatever the engine does."""
        message = (
            f"the answer took longer than {self.seconds:g} s, the most that this server gives one; ask for fewer "
            "tokens, try again when it has less to do, or start it with more --answer-seconds"
        )
        for choice in self.choices:
            choice.ticket.finish("error", ApiError(504, message, "answer_timeout"))
        self.cancel()


class Service:
    """Everything a server holds beside its connections.

    answer_seconds: how long an answer may take, its wait in the queue included; then it ends with an error.
    span_shares: how small spans of chats become, by their kind (`spans`); empty: they stay as the method keeps them.
    retries: what asks doubtful answers about documents again; None: they are answers as others.
    """

    def __init__(
        self,
        engine: BatchedEngine,
        documents: DocumentStore,
        context: int,
        *,
        answer_seconds: float = ANSWER_SECONDS,
        span_shares: Mapping[str, str] | None = None,
        retries: Retries | None = None,
    ) -> None:
        self.retries = retries
        self.engine, self.documents, self.context = engine, documents, context
        self.model, self.tokenizer = documents.model, documents.tokenizer
        self.name, self.method = documents.name, documents.method
        self.answer_seconds, self.span_shares = answer_seconds, dict(span_shares or {})
        self.template = Template(self.tokenizer)
        self.grammars = Grammars(self.tokenizer, self.model.get_output_embeddings().weight.shape[0], self._ends())
        self.created = int(time.time())
        if unused := unused_settings(self.model):
            log.warning("generation settings of %s that are not applied: %s", self.name, unused)
        self.responses = Responses()
        self.metrics = Metrics(engine.state, lambda: Counter(each.status for each in documents.documents()))
        self._mean_seconds = 1.0
        self.stopping = False
        """Whether what can be broken off should be."""

    # requests

    def chat(self, asked: ChatRequest, prefix: str = "chatcmpl-") -> Answer:
        """Starts the answer to a conversation; ApiError where that cannot be."""
        prompt = self._prompt(asked)
        self._room(asked, prompt.ids, prompt.document)
        compaction = self._compaction(asked, prompt)
        turns = self._turns(asked, prompt) if compaction is None else ()
        own = {"document": prompt.document, "guide": self._guide(asked), "compaction": compaction, "turns": turns}
        answer = self._start(asked, [prompt.ids], prefix, again=prompt.again, **own)
        if asked.offered:
            names = {tool["function"]["name"] for tool in asked.offered}
            for choice in answer.choices:
                choice.calls = Calls(names, one=asked.parallel_tool_calls is False)
        return answer

    def _prompt(self, asked: ChatRequest) -> Prompt:
        """What a conversation has the model read."""
        model, _, suffix = asked.model.partition(BETWEEN)
        self._require_model(model)
        number = asked.document or suffix or None
        messages = [message.plain() for message in asked.messages]
        document = None if number is None else self._cache(number)
        write = self.template.chat if number is None else self.template.after_document
        try:
            # A reader of calls may end an answer before its tokens do, and its doubt would be another one.
            compressed = document is not None and str(document.method) != WHOLE
            again = number if self.retries is not None and compressed and not asked.offered else None
            prompt = Prompt(write(messages, asked.offered), messages, document, again)
            if not asked.may_be_shortened or prompt.tokens + (asked.limit or 1) <= self.context:
                return prompt
            # An answer of the usual length has room behind what is left.
            new = asked.limit or min(DEFAULT_NEW_TOKENS, self.context // 4)
            room = self.context - prompt.tokens_before - new
            left = shortened(messages, lambda some: len(write(some, asked.offered)) <= room)
            return prompt if left is None else Prompt(write(left, asked.offered), left, document, again)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, str(error), "invalid_messages", "messages") from None

    def _compaction(self, asked: ChatRequest, prompt: Prompt) -> Compaction | None:
        """What becomes of the spans of a chat; None: it is no chat that goes on in its cache."""
        own = None if asked.kvsketch is None else asked.kvsketch.spans
        if own and prompt.document is not None:
            raise ApiError(
                400, "spans of a chat about a document stay as they are; leave out kvsketch.spans or the document",
                "invalid_value", "kvsketch",
            )  # fmt: skip
        shares = self.span_shares if own is None else own
        if not shares or prompt.document is not None:
            return None
        spans, places, end = finished(self.template, prompt.messages, asked.offered)
        return Compaction(spans, shares, places, end or None)

    def _turns(self, asked: ChatRequest, prompt: Prompt) -> tuple[int, ...]:
        """Where the turns of a chat end, so that later ones go on in what was read up to there; none behind a document,
        which is not read again anyway.
        """
        if prompt.document is not None or not self.engine.chats_go_on or len(prompt.ids) <= APART:
            return ()
        try:
            ends = turn_ends(self.template, prompt.messages, asked.offered)
        except (ValueError, TypeError, RecursionError):
            return ()  # the template refuses other words in place of these
        return tuple(end for end in ends if end < len(prompt.ids))

    def response(self, asked: ResponseRequest) -> Answer:
        """The same for the newer endpoint."""
        before = asked.previous_response_id
        return self.chat(asked.chat(() if before is None else self.responses.messages(before)), "resp_")

    def message(self, asked: MessagesRequest) -> Answer:
        """The same for Anthropic's endpoint."""
        return self.chat(asked.chat(), "msg_")

    def count(self, asked: CountRequest) -> int:
        """The tokens of a conversation, those of its document included."""
        return self._prompt(asked.chat()).tokens

    def _guide(self, asked: ChatRequest) -> Callable[[], Guide] | None:
        """What follows the grammar that an answer is to have; None: it is free."""
        wanted = None if asked.response_format is None else asked.response_format.wanted
        if wanted is None and not asked.demanded:
            return None
        param = "tool_choice" if asked.demanded else "response_format"
        tools = asked.demanded or asked.offered
        try:
            if tools:
                grammar = self.grammars.call(tools, None if asked.demanded else wanted)
            else:
                grammar = self.grammars.json(wanted or {})
            return self.grammars.guides(grammar)
        except ImportError:
            raise ApiError(400, f"{param} {NEEDS}", "unsupported_parameter", param) from None
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"{param}: {error}", "invalid_value", param) from None

    def completion(self, asked: CompletionRequest) -> Answer:
        """Starts the continuation of a text."""
        self._require_model(asked.model)
        self._require_places(len(asked.prompts) * (asked.n or 1))
        most = self.model.get_input_embeddings().num_embeddings
        prompts = [self.template.plain(each) if isinstance(each, str) else each for each in asked.prompts]
        if not all(0 <= token < most for ids in prompts for token in ids):
            raise ApiError(400, f"prompt: token ids must be from 0 to {most - 1}", "invalid_value", "prompt")
        return self._start(asked, prompts, "cmpl-")

    def _start(
        self, asked: AnswerRequest, prompts: list[list[int]], prefix: str, again: str | None = None, **own: Any
    ) -> Answer:
        """Starts `asked.n` texts for each of the prompts; `own`: fields of their requests; `again`: the document of
        which the full cache is asked what is in doubt.
        """
        self._require_places(len(prompts) * (asked.n or 1))
        requests = [self._request(asked, number, ids, **own) for ids in prompts for number in range(asked.n or 1)]
        tickets = self._submit_all(requests)
        if self.retries is not None and again is not None:
            tickets = self.retries.watch(tickets, again, asked.stops)
        choices = [
            Choice(index, ticket, GrowingText(self.tokenizer, asked.stops)) for index, ticket in enumerate(tickets)
        ]
        return Answer(asked, choices, prefix + uuid4().hex, int(time.time()), self.answer_seconds)

    def _request(
        self, asked: AnswerRequest, number: int, ids: list[int], document: CompressedCache | None = None, **own: Any
    ) -> Request:
        """What the engine is to do for the text with this number of a prompt; each draws from a seed of its own."""
        room = self._room(asked, ids, document)
        return Request(
            tuple(ids),
            min(room, DEFAULT_NEW_TOKENS) if asked.limit is None else asked.limit,
            seed=None if asked.seed is None else (asked.seed + number) % 2**63,
            stop_ids=self._ends(),
            document=document,
            logprobs=asked.alternatives,
            doubt=True,
            **own,
            **self._usual()
            | {name: getattr(asked, name) for name in SAMPLING_FIELDS if getattr(asked, name) is not None},
        )

    def _room(self, asked: AnswerRequest, ids: list[int], document: CompressedCache | None) -> int:
        """Tokens that an answer to a prompt can have; ApiError where they are fewer than it asks for, or none."""
        param = "messages" if isinstance(asked, ChatRequest) else "prompt"
        if not ids:
            raise ApiError(400, "the prompt is empty", "invalid_value", param)
        before, limit = 0 if document is None else document.tokens_seen, asked.limit
        room = self.context - before - len(ids)
        if room < (limit or 1):
            told = f"{before + len(ids):,} tokens" + (f", {before:,} of them the document's" if before else "")
            raise ApiError(
                400, f"the prompt has {told}; with {limit or 1:,} new ones they exceed this server's {self.context:,}",
                "context_length_exceeded", param,
            )  # fmt: skip
        return room

    def _require_places(self, texts: int) -> None:
        state = self.engine.state()
        if texts > (most := state.rows + state.queue):
            raise ApiError(400, f"{texts} texts at once; this server has {most} places", "invalid_value", "n")

    def _submit_all(self, requests: list[Request]) -> list[Ticket]:
        """All of them, or none."""
        tickets: list[Ticket] = []
        try:
            for request in requests:
                tickets.append(self._submit(request))
        except ApiError:
            for ticket in tickets:
                ticket.cancel()
            raise
        return tickets

    def _submit(self, request: Request) -> Ticket:
        try:
            return self.engine.submit(request)
        except Full as error:
            wait = max(1, min(LONGEST_RETRY, round(self._mean_seconds)))
            raise ApiError(429, f"{error}; try again in {wait} s", "queue_full", retry_after=wait) from None
        except Closed:
            raise ApiError(503, "the server is stopping", "stopping", retry_after=SOON) from None
        except ValueError as error:
            raise ApiError(400, str(error), "invalid_value") from None

    def note(self, answer: Answer) -> None:
        """An answer has ended: its times count."""
        for choice in answer.choices:
            self.metrics.note(choice.ticket)
        seconds = time.monotonic() - answer.choices[0].ticket.timings.submitted
        self._mean_seconds += 0.2 * (seconds - self._mean_seconds)

    def _require_model(self, name: str) -> None:
        if name != self.name:
            raise ApiError(
                404, f"there is no model {name!r}; this server has {self.name!r}{did_you_mean(name, [self.name])}",
                "model_not_found", "model",
            )  # fmt: skip

    def _usual(self) -> dict[str, Any]:
        """How requests that do not say it choose their tokens: as the model's generation settings do."""
        config = self.model.generation_config
        names = SAMPLING_FIELDS if config.do_sample else ("repetition_penalty",)
        usual = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
        return {"temperature": 1.0, **usual}

    def _ends(self) -> frozenset[int]:
        own, end = self.model.generation_config.eos_token_id, self.tokenizer.eos_token_id
        return frozenset(int(each) for each in (*(own if isinstance(own, list) else [own]), end) if each is not None)

    # documents

    def _cache(self, number: str) -> CompressedCache:
        try:
            return self.documents.cache(number)
        except Unknown as error:
            raise ApiError(404, str(error), "document_not_found", "document") from None
        except NotReady as error:
            raise ApiError(409, str(error), "document_not_ready", "document", retry_after=SOON) from None
        except (ValueError, OSError) as error:
            raise ApiError(409, str(error), "document_unusable", "document") from None

    def models(self) -> list[dict[str, Any]]:
        """The model, and once more with each document that is ready."""
        plain, own = {"object": "model", "owned_by": "kvsketch"}, str(self.method)
        result: list[dict[str, Any]] = [{"id": self.name, "name": self.name, "created": self.created, **plain}]
        result[0] |= {"method": own, "context": self.context, "whole_below": self.documents.whole_below}
        ready = [each for each in self.documents.documents() if each.status == "ready"]
        files = Counter(each.name for each in ready)
        for each in ready:
            # Chat programs show names; the same file may be there once more, read by another method.
            twin = each.name and files[each.name] > 1 and each.method != own
            name = (each.name or each.id) + (f" ({each.method})" if twin else "")
            about = {"id": f"{self.name}{BETWEEN}{each.id}", "name": name, "created": each.created_at}
            result.append({**about, **plain, "document": each.id, "method": each.method})
        return result

    def close(self, drain: bool = True) -> None:
        """Answers what was accepted with `drain`, then stops."""
        self.stopping = True
        self.documents.close()
        self.engine.close(drain)
        if self.retries is not None:
            self.retries.close()


def longest_context(model: Any, method: Method, memory: int | None) -> int:
    """Tokens of a prompt and its answer: those that the model was trained on and that `memory` bytes hold."""
    trained = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**20
    if method.read_positions == CACHE:
        trained = 2**31
    if memory is None:
        return int(trained)
    # A prompt is held whole while it is read.
    fits = memory // max(1, full_cache_bytes(model, 1))
    if fits < 64:
        raise ValueError(f"memory of {memory:,} bytes holds {fits} tokens of this model's cache; give it more")
    return int(min(trained, fits))
