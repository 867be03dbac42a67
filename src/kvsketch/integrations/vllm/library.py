"""Documents that many requests continue: which are there, where, and who uses them. The scheduler's side.

A request whose parameters have `kvsketch_store` reads its prompt as a document of that name. Later requests name it
(`kvsketch_document`), and their prompt is what follows, or their prompt begins with its tokens. Each has one page of
its own for its own tokens alone. Documents lie in places of one size; one that nobody uses makes room for another, the
one that was used longest ago first. Knows nothing of vLLM.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

STORE, NAME = "kvsketch_store", "kvsketch_document"
LEAST = 64  # tokens of a document: codes need some to find their center


@dataclass
class Document:
    name: str
    place: int  # from 1 on
    tokens: int
    digest: bytes
    users: set[str] = field(default_factory=set)
    used: int = 0  # when, by the library's own count


@dataclass(frozen=True)
class Use:
    """How a request continues a document."""

    place: int = 0  # 0: it continues none
    before: int = 0  # tokens of the document that vLLM counts as the request's own
    turn: int = 0  # positions that its tokens stand behind those that vLLM gives them


@dataclass
class Library:
    """`count` places."""

    count: int
    documents: dict[str, Document] = field(default_factory=dict)
    clock: int = 0

    def use(self, request: str, prompt: Sequence[int], name: str | None) -> Use:
        """How a request continues the document that it names, or the longest that its prompt begins with.

        KeyError, in one line, for a name that is not there.
        """
        if name is not None and name not in self.documents:
            known = ", ".join(self.documents) or "none"
            raise KeyError(f"no document {name!r} is stored; documents: {known}")
        if name is not None:
            document = self.documents[name]
            whole = self._begins(prompt, document)
        else:
            fitting = [d for d in self.documents.values() if self._begins(prompt, d)]
            if not fitting:
                return Use()
            document, whole = max(fitting, key=lambda d: d.tokens), True
        self._touch(document)
        document.users.add(request)
        return Use(document.place, document.tokens if whole else 0, 0 if whole else document.tokens)

    @staticmethod
    def _begins(prompt: Sequence[int], document: Document) -> bool:
        """Whether a prompt has the tokens of a document and at least one more."""
        return len(prompt) > document.tokens and digest(prompt[: document.tokens]) == document.digest

    def store(self, request: str, name: str, prompt: Sequence[int]) -> Document:
        """A place for a prompt that is about to be read as a document.

        ValueError, in one line, where there is none.
        """
        if len(prompt) < LEAST:
            raise ValueError(f"a document of {len(prompt)} tokens is too short; {LEAST} or more can be stored")
        old = self.documents.get(name)
        if old is not None and old.users:
            raise ValueError(f"document {name!r} is in use by {len(old.users)} requests; store it under another name")
        if old is not None:
            del self.documents[name]
        free = {*range(1, self.count + 1)} - {document.place for document in self.documents.values()}
        if not free:
            idle = [document for document in self.documents.values() if not document.users]
            if not idle:
                raise ValueError(f"all {self.count} documents are in use; give the connector a larger count")
            oldest = min(idle, key=lambda document: document.used)
            del self.documents[oldest.name]
            free = {oldest.place}
        document = Document(name, min(free), len(prompt), digest(prompt), {request})
        self._touch(document)
        self.documents[name] = document
        return document

    def forget(self, name: str) -> None:
        """The document was not stored after all."""
        self.documents.pop(name, None)

    def release(self, request: str) -> None:
        """The request has ended."""
        for document in self.documents.values():
            document.users.discard(request)

    def _touch(self, document: Document) -> None:
        self.clock += 1
        document.used = self.clock


def digest(tokens: Sequence[int]) -> bytes:
    return hashlib.sha256(array("q", tokens).tobytes()).digest()
