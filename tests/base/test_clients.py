"""Answers of servers that we do not know: endless, compressed, redirected."""

import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentfactory.base.http.clients import AnswerError, answer_within, open_session
from agentfactory.rollout.inference.http_transport import Connection, LostError

pytestmark = pytest.mark.processes

MOST = 1 << 20


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    try:
        while True:
            await response.write(b" " * (1 << 16))
    except ConnectionError:
        return response


async def bomb(request: web.Request) -> web.Response:
    return web.Response(body=gzip.compress(b" " * (1 << 26)), headers={"Content-Encoding": "gzip"})


@asynccontextmanager
async def hostile(seen: list[str]) -> AsyncIterator[str]:
    async def redirect(request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect("/elsewhere")

    async def elsewhere(request: web.Request) -> web.Response:
        seen.append(await request.text())
        return web.json_response({})

    async def said(request: web.Request) -> web.Response:
        return web.Response(text=await request.text())

    async def said_models(request: web.Request) -> web.Response:
        return web.Response(text=seen[-1])

    app = web.Application()
    app.router.add_route("*", "/endless", endless)
    app.router.add_route("*", "/bomb", bomb)
    app.router.add_route("*", "/redirect", redirect)
    app.router.add_route("*", "/elsewhere", elsewhere)
    app.router.add_route("*", "/said", said)
    app.router.add_get("/odd/v1/models", said_models)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def test_an_answer_has_a_bound() -> None:
    async with hostile([]) as url, open_session(None) as session:
        for path, told in (("/endless", "more than 1,048,576 bytes"), ("/bomb", "answers in gzip")):
            async with session.get(url + path) as response:
                with pytest.raises(AnswerError, match=told):
                    await answer_within(response, MOST)
        async with session.post(url + "/said", data=b"x" * MOST) as response:
            assert len(await answer_within(response, MOST)) == MOST


async def test_inference_servers_get_no_request_by_a_redirect() -> None:
    seen: list[str] = []
    async with hostile(seen) as url, Connection() as connection:
        for path, told in (("/endless", "more than 1,000 bytes"), ("/bomb", "answers in gzip")):
            with pytest.raises(LostError, match=told):
                await connection.request("POST", url + path, b"{}", most=1000)
        status, told, _ = await connection.request("POST", url + "/redirect", b'"secret"')
        assert (status, told) == (307, "it redirects to /elsewhere, which is not followed; fix: write that address")
        assert seen == []
        for models in ("[" * 100_000, "[]", {"data": None}, {"data": ["policy"]}, {"data": [{"root": "x"}]}):
            seen.append(models if isinstance(models, str) else json.dumps(models))
            with pytest.raises(LostError):
                await connection.models(f"{url}/odd")
