"""A server in a thread, and documents that have been read."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvsketch.serve.documents import Document, DocumentStore
    from kvsketch.serve.server import Server


@contextlib.contextmanager
def started(server: Server) -> Iterator[str]:
    """Serves in a thread inside the block; its address."""
    thread = threading.Thread(target=server._server.run, kwargs={"sockets": [server._socket]}, daemon=True)
    thread.start()
    try:
        while not server._server.started and thread.is_alive():
            thread.join(0.01)
        yield server.address
    finally:
        server._server.should_exit = True
        thread.join()


def settled(store: DocumentStore, number: str, timeout: float = 60.0) -> Document:
    """The document when it is no longer waiting or being read, or as it is after `timeout` seconds."""
    end = time.monotonic() + timeout
    while (result := store.get(number)).status in ("waiting", "reading") and time.monotonic() < end:
        time.sleep(0.02)
    return result
