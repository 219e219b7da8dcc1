"""Limits on a listening socket's clients, because other users of a machine reach its loopback addresses too."""

import asyncio
import logging
import resource
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

from agentfactory.base.errors import SettingError

HEADER_SECONDS = 75.0
"""Maximum idle time of a connection, and maximum time until a request's header is complete."""
_MOST_CONNECTIONS = 8192
_MOST_RECORDS = 3


def raise_open_files() -> int | None:
    """Raise this process's limit of open files as far as the system allows. Return the limit; None if there is none."""
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:  # macOS does not take it as the soft limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        most = hard
    return None if most == resource.RLIM_INFINITY else most


def check_open_files(chains: int) -> None:
    """Raise SettingError if this process may not open a connection for each of `chains`, and as many other files."""
    files = raise_open_files()
    if files is not None and chains > files // 2:
        problem = f"{chains} chains at a time each need a connection, but a process may open {files} files (ulimit -n)"
        raise SettingError("rollout.concurrency", problem, f"lower it to {files // 2}, or raise that limit")


def most_connections() -> int:
    """Return the maximum connections of a listener: at most half of the limit of open files, which is raised."""
    most = raise_open_files()
    return _MOST_CONNECTIONS if most is None else min(_MOST_CONNECTIONS, most // 2)


class ConnectionLimit:
    """A limit on the connections to a listening socket. Further ones are closed immediately and not logged."""

    def __init__(self, most: int) -> None:
        self._free = most

    def admit(
        self, make: Callable[[], asyncio.Protocol], left: Callable[[asyncio.Protocol], object] | None = None
    ) -> asyncio.BaseProtocol:
        """Return a new connection's protocol: from `make`, with `left` called at its end, or one that closes it."""
        if not self._free:
            return _Refusing()
        self._free -= 1
        protocol = make()

        def give_back(_: Exception | None) -> None:
            self._free += 1
            if left is not None:
                left(protocol)

        return cast(asyncio.BaseProtocol, OnLoss(protocol, give_back))


class _Refusing(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()


class OnLoss:
    def __init__(self, protocol: asyncio.BaseProtocol, left: Callable[[Exception | None], None]) -> None:
        self._protocol, self._left = protocol, left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._protocol, name)

    def connection_lost(self, error: Exception | None) -> None:
        self._left(error)
        self._protocol.connection_lost(error)


def log_few(logger: logging.Logger) -> None:
    """Limit a server's logger to three records of each kind, because clients can cause any number."""
    counts: Counter[str] = Counter()

    def is_logged(record: logging.LogRecord) -> bool:
        kind = str(record.msg)
        counts[kind] += 1
        if counts[kind] == _MOST_RECORDS:
            record.msg = f"{kind} (further ones are not logged)"
        return counts[kind] <= _MOST_RECORDS

    logger.addFilter(is_logged)
