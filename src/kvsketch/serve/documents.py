"""Documents: read and compressed once, in the background, kept on disk, asked about as often as wanted.

    FOLDER/doc-1234.../document.json    name, method, model, number of tokens
                       text.txt         what is read
                       places.json      the first character and the name of each page, where there are pages
                       held.json        what its cache holds, once it is read
                       cache.kvs        the cache (`cache.save`); with it the document is ready

A document's folder appears under its name in one step, its cache too. Whatever moment a process is killed at, the next
one finds whole documents, and reads again those without a cache. Several servers may share a folder: a lock says who
reads a document, and the operating system frees it when a process dies.

The id of a document is made of its text, pages, model and method: the same file again is the same document. Links in
the folder are not followed: what is behind one is no document.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import queue
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_type_hints

import psutil
from filelock import FileLock, Timeout
from pydantic import ConfigDict, TypeAdapter

from kvsketch.cache import interrupted
from kvsketch.cache.compressed import CompressedCache
from kvsketch.cache.memory import in_tokens
from kvsketch.cache.saving import sealed_file
from kvsketch.cache.streaming import prefill
from kvsketch.decode import captured
from kvsketch.decode.asking import document_ids, repeat_instruction
from kvsketch.defaults import CHUNK
from kvsketch.lru import LRU
from kvsketch.methods import Method, parse_method
from kvsketch.methods.rehearse import Rehearse, with_replay
from kvsketch.models.files import is_plain_file, place, read_json, remove, write_json
from kvsketch.serve import summary
from kvsketch.serve.caches import WHOLE, GivenUp, WatchedCache
from kvsketch.serve.requests import Full, not_finite

ID = re.compile(r"doc-[0-9a-f]{24}")
WORK = re.compile(r"\.(new|gone)-doc-[0-9a-f]{24}\.(?P<host>.+)\.(?P<process>\d+)")
MOST_WAITING = 64  # documents
MOST_BYTES = 4 * 10**9  # of caches that are at hand
LOOK_AGAIN = 1.0  # seconds until a document that another process reads is looked at again
# The fields of a Document that lie in document.json, and in held.json.
FACTS = ("id", "name", "created_at", "model", "method", "tokens", "characters")
HELD_FACTS = ("seconds", "tokens_stored", "device_bytes", "host_bytes", "full_bytes", "slots", "promise")
Status = Literal["waiting", "reading", "ready", "failed", "other_model"]
log = logging.getLogger("kvsketch.serve")


class Unknown(LookupError):
    """There is no such document."""


class NotReady(RuntimeError):
    """The document is not read yet, or could not be."""


@dataclass(frozen=True)
class Document:
    """What is known of a document; the last fields are those of a ready one."""

    id: str
    name: str
    created_at: int
    model: str
    method: str
    tokens: int
    characters: int
    status: Status = "waiting"
    tokens_read: int = 0
    error: str | None = None
    seconds: float | None = None
    tokens_stored: int | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    full_bytes: int | None = None
    slots: list[list[int]] | None = None
    promise: str | None = None  # of the loss, and the curve that was tried
    note: str | None = None  # what the reader of its text should know
    object: str = "document"


PLACES = TypeAdapter(list[tuple[int, str]])
KINDS = {
    name: TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))
    for name, kind in get_type_hints(Document).items()
}


@dataclass
class _Reading:
    """A document that this process reads or is about to read."""

    cache: WatchedCache | None = None
    tokens_read: int = 0
    cancelled: bool = False
    error: str | None = None


def _content(path: Path) -> dict[str, Any]:
    """What a file says; nothing for a link."""
    return {} if path.is_symlink() else dict(read_json(path))


def _facts(content: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The facts of a file that are of their kinds, so that they can be written into an answer."""
    result = {}
    for name in names:
        with contextlib.suppress(KeyError, ValueError):
            fact = KINDS[name].validate_python(content[name])
            str(fact).encode()  # half of a surrogate pair is no text
            result[name] = fact
    return result


