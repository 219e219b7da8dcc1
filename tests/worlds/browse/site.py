"""A small web on loopback: sites with names known only to its resolver, on addresses treated as public or private."""

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

from agentfactory.worlds.browse import addresses

PUBLIC, PRIVATE = "127.0.0.2", "127.0.0.1"
"""Two loopback addresses: one that the tests treat as public, and one that stays private."""
PAGES = Path(__file__).parent / "pages"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class NameServer(AbstractResolver):
    """A resolver that answers from `names`: a list of addresses, one per query; the last one repeats."""

    def __init__(self) -> None:
        self.names: dict[str, list[list[str]]] = {}
        self.asked: list[str] = []

    async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[ResolveResult]:
        self.asked.append(host)
        if host not in self.names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        answers = self.names[host]
        addresses_ = answers.pop(0) if len(answers) > 1 else answers[0]
        kind = {True: socket.AF_INET6, False: socket.AF_INET}
        return [
            ResolveResult(hostname=host, host=each, port=port, family=kind[":" in each], proto=0, flags=0)
            for each in addresses_
        ]

    async def close(self) -> None:
        """Do nothing."""


@dataclass
class Site:
    """A server; `requests` are the requested paths."""

    port: int
    routes: dict[str, Handler]
    requests: list[str] = field(default_factory=list)


@asynccontextmanager
async def site(routes: dict[str, Handler | str | Path], address: str = PUBLIC) -> AsyncIterator[Site]:
    """Serve `routes`: path -> a handler, HTML, or a file; anything else is 404."""
    served = Site(0, {})

    async def answer(request: web.Request) -> web.StreamResponse:
        served.requests.append(request.path_qs)
        route = routes.get(request.path)
        if route is None:
            return web.Response(status=404)
        if isinstance(route, str):
            return web.Response(text=route, content_type="text/html")
        if isinstance(route, Path):
            return web.FileResponse(route)
        return await route(request)

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    listener = socket.create_server((address, 0))
    served.port = listener.getsockname()[1]
    await web.SockSite(runner, listener).start()
    try:
        yield served
    finally:
        await runner.cleanup()


def redirect(target: str, status: int = 302) -> Handler:

    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status, headers={"Location": target})

    return handler


def status(code: int, headers: dict[str, str] | None = None) -> Handler:

    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=code, headers=headers)

    return handler


@pytest.fixture
def public_address(monkeypatch: pytest.MonkeyPatch) -> None:
    real = addresses.is_public
    monkeypatch.setattr(addresses, "is_public", lambda address: str(address) == PUBLIC or real(address))
