"""A judge's server, scripted."""

import json
import re
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


def verdict_of(prompt: str, *values: Any) -> str:
    """Fill the form at the end of a request with `values`, one for each criterion, or with the only one."""
    [(nonce, form)] = re.findall(r'^\{"([0-9a-f]{16})": (.*)\}$', prompt, re.MULTILINE)
    scores = {str(number): value for number, value in enumerate(values, 1)}
    return json.dumps({nonce: scores if form.startswith("{") else values[0]})
