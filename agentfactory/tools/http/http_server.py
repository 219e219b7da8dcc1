"""Our HTTP servers on uvicorn, with limits on their clients' connections."""

import asyncio
import logging
import socket
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from agentfactory.tools.http.connections import HEADER_SECONDS, ConnectionLimit, log_few, most_connections


class _Connection(H11Protocol):
    """A connection that is closed if no request arrives, or its header stays incomplete. Of uvicorn's protocols, only
    this one bounds the length of a header."""

    _closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._closing is not None:
            self._closing.cancel()

    def _await_request(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
        self._closing = self.loop.call_later(HEADER_SECONDS, self._close_unless_answering)

    def _close_unless_answering(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


def serve_http(app: ASGIApp, listener: socket.socket) -> None:
    """Serve an application at a listening socket until SIGINT or SIGTERM; connections are closed a second later."""
    limit = ConnectionLimit(most_connections())

    def connection(**given: Any) -> asyncio.BaseProtocol:
        return limit.admit(partial(_Connection, **given))

    config = uvicorn.Config(
        app,
        http=cast(Any, connection),
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=1,
    )
    log_few(logging.getLogger("uvicorn.error"))
    uvicorn.Server(config).run(sockets=[listener])
