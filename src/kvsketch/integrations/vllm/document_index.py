"""Documents that many requests continue: which are there, where, and who uses them. The scheduler's side.

A request whose parameters have `kvsketch_store` reads its prompt as a document of that name. Later requests name it
(`kvsketch_document`), and their prompt is what follows, or their prompt begins with its tokens. Each has one page of
its own for its own tokens alone. Documents lie in places of one size; one that nobody uses makes room for another, the
one that was used longest ago first. One that has a file is read from it when it is asked for again. Knows nothing of
vLLM.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvsketch.integrations.vllm.files import Filed
from kvsketch.lru import LRU
from kvsketch.plural import counted

STORE, NAME = "kvsketch_store", "kvsketch_document"
MIN_DOCUMENT_TOKENS = 64  # tokens of a document: codes need some to find their center


@dataclass
class Document:
    name: str
    place: int  # from 1 on
    tokens: int
    digest: str | None  # of its tokens; None: it can only be named
    since: int  # how many had a place until it came to its own
    read: bool  # whether all of it was read


@dataclass(frozen=True)
class Use:
    """How a request continues a document."""

    place: int = 0  # 0: it continues none
    before: int = 0  # tokens of the document that vLLM counts as the request's own
    ahead: int = 0  # positions that its tokens stand behind those that vLLM gives them

    @property
    def tokens(self) -> int:
        """Of the document."""
        return self.before or self.ahead


@dataclass(frozen=True)
class Stored:
    """A prompt that is about to be read as a document."""

    place: int
    path: Path | None = None  # of the file that keeps it
    digest: str = ""


@dataclass
class DocumentIndex:
    """`count` places, and the documents in files."""

    count: int
    files: dict[str, Filed] = field(default_factory=dict)
    documents: LRU[str, Document] = field(default_factory=LRU)  # requests use them
    loads: dict[int, Path] = field(default_factory=dict)  # places, and the files that are to be read into them
    placed: int = 0  # documents that have had a place

    def use(self, request: str, prompt: Sequence[int], name: str | None) -> Use:
        """How a request continues the document that it names, or the longest that its prompt begins with.

        KeyError or ValueError, in one line, for a name that is not there, or has no place to be read to.
        """
        known: dict[str, Document | Filed] = {**self.files, **self._in_order()}
        if name is not None and name not in known:
            raise KeyError(f"no document {name!r} is stored; documents: {', '.join(known) or 'none'}")
        whole = name is None or self._begins(prompt, known[name])
        if name is None:
            fitting = [each for each in known if self._begins(prompt, known[each])]
            if not fitting:
                return Use()
            name = max(fitting, key=lambda each: known[each].tokens)
        document = self.documents.get(name) or self._loaded(name)
        self.documents.use(name, request)
        return Use(document.place, document.tokens if whole else 0, 0 if whole else document.tokens)

    @staticmethod
    def _begins(prompt: Sequence[int], document: Document | Filed) -> bool:
        """Whether a prompt has the tokens of a document and at least one more."""
        return len(prompt) > document.tokens and digest(prompt[: document.tokens]) == document.digest

    def _loaded(self, name: str) -> Document:
        """A document that is read from its file before the next forward."""
        filed = self.files[name]
        document = self._placed(name, filed.tokens, filed.digest, read=True)
        self.loads[document.place] = filed.path
        return document

    def store(self, request: str, name: str, prompt: Sequence[int]) -> Document:
        """A place for a prompt that is about to be read as a document.

        ValueError, in one line, where there is none.
        """
        if len(prompt) < MIN_DOCUMENT_TOKENS:
            raise ValueError(
                f"a document of {len(prompt)} tokens is too short; {MIN_DOCUMENT_TOKENS} or more can be stored"
            )
        if users := self.documents.users(name):
            in_use = counted(len(users), "request")
            raise ValueError(f"document {name!r} is in use by {in_use}; store it under another name")
        self.documents.pop(name, None)
        document = self._placed(name, len(prompt), digest(prompt), read=False)
        self.loads.pop(document.place, None)
        self.documents.use(name, request)
        return document

    def _placed(self, name: str, tokens: int, digest: str | None, read: bool) -> Document:
        """A document in a place that is free, or that of the one that was used longest ago and that nobody uses."""
        self.documents.shrink(self.count - 1)
        free = {*range(1, self.count + 1)} - {document.place for document in self.documents.values()}
        if not free:
            raise ValueError(f"all {self.count} documents are in use; give the connector a larger count")
        self.placed += 1
        document = self.documents[name] = Document(name, min(free), tokens, digest, self.placed, read)
        return document

    def version(self, place: int) -> int | None:
        """Tells a document from others that had its place; None: there is none."""
        return next((each.since for each in self.documents.values() if each.place == place), None)

    def release(self, request: str) -> None:
        """The request has ended."""
        self.documents.release(request)

    def is_reading(self, prompt: Sequence[int], name: str | None) -> bool:
        """Whether a request continues a document that is being read: it waits until that is there."""
        reading = [each for each in self.documents.values() if not each.read]
        return any(self._begins(prompt, each) if name is None else each.name == name for each in reading)

    def stored(self, name: str) -> None:
        """All of a document was read."""
        if name in self.documents:
            self.documents[name].read = True

    def drop(self, name: str) -> None:
        """A document that did not come to be."""
        self.documents.pop(name, None)
        self.files.pop(name, None)

    def clear(self, running: set[str]) -> list[str]:
        """Forgets the documents that none of these requests reads; returns the names of those without a file."""
        gone = [name for name in self._in_order() if not self.documents.users(name) & running]
        for name in gone:
            self.loads.pop(self.documents.pop(name).place, None)
        return [name for name in gone if name not in self.files]

    def _in_order(self) -> dict[str, Document]:
        """Documents as they came to their places."""
        return dict(sorted(self.documents.items(), key=lambda each: each[1].since))


def digest(tokens: Sequence[int]) -> str:
    return hashlib.sha256(array("q", tokens).tobytes()).hexdigest()
