"""A proxy in front of a real inference server that records the requests that the server receives, and its answers."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from agentfactory.rollout.inference.http_transport import authorization
from agentfactory.rollout.inference.server_metrics import REPLICA_HEADER


@dataclass
class Recording:
    """A proxy's records. `exchanges` are pairs of a `/inference/v1/generate` request and its answer, in answer order.

    While `fails_with` is set to a status, the proxy answers such requests with it itself; `failures` counts them."""

    url: str = ""
    fails_with: int | None = None
    failures: int = 0
    exchanges: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)


@asynccontextmanager
async def record(upstream: str) -> AsyncIterator[Recording]:
    """Run the proxy on a free loopback port."""
    recording = Recording()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def forward(request: web.Request) -> web.Response:
            body = await request.read()
            if recording.fails_with is not None and request.path == "/inference/v1/generate":
                recording.failures += 1
                return web.Response(status=recording.fails_with, text="out of order")
            url = upstream + request.path_qs
            headers = {"Content-Type": "application/json", **authorization(url, None)}
            if REPLICA_HEADER in request.headers:
                headers[REPLICA_HEADER] = request.headers[REPLICA_HEADER]
            async with session.request(request.method, url, data=body, headers=headers) as answer:
                content = await answer.read()
                if request.path == "/inference/v1/generate" and answer.status == 200:
                    recording.exchanges.append((json.loads(body), json.loads(content)))
                return web.Response(body=content, status=answer.status, content_type=answer.content_type)

        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        recording.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield recording
        finally:
            await runner.cleanup()
