"""Our HTTP servers on uvicorn, with limits on their clients' connections."""

import asyncio
import logging
import socket
from functools import partial
from typing import Any, Literal, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from agentfactory.base.http.connections import HEADER_SECONDS, ConnectionLimit, OnLoss, log_few, most_connections


class _Connection(H11Protocol):
    """A connection that is closed if no request arrives. Only this protocol of uvicorn's bounds headers."""

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

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        if self._closing is not None:
            self._closing.cancel()
        admitted = self.transport.get_protocol()
        super().handle_websocket_upgrade(event)
        # the loss of a WebSocket is also that of the connection that it came from, which counts against the limit
        upgraded = OnLoss(self.transport.get_protocol(), admitted.connection_lost)
        self.transport.set_protocol(cast(asyncio.BaseProtocol, upgraded))

    def _await_request(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
        self._closing = self.loop.call_later(HEADER_SECONDS, self._close_unless_answering)

    def _close_unless_answering(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


def serve_http(app: ASGIApp, listener: socket.socket) -> None:
    """Serve an application at a listening socket until SIGINT or SIGTERM; connections are closed a second later."""
    _server(app, "none").run(sockets=[listener])


async def serve_websockets(app: ASGIApp, listener: socket.socket) -> None:
    """Serve an application that also takes WebSockets, as `serve_http` does, on the running event loop."""
    await _server(app, "websockets-sansio").serve(sockets=[listener])


def _server(app: ASGIApp, websockets: Literal["none", "websockets-sansio"]) -> uvicorn.Server:
    limit = ConnectionLimit(most_connections())

    def connection(**given: Any) -> asyncio.BaseProtocol:
        return limit.admit(partial(_Connection, **given))

    quiet: dict[str, Any] = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": 1}
    config = uvicorn.Config(app, http=cast(Any, connection), ws=websockets, **quiet)
    log_few(logging.getLogger("uvicorn.error"))
    return uvicorn.Server(config)
