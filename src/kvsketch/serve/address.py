"""The address of a server, taken before anything is loaded: a busy port is refused at once."""

from __future__ import annotations

import socket


def bind(host: str, port: int) -> socket.socket:
    """Takes an address; OSError says that it is in use. Nobody can connect before the server runs."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    result = socket.socket(family, socket.SOCK_STREAM)
    result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        result.bind((host, port))
    except OSError as error:
        result.close()
        raise OSError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another --port, or 0 for any"
        ) from None
    return result
