"""A server in a thread, and documents that have been read."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tests.helpers.waiting import join_all, wait_for

if TYPE_CHECKING:
    from kvsketch.serve.documents import Document, DocumentStore
    from kvsketch.serve.server import Server


@contextlib.contextmanager
def started(server: Server) -> Iterator[str]:
    """Serves in a thread inside the block; its address."""
    thread = threading.Thread(target=server._server.run, kwargs={"sockets": [server._socket]}, daemon=True)
    thread.start()
    try:
        wait_for(lambda: server._server.started or not thread.is_alive(), "a server that has started")
        yield server.address
    finally:
        server._server.should_exit = True
        join_all([thread])


def settled(store: DocumentStore, number: str) -> Document:
    """The document when it is no longer waiting or being read."""

    def read() -> Document | None:
        document = store.get(number)
        return None if document.status in ("waiting", "reading") else document

    result: Document = wait_for(read, f"the end of reading {number}")
    return result
