"""Connections that cost nothing while they are open must not keep others out: time limits, and a limit per address.

uvicorn waits for ever for the rest of a request, and for a client to take its answer. Here a request has to come within
`ConnectionLimits`, and when there are too many connections, of one address or in all, those whose request is not
complete go first. So whoever sends a request at once is heard, and `/health` is answered however many answers are
running.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvsketch.serve.schema import ApiError

MOST_CONNECTIONS = 1024
SPARE = 64  # connections beyond the most, for /health and for refusals
SLOWEST = 16 * 1024  # bytes of a body that buy one more second
CROWDED = "kvsketch.crowded"  # the extension of a scope that carries why only /health is answered


@dataclass(frozen=True)
class ConnectionLimits:
    """How long and for how many connections a server waits."""

    headers: float = 10
    """Seconds from a connection, or from the answer before, to the last header of a request."""
    body: float = 30
    """Seconds from there to the end of the body, and one more for every SLOWEST bytes of it."""
    reader: float = 60
    """Seconds in which a client must take something of what waits for it."""
    grace: float = 1
    """Seconds that an unfinished request has even when there are too many connections."""
    connections: int = MOST_CONNECTIONS
    per_address: int = 256
    """Connections from one address; an IPv6 network of 64 bits counts as one."""


def most_connections() -> int:
    """As many as half of the files that this process may open allow: documents need some too."""
    try:
        import resource
    except ImportError:
        return MOST_CONNECTIONS // 2
    return min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


def protocol(limits: ConnectionLimits) -> type[H11Protocol]:
    """The class of connections for uvicorn, with this patience."""
    return type("PatientProtocol", (_Connection,), {"limits": limits})


class _Connection(H11Protocol):
    limits: ConnectionLimits

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._part: Any = None  # of a request that is awaited: h11.IDLE: its headers, h11.SEND_BODY; others: none
        self._since, self._arrived = self.loop.time(), 0
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._application, self.app = self.app, self._answered

    # uvicorn's calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._network = _network(self.client[0] if self.client else "")
        self._watch()
        self._make_room()

    def data_received(self, data: bytes) -> None:
        self._arrived += len(data)
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()
        if self.transport.is_closing():
            self._set("reader", self.limits.reader, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set("reader", self.limits.reader, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._clear("reader")

    def connection_lost(self, exc: Exception | None) -> None:
        for name in list(self._timers):
            self._clear(name)
        super().connection_lost(exc)

    # time

    def _watch(self) -> None:
        """Starts the clock when another part of a request is awaited."""
        if self.conn.their_state is self._part:
            return
        self._part, self._since, self._arrived = self.conn.their_state, self.loop.time(), 0
        self._clear("part")
        if self.unfinished:
            self._set("part", self._left(), self._look)

    def _left(self) -> float:
        """Seconds that the awaited part of a request may still take."""
        whole = self.limits.headers
        if self._part is h11.SEND_BODY:
            whole = self.limits.body + self._arrived / SLOWEST
        return self._since + whole - self.loop.time()

    def _look(self) -> None:
        if self.flow.read_paused:
            # The server has not taken what is there: not the client's fault.
            self._since = self.loop.time()
        if (left := self._left()) > 0:
            self._set("part", left, self._look)
        else:
            self.refuse()

    def _set(self, name: str, seconds: float, call: Any) -> None:
        self._clear(name)
        self._timers[name] = self.loop.call_later(seconds, call)

    def _clear(self, name: str) -> None:
        if timer := self._timers.pop(name, None):
            timer.cancel()

    # room

    @property
    def unfinished(self) -> bool:
        """Whether a request, or the rest of one, is still to come."""
        return self._part in (h11.IDLE, h11.SEND_BODY)

    @property
    def age(self) -> float:
        """Seconds since the awaited part of a request could come."""
        return self.loop.time() - self._since

    def refuse(self) -> None:
        """Closes a connection whose request does not come; says why where a part of it has."""
        begun = self._arrived > 0 if self._part is h11.IDLE else not self.cycle.response_started
        if begun and not self.transport.is_closing():
            self.transport.write(_timed_out())
        self.transport.abort()

    def _make_room(self) -> None:
        everyone = self._others()
        near = [each for each in everyone if each._network == self._network]
        _thin(near, self.limits.per_address, self.limits.grace)
        _thin(everyone, self.limits.connections, self.limits.grace)
        _thin(everyone, self.limits.connections + SPARE, 0)
        if len(self._others()) > self.limits.connections + SPARE:
            self.transport.abort()

    def _others(self) -> list[_Connection]:
        """The open connections, this one included."""
        return [each for each in self.connections if isinstance(each, _Connection) and not each.transport.is_closing()]

    async def _answered(self, scope: Any, receive: Any, send: Any) -> None:
        if crowded := self._crowded():
            scope.setdefault("extensions", {})[CROWDED] = crowded
        await self._application(scope, receive, send)

    def _crowded(self) -> ApiError | None:
        """Why another request cannot be answered; unfinished ones do not count, they make room themselves."""
        busy = [each for each in self._others() if not each.unfinished and each is not self]
        told: dict[str, Any] = {"code": "too_many_connections", "retry_after": 2}
        if sum(each._network == self._network for each in busy) >= self.limits.per_address:
            return ApiError(429, f"{self.limits.per_address:,} requests from this address are being answered", **told)
        if len(busy) >= self.limits.connections:
            return ApiError(503, f"{self.limits.connections:,} requests are being answered", **told)
        return None


def _thin(group: Iterable[_Connection], most: int, grace: float) -> None:
    """Closes the oldest unfinished requests of a group with more than `most`; very young ones may be just arriving."""
    group = [each for each in group if not each.transport.is_closing()]
    old = sorted((each for each in group if each.unfinished and each.age > grace), key=lambda each: -each.age)
    for each in old[: max(0, len(group) - most)]:
        each.refuse()


def _network(address: str) -> str:
    """What counts as one address: a host of IPv6 has a whole network of them."""
    try:
        result = ipaddress.ip_address(address)
    except ValueError:
        return address
    if result.version == 4 or result.ipv4_mapped:
        return address
    return str(ipaddress.ip_network((result.packed, 64), strict=False))


def _timed_out() -> bytes:
    body = json.dumps(ApiError(408, "the rest of the request did not come in time", "request_timeout").body())
    head = (
        "HTTP/1.1 408 Request Timeout", "Content-Type: application/json", f"Content-Length: {len(body)}",
        "X-Content-Type-Options: nosniff", "Connection: close",
    )  # fmt: skip
    return "\r\n".join([*head, "", body]).encode()
