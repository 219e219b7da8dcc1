"""The gateway's HTTP server, on a free loopback port of the rollout worker. A random key identifies the chain."""

import asyncio
import logging
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol, Self

from aiohttp import web
from aiohttp.typedefs import Handler

from agentfactory.base.http import connections
from agentfactory.rollout.gateway import anthropic_messages as messages
from agentfactory.rollout.gateway import chat_completions, responses
from agentfactory.rollout.gateway.request_bodies import MOST_BODIES, RequestBodies
from agentfactory.rollout.gateway.request_options import Refusal, Reply, TurnRequest, foreign_key, wrong

logger = logging.getLogger(__name__)
connections.log_few(logging.getLogger("aiohttp.server"))

PING_SECONDS = 10.0
"""Interval of keep-alive events in a stream: many clients give up on a silent one."""
MOST_CONNECTIONS = 256
"""Maximum number of concurrent connections from one sandbox."""
_PIECE_BYTES = 1 << 15


class Api(Protocol):
    """A protocol, implemented by a module of this package."""

    ROUTE: str
    PING: str
    """Keep-alive of a stream until the turn is sampled."""

    def read(self, body: Mapping[str, Any], temperature: float, stored: responses.Stored) -> TurnRequest:
        """Parse a request. `temperature` is that of the chains; `stored` has the items up to each response of the
        chain. Raise Refusal if the request is invalid or needs unsupported features."""

    def write(self, turn_request: TurnRequest, turns: Sequence[Reply]) -> dict[str, Any]:
        """Return the response."""

    def events(self, turn_request: TurnRequest, turns: Sequence[Reply]) -> Iterator[str]:
        """Yield the response as server-sent events."""

    def error(self, refusal: Refusal) -> dict[str, Any]:
        """Return the response body of a refused request."""

    def failed(self, refusal: Refusal) -> str:
        """Return the event of a request that fails after its stream has started."""


APIS: list[Api] = [chat_completions, messages, responses]


class Asking(ABC):
    """A chain that answers requests, whose bodies have at most `most_bytes`. `overflow` refuses a conversation."""

    def __init__(self, temperature: float, most_bytes: int, overflow: Callable[[str], Refusal]) -> None:
        self.temperature, self.most_bytes, self.overflow = temperature, most_bytes, overflow
        self.stored = responses.Stored()
        self.bodies = asyncio.Semaphore(MOST_BODIES)
        """Places for bodies that are received."""
        self.refused = ""
        """The problem of the last refused request; "" if there was none."""

    @abstractmethod
    async def count(self, turn_request: TurnRequest) -> int:
        """Return the number of tokens of a conversation. Raise Refusal if it cannot be rendered."""

    @abstractmethod
    async def admit(self, turn_request: TurnRequest) -> Awaitable[list[Reply]]:
        """Check a request, and return an awaitable that samples its turns. Raise Refusal if the check fails."""


@dataclass(frozen=True)
class Endpoint:
    """The address of the model for an agent: the base URLs of OpenAI's protocols, which ends with /v1, and of
    Anthropic's, and the key of the chain. Any model name is accepted."""

    url: str
    anthropic_url: str
    key: str
    model: str = "policy"

    def environment(self) -> dict[str, str]:
        """Return the environment variables from which clients read the endpoint."""
        openai = {"OPENAI_BASE_URL": self.url, "OPENAI_API_BASE": self.url, "OPENAI_API_KEY": self.key}
        anthropic = {"ANTHROPIC_BASE_URL": self.anthropic_url, "ANTHROPIC_API_KEY": self.key}
        return {**openai, **anthropic, "AGENTFACTORY_MODEL": self.model}


