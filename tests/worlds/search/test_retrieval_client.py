"""The client of retrieval servers, against servers that answer like Search-R1's, and against broken ones."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.worlds.search.passage import Passage
from agentfactory.worlds.search.sources import RetrievalClient

HAMLET = {"id": "1", "contents": '"Hamlet"\nA play.'}


@asynccontextmanager
async def serving(
    answer: Callable[[dict[str, Any]], Any], retry_seconds: float = 0.5, request_seconds: float = 30.0
) -> AsyncIterator[RetrievalClient]:
    """A client of a server that answers a request's body with a JSON value, or with a Response."""

    async def handle(request: web.Request) -> web.StreamResponse:
        given = answer(await request.json())
        given = await given if asyncio.iscoroutine(given) else given
        return given if isinstance(given, web.StreamResponse) else web.json_response(given)

    app = web.Application()
    app.router.add_post("/retrieve", handle)
    async with TestServer(app) as server:
        client = RetrievalClient(str(server.make_url("/")), request_seconds, retry_seconds)
        try:
            yield client
        finally:
            await client.close()


async def test_scores_may_lack_and_documents_may_be_bare() -> None:
    asked = []

    def answer(body: dict[str, Any]) -> Any:
        asked.append(body)
        scored = {"document": HAMLET, "score": 2.5}
        # the last form is that of Search-R1's proxies of online engines
        odd = {"document": {"id": None, "contents": "t\nx\ud800"}}
        return {"result": [[scored, {"document": HAMLET}, HAMLET, odd]]}

    async with serving(answer) as client:
        found = await client.search('say: "hamlet', 4)
    assert asked == [{"queries": ['say: "hamlet'], "topk": 4, "return_scores": True}]
    passage = Passage("1", '"Hamlet"\nA play.')
    assert found == [Passage("1", '"Hamlet"\nA play.', 2.5), passage, passage, Passage("", "t\nx?")]


async def test_a_failure_that_passes_is_tried_again() -> None:
    failures = [
        web.Response(status=503),
        web.Response(status=429, headers={"Retry-After": "0"}),
        web.Response(status=500, text="a traceback"),
    ]
    async with serving(lambda body: failures.pop() if failures else {"result": [[HAMLET]]}, retry_seconds=30) as client:
        assert len(await client.search("a", 1)) == 1
    assert not failures


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (web.Response(status=422, text="topk"), "refuses: status 422: topk"),
        (web.Response(text="<html>"), "answered with no passages .JSONDecodeError.*: <html>"),
        ({"result": []}, "answered with no passages .ValueError: 0 results for 1 queries"),
        ({"result": [[{"id": "1"}]]}, "answered with no passages .KeyError: 'contents'"),
        ({"result": [[{"contents": None}]]}, "answered with no passages .TypeError: contents is a NoneType"),
        ({"result": [[{"document": HAMLET, "score": 10**400}]]}, "answered with no passages .OverflowError"),
        (web.Response(text="[" * 200_000), "answered with no passages .RecursionError"),
        (web.Response(body=bytes((64 << 20) + 1)), "more than 67,108,864 bytes"),
    ],
)
async def test_an_answer_without_passages_is_an_infrastructure_failure(answer: Any, told: str) -> None:
    async with serving(lambda body: answer) as client:
        with pytest.raises(ToolInfrastructureError, match=told):
            await client.search("a", 1)


async def test_a_server_that_is_down_or_hangs_is_an_infrastructure_failure() -> None:
    async with serving(lambda body: {}) as client:
        gone = client.url
    client = RetrievalClient(gone, retry_seconds=0.2)
    with pytest.raises(ToolInfrastructureError, match="does not answer: Cannot connect"):
        await client.search("a", 1)
    await client.close()
    async with serving(lambda body: asyncio.sleep(3600), retry_seconds=0.01, request_seconds=0.05) as client:
        with pytest.raises(ToolInfrastructureError, match="does not answer: TimeoutError"):
            await client.search("a", 1)
    async with serving(lambda body: web.Response(status=500, text="broken"), retry_seconds=0.2) as client:
        with pytest.raises(ToolInfrastructureError, match="does not answer: status 500: broken"):
            await client.search("a", 1)