class DocumentStore:
    """The documents in a folder, for one model; `method` compresses those that name no other, and of these the ones of
    fewer than `whole_below` tokens are kept whole.
    """

    def __init__(
        self,
        folder: Path,
        model: Any,
        tokenizer: Any,
        method: str | Method,
        *,
        name: str = "",
        most_tokens: int | None = None,
        most_bytes: int = MOST_BYTES,
        prefill: str = "exact",
        chunk: int = CHUNK,
        whole_below: int = 0,
    ) -> None:
        self.folder, self.model, self.tokenizer, self.name = folder, model, tokenizer, name
        self.method, self.most_tokens, self.most_bytes = in_tokens(method, model), most_tokens, most_bytes
        self.whole_below = whole_below
        self._options: dict[str, Any] = {"prefill": prefill, "chunk": chunk}
        empty = WatchedCache(model, self.method, **self._options)
        self.identity = empty.identity.describe(empty.head_share)
        self._differences: Callable[[dict[str, Any]], list[str]] = empty.identity.differences
        self._lock = threading.RLock()
        self._reading: dict[str, _Reading] = {}
        self._loaded: LRU[str, CompressedCache] = LRU(size=lambda cache: cache.device_bytes)
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        # Documents are their owner's business.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (folder / ".locks").is_symlink():
            (folder / ".locks").unlink()
        (folder / ".locks").mkdir(exist_ok=True)
        self._remove_leftovers()
        for document in self.documents():
            if document.status == "waiting":
                self._start(document.id)
        self._reader = threading.Thread(target=self._work, name="kvsketch-reader", daemon=True)
        self._reader.start()

    # what is there

    def documents(self) -> list[Document]:
        """All documents of the folder, the oldest first."""
        result = []
        for path in self.folder.iterdir():
            if ID.fullmatch(path.name):
                with contextlib.suppress(Unknown):
                    result.append(self.get(path.name))
        return sorted(result, key=lambda each: (each.created_at, each.id))

    def get(self, number: str) -> Document:
        """A document as it is at this moment; Unknown where there is none."""
        path = self._path(number)
        content = _content(path / "document.json")
        facts = _facts(content, FACTS)
        whole = not path.is_symlink() and is_plain_file(path / "text.txt")
        if not whole or len(facts) < len(FACTS) or facts["id"] != number:
            # No file, or one that lacks what every document has.
            raise Unknown(f"there is no document {number!r}; GET /v1/documents lists them")
        document = Document(**facts, **_facts(content, ("note",)))
        identity: Any = content.get("identity", {})
        if is_plain_file(path / "cache.kvs"):
            held_facts = _facts(_content(path / "held.json"), HELD_FACTS)
            document = replace(document, **{**held_facts, "status": "ready", "tokens_read": document.tokens})
        if identity != self.identity:
            return replace(document, status="other_model", error=self._other(number, identity))
        reading = self._reading.get(number)
        if document.status == "ready" or reading is None or reading.cancelled:
            return document
        status: Status = "failed" if reading.error else "waiting" if reading.cache is None else "reading"
        return replace(document, status=status, tokens_read=reading.tokens_read, error=reading.error)

    def text(self, number: str) -> str:
        self.get(number)
        return (self._path(number) / "text.txt").read_text(encoding="utf-8")

    def cache(self, number: str) -> CompressedCache:
        """The cache that has read a document, never to be changed by others. NotReady while there is none."""
        document = self.get(number)
        if document.status == "other_model":
            raise ValueError(document.error)
        if document.status == "failed":
            raise NotReady(f"document {number} could not be read: {document.error}; delete it and send it again")
        if document.status != "ready":
            raise NotReady(
                f"document {number} is being read: {document.tokens_read} of {document.tokens} tokens; ask again soon"
            )
        with self._lock:
            if number not in self._loaded:
                self._hold(number, WatchedCache.load(self._path(number) / "cache.kvs", self.model))
            return self._loaded.use(number)

    def passages(self, number: str) -> list[list[int]]:
        """Which passages of the text the cache holds (`summary.passages`)."""
        return summary.passages(self.tokenizer, self.text(number), self.cache(number))

    def places(self, number: str) -> list[tuple[int, str]]:
        """Where the pages of a document begin: [first character, name] of each."""
        self.get(number)
        path = self._path(number) / "places.json"
        try:
            return PLACES.validate_python(_content(path).get("places", []))
        except ValueError:
            return []

    def _path(self, number: str) -> Path:
        if not ID.fullmatch(number):
            raise Unknown(f"{number!r} is no document id; GET /v1/documents lists them")
        return self.folder / number

    def _other(self, number: str, identity: dict[str, Any]) -> str:
        try:
            words = "; ".join(self._differences(identity)).encode("utf-8", "backslashreplace").decode()
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
            words = "its description cannot be read"
        return f"document {number} belongs to another model: {words or 'it differs'}. Send its text to this server too"

    def _hold(self, number: str, cache: CompressedCache) -> None:
        """Keeps a cache at hand; those not asked for longest leave when there are too many bytes."""
        self._loaded[number] = cache
        self._loaded.shrink(self.most_bytes, but=[number])

    def written(self, method: str) -> str:
        """A method that a client names as this server writes it, with tokens for a share of bytes and the replay of the
        server; if it cannot be had, as it was sent.
        """
        try:
            return str(self._named(method))
        except ValueError:
            return method

    def _named(self, method: str) -> Method:
        # A client names a method; it does not make the server import one, nor open a file.
        parsed = parse_method(method, importing=False)
        if isinstance(self.method, Rehearse):
            parsed = with_replay(method, parsed, self.method.replay)
        return in_tokens(parsed, self.model)

    # what changes

    def add(
        self,
        text: str,
        name: str = "",
        method: str | None = None,
        places: Sequence[tuple[int, str]] = (),
        note: str | None = None,
    ) -> Document:
        """Takes a text and starts to read it; a text that is there already costs nothing. ValueError for one that
        cannot be read, Full when too many wait. `places` and `note`: those of a file (`files.FileText`).
        """
        chosen = self.method if method is None else self._named(method)
        if method is not None and (file := getattr(chosen, "map", "")):
            raise ValueError(f"map={file} names a file of the server; leave it out")
        if not text.strip():
            raise ValueError("the document is empty; there is nothing to ask about")
        if "\0" in text:
            raise ValueError("the document is not text; send the text itself, or a file in a form")
        tokens = document_ids(self.tokenizer, text).shape[1]
        if self.most_tokens is not None and tokens >= self.most_tokens:
            raise ValueError(f"the document has {tokens:,} tokens and this server reads up to {self.most_tokens:,}")
        if method is None and tokens < self.whole_below:
            chosen = parse_method(WHOLE)
        parts = [text, self.identity, chosen.full_text(), self._options, *([places] if places else [])]
        made_of = json.dumps(parts, sort_keys=True)
        number = "doc-" + hashlib.sha256(made_of.encode()).hexdigest()[:24]
        with self._lock:
            if not self.is_known(number):
                if sum(not each.error for each in self._reading.values()) >= MOST_WAITING:
                    raise Full(f"{MOST_WAITING} documents wait to be read")
                document = Document(number, name, int(time.time()), self.name, str(chosen), tokens, len(text))
                self._create(replace(document, note=note), chosen, text, places)
            if self.get(number).status in ("waiting", "failed"):
                self._start(number)
        return self.get(number)

    def is_known(self, number: str) -> bool:
        try:
            self.get(number)
        except Unknown:
            return False
        return True

    def delete(self, number: str) -> list[str]:
        """Removes a document, also while it is read, and with it the reading of its text with the full cache, which is
        there for comparisons; their ids. Unknown where there is none.
        """
        gone = [number, *self.full_twins(self.get(number))]
        for each in gone:
            self._delete(each)
        return gone

    def full_twins(self, document: Document) -> list[str]:
        """Readings of the text of a document with the full cache; none of one that is such a reading."""
        if document.method == WHOLE:
            return []
        same = (document.model, document.characters, WHOLE)
        text, result = self.text(document.id), []
        for each in self.documents():
            with contextlib.suppress(Unknown, FileNotFoundError):
                if (each.model, each.characters, each.method) == same and self.text(each.id) == text:
                    result.append(each.id)
        return result

    def _delete(self, number: str) -> None:
        with self._lock:
            if number in self._reading:
                self._reading[number].cancelled = True
            self._loaded.pop(number, None)
            self._clear(number)
        self._lock_file(number).unlink(missing_ok=True)

    def _clear(self, number: str) -> None:
        """Removes what is under the name of a document, in one step for others."""
        gone = self._work_path("gone", number)
        with contextlib.suppress(FileNotFoundError):
            os.replace(self._path(number), gone)
        # Whoever still reads it may write meanwhile; what stays is removed at the next start.
        with contextlib.suppress(OSError):
            remove(gone)

    def close(self) -> None:
        """Stops reading; what is not read yet is read by the next process."""
        self._closed.set()
        self._queue.put(None)
        self._reader.join()

    def _create(self, document: Document, method: Method, text: str, places: Sequence[tuple[int, str]]) -> None:
        facts = {key: getattr(document, key) for key in (*FACTS, *(["note"] if document.note else []))}
        work = self._work_path("new", document.id)
        remove(work)
        try:
            work.mkdir()
            (work / "text.txt").write_text(text, encoding="utf-8")
            if places:
                write_json(work / "places.json", {"places": list(places)})
            write_json(work / "document.json", {**facts, "recipe": method.full_text(), "identity": self.identity})
            if not self.is_known(document.id):
                # What is there under its name is no document, such as a damaged one or a link.
                self._clear(document.id)
                self._place(work, document.id)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _place(self, work: Path, number: str) -> None:
        try:
            place(work, self._path(number))
        except OSError:
            # It may have its name already, and nobody would know of it.
            self._clear(number)
            raise

    def _work_path(self, kind: str, number: str) -> Path:
        return self.folder / f".{kind}-{number}.{socket.gethostname()}.{os.getpid()}"

    def _remove_leftovers(self) -> None:
        """Removes what processes of this machine that are gone left half done."""
        for path in self.folder.iterdir():
            match = WORK.fullmatch(path.name)
            if match and match["host"] == socket.gethostname() and not psutil.pid_exists(int(match["process"])):
                shutil.rmtree(path, ignore_errors=True)
            elif ID.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                sealed_file.remove_leftovers(path / "cache.kvs")

    # reading

    def _start(self, number: str) -> None:
        with self._lock:
            reading = self._reading.get(number)
            if reading is None or reading.error or reading.cancelled:
                self._reading[number] = _Reading()
                self._queue.put(number)

    def _work(self) -> None:
        while (number := self._queue.get()) is not None and not self._closed.is_set():
            if (reading := self._reading.get(number)) is None:
                continue
            try:
                with FileLock(self._lock_file(number), timeout=0):
                    if self.get(number).status != "ready":
                        self._read(number, reading)
                self._end(number, reading)
            except Timeout:
                # Another process reads it, or has died meanwhile.
                later = threading.Timer(LOOK_AGAIN, self._queue.put, [number])
                later.daemon = True
                later.start()
            except (GivenUp, Unknown, FileNotFoundError):
                self._end(number, reading)
            except Exception as error:  # one bad document must not end the thread that reads the others
                log.exception("document %s could not be read", number)
                reading.error = f"{type(error).__name__}: {error}"

    def _end(self, number: str, reading: _Reading) -> None:
        """Forgets a reading; one that has begun meanwhile, of a document that was deleted and sent again, stays."""
        with self._lock:
            if self._reading.get(number) is reading:
                del self._reading[number]

    def _lock_file(self, number: str) -> Path:
        """Locked by the process that reads a document."""
        path = self.folder / ".locks" / number
        if path.is_symlink():
            path.unlink()
        return path

    def _read(self, number: str, reading: _Reading) -> None:
        path, start = self._path(number), time.perf_counter()
        method = parse_method(str(read_json(path / "document.json")["recipe"]), importing=False)
        cache = WatchedCache(self.model, method, **self._options)

        def watch(tokens: int) -> None:
            if reading.cancelled or self._closed.is_set():
                raise GivenUp
            lengths = interrupted.lengths(cache.layers)
            reading.tokens_read = sum(lengths) // len(lengths)

        cache.watch, reading.cache = watch, cache
        ids = document_ids(self.tokenizer, (path / "text.txt").read_text(encoding="utf-8"))
        said, device = repeat_instruction(self.tokenizer), self.model.device
        # Threads on a CPU need no turns: nothing is recorded there.
        turn: Any = contextlib.nullcontext() if device.type == "cpu" else captured.turn_of(device)

        def pass_on(_: int) -> None:
            """Between chunks the requests that wait for the device go first."""
            turn.__exit__(None, None, None)
            time.sleep(0.001)
            turn.__enter__()

        with turn:
            logits = prefill(self.model, ids.to(device), cache, after_chunk=pass_on, instruction=said)
        if not bool(logits.amax().isfinite()):
            raise not_finite("the document", self.model)
        cache.text.open, cache.watch = True, None
        result = summary.of_cache(self.model, cache)
        seconds = round(time.perf_counter() - start, 3)
        write_json(path / "held.json", {**result, "seconds": seconds})
        if (path / "cache.kvs").is_symlink():
            (path / "cache.kvs").unlink()
        cache.save(path / "cache.kvs")
        with self._lock:
            if not reading.cancelled:
                self._hold(number, cache)
        log.info("document %s: %d tokens read in %.1f s", number, cache.tokens_seen, seconds)