class _Connection(web.RequestHandler):
    """A connection that also answers malformed HTTP and internal errors with JSON."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # a body that waits for others takes this much memory, in each of thousands of connections, and not 256 KiB
        transport.max_size = _PIECE_BYTES  # type: ignore[attr-defined]
        super().connection_made(transport)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        plain = super().handle_error(request, status, exc, message)
        text = message or f"{HTTPStatus(status).phrase}; see the run's log"
        answer = _refused(request, Refusal(status, HTTPStatus(status).name.lower(), text))
        if not plain.keep_alive:
            answer.force_close()
        return answer


class Gateway:
    """A server for the requests of all chains of a process, on a loopback port (0: a free one), used as an async
    context manager. `routes` are added to its own."""

    def __init__(self, port: int = 0, routes: Sequence[web.RouteDef] = ()) -> None:
        self._port = port
        self._routes = routes
        self._chains: dict[str, Asking] = {}
        self._bodies = RequestBodies()
        self._inside: dict[asyncio.Protocol, str] = {}
        """Connection from a sandbox -> the key of its chain."""
        self.url = ""
        """The server's address, once it is open."""

    async def __aenter__(self) -> Self:
        app = web.Application(middlewares=[_in_json])
        app.add_routes([web.post(api.ROUTE, partial(_handle, self, api)) for api in APIS])
        app.add_routes([web.post(f"{messages.ROUTE}/count_tokens", self._count)])
        app.add_routes([web.get("/v1/models", self._models), web.get("/v1/models/{name:.*}", self._models)])
        app.add_routes(self._routes)
        # cancel the sampling of a turn whose client has disconnected
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        try:
            limit = connections.ConnectionLimit(connections.most_connections())
            self._server = await loop.create_server(
                partial(limit.admit, self._connection), "127.0.0.1", self._port, backlog=4096
            )
        except OSError:
            await self._runner.cleanup()
            raise
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._runner.cleanup()

    def _connection(self) -> _Connection:
        assert self._runner.server is not None
        return _Connection(
            self._runner.server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]
            keepalive_timeout=connections.HEADER_SECONDS,
            read_bufsize=_PIECE_BYTES // 2,
            auto_decompress=False,  # a short body could decompress to a huge one
        )

    @asynccontextmanager
    async def listening(self, key: str, listener: socket.socket) -> AsyncIterator[None]:
        """Serve on an additional listening socket, in the network of a chain's sandbox, until the context ends, for the
        chain's own key only: its program may have obtained another one."""
        limit = connections.ConnectionLimit(MOST_CONNECTIONS)

        def connect() -> _Connection:
            connection = self._connection()
            self._inside[connection] = key
            return connection

        server = await asyncio.get_running_loop().create_server(
            partial(limit.admit, connect, self._inside.pop), sock=listener, backlog=MOST_CONNECTIONS
        )
        try:
            yield
        finally:
            server.close()

    @contextmanager
    def serving(self, chain: Asking, key: str | None = None) -> Iterator[Endpoint]:
        """Serve the requests of a chain; its key (by default a random one) expires with the context."""
        key = key or f"chain-{secrets.token_urlsafe(24)}"
        self._chains[key] = chain
        try:
            yield Endpoint(f"{self.url}/v1", self.url, key)
        finally:
            del self._chains[key]

    def chain_of(self, request: web.Request) -> Asking:
        """Return the chain of a request's key. Raise Refusal if there is none."""
        key = key_of(request)
        if key not in self._chains or self._inside.get(request.protocol, key) != key:
            raise foreign_key()
        return self._chains[key]

    @asynccontextmanager
    async def hearing(self, request: web.Request) -> AsyncIterator[tuple[Asking, dict[str, Any]]]:
        """Provide the chain of a request's key, and the request's JSON object, which counts against the common limit
        of bodies until the context ends. Raise Refusal if either is invalid, or the chain ends meanwhile."""
        chain = self.chain_of(request)
        async with self._bodies.receiving(request, chain.bodies, chain.most_bytes, chain.overflow) as body:
            if self.chain_of(request) is not chain:
                raise foreign_key()
            yield chain, body

    async def _count(self, request: web.Request) -> web.Response:
        async with self.hearing(request) as (chain, body):
            return web.json_response({"input_tokens": await chain.count(_read(messages, body, chain))})

    async def _models(self, request: web.Request) -> web.Response:
        self.chain_of(request)
        name = request.match_info.get("name")
        card = {"id": name or "policy", "object": "model", "type": "model", "created": 0, "owned_by": "agentfactory"}
        return web.json_response(card if name else {"object": "list", "data": [card], "has_more": False})


def key_of(request: web.Request) -> str:
    """Return the key of a request, from the header of either protocol."""
    bearer = request.headers.get("Authorization", "")
    return request.headers.get("x-api-key") or bearer.removeprefix("Bearer ").strip()


async def _handle(gateway: Gateway, api: Api, request: web.Request) -> web.StreamResponse:
    chain = gateway.chain_of(request)
    try:
        async with gateway.hearing(request) as (_, body):
            turn_request = replace(_read(api, body, chain), session=request.headers.get("x-session-id", ""))
            sampling = await chain.admit(turn_request)
            # a turn may take minutes, for which its images need not stay in memory
            turn_request, body = replace(turn_request, messages=[]), {}
        if turn_request.stream:
            return await _stream(request, api, turn_request, sampling)
        return web.json_response(api.write(turn_request, await sampling))
    except Refusal as refusal:
        chain.refused = str(refusal)
        raise


@web.middleware
async def _in_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert refusals, ours and aiohttp's (an unknown route or method, too long a body), to the protocols' JSON."""
    try:
        return await handler(request)
    except Refusal as refusal:
        response = _refused(request, refusal)
        if refusal.status == HTTPStatus.UNAUTHORIZED:
            response.force_close()  # do not keep connections of clients without a key
        return response
    except web.HTTPException as refused:
        text = f"{request.method} {request.path}: {refused.reason}"
        return _refused(request, Refusal(refused.status, HTTPStatus(refused.status).name.lower(), text))


def _refused(request: web.BaseRequest, refusal: Refusal) -> web.Response:
    api = messages if request.path.startswith(messages.ROUTE) else chat_completions
    return web.json_response(api.error(refusal), status=refusal.status)


def _read(api: Api, body: dict[str, Any], chain: Asking) -> TurnRequest:
    try:
        return api.read(body, chain.temperature, chain.stored)
    except (TypeError, KeyError, AttributeError) as error:
        # the protocols have too many fields to check each
        raise wrong(f"the request is not valid for {api.ROUTE}: {type(error).__name__}: {error}") from error


async def _stream(
    request: web.Request, api: Api, turn_request: TurnRequest, sampling: Awaitable[list[Reply]]
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    turns = asyncio.ensure_future(sampling)
    try:
        while not (await asyncio.wait([turns], timeout=PING_SECONDS))[0]:
            await response.write(api.PING.encode())
        for event in api.events(turn_request, await turns):
            await response.write(event.encode())
    except Refusal as refusal:
        await response.write(api.failed(refusal).encode())
    finally:
        turns.cancel()
        await asyncio.wait([turns])
    await response.write_eof()
    return response
