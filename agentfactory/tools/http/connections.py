"""Bounds on what clients of a listening socket can hold: other users of a machine reach its loopback addresses too."""

import asyncio
import logging
import resource
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

HEADER_SECONDS = 75.0
"""How long a connection may be idle, and how long a request may take to come up to its body."""
_MOST_CONNECTIONS = 8192
_MOST_RECORDS = 3


def most_connections() -> int:
    """Raise this process's limit of open files as far as the system allows, and return how many connections a listener
    may hold: at most half of it, so that clients cannot use up what the process itself needs."""
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:  # macOS does not take it as the soft limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        most = hard
    return _MOST_CONNECTIONS if most == resource.RLIM_INFINITY else min(_MOST_CONNECTIONS, most // 2)


class ConnectionLimit:
    """Bounds the connections to a listening socket; a further one is closed at once, and is not logged."""

    def __init__(self, most: int) -> None:
        self._free = most

    def admit(
        self, make: Callable[[], asyncio.Protocol], left: Callable[[asyncio.Protocol], object] | None = None
    ) -> asyncio.BaseProtocol:
        """Return the protocol of a new connection: a new one by `make`, for which `left` is called when the connection
        is lost, or one that closes it."""
        if not self._free:
            return _Refusing()
        self._free -= 1
        protocol = make()

        def give_back() -> None:
            self._free += 1
            if left is not None:
                left(protocol)

        return cast(asyncio.BaseProtocol, _Admitted(protocol, give_back))


class _Refusing(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()


class _Admitted:
    """A protocol that tells when its connection is lost."""

    def __init__(self, protocol: asyncio.Protocol, left: Callable[[], None]) -> None:
        self._protocol, self._left = protocol, left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._protocol, name)

    def connection_lost(self, error: Exception | None) -> None:
        self._left()
        self._protocol.connection_lost(error)


class _Few(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[str] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        kind = str(record.msg)
        self._counts[kind] += 1
        if self._counts[kind] == _MOST_RECORDS:
            record.msg = f"{kind} (further ones are not logged)"
        return self._counts[kind] <= _MOST_RECORDS


def log_few(logger: logging.Logger) -> None:
    """Let a server's logger tell of each kind of problem three times: clients cause as many as they like."""
    logger.addFilter(_Few())
