"""A judge's server, scripted."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer


@dataclass
class JudgeServer:
    """A chat completions server; `answer` gives the text, or the status of a refusal."""

    answer: Callable[[str], Any] = lambda prompt: "Score: 1"
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.authorizations.append(request.headers.get("Authorization"))
        answer = self.answer(body["messages"][-1]["content"])
        if isinstance(answer, int):
            return web.Response(status=answer, text="not now")
        if isinstance(answer, dict):
            return web.json_response(answer)
        return web.json_response({"choices": [{"index": 0, "message": {"role": "assistant", "content": answer}}]})


@pytest_asyncio.fixture
async def judge() -> AsyncIterator[JudgeServer]:
    judge, app = JudgeServer(), web.Application()
    app.add_routes([web.post("/v1/chat/completions", judge.complete)])
    async with TestServer(app) as server:
        judge.url = str(server.make_url("/v1"))
        yield judge
