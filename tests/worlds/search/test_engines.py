"""Online engines against a loopback server that imitates their published formats and failures."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import ToolCall, ToolInfrastructureError
from agentfactory.base.processes import environment
from agentfactory.worlds.search.engine import BudgetUsedUp, Engine, EngineOptions
from agentfactory.worlds.search.known_engines import Brave, Searxng, Serper, Tavily, Wikipedia
from agentfactory.worlds.search.search import Search
from tests.worlds.opening import tools_of

KEY = "test-key-5c1d90"
ENGINES: dict[str, type[Engine]] = {e.name: e for e in (Brave, Searxng, Serper, Tavily, Wikipedia)}
WITH_KEYS = [e for e in ENGINES.values() if e.key]
RECORDED = {name: json.loads((Path(__file__).parent / "answers" / f"{name}.json").read_text()) for name in ENGINES}
FAST = EngineOptions(calls_per_second=1000.0, retry_seconds=2.0)
Answer = web.Response | Callable[[], Awaitable[web.Response]]


@dataclass
class Service:
    """A server in place of an engine. It gives `answers` in order; the last one repeats."""

    answers: list[Answer]
    address: str = ""
    requests: list[tuple[web.BaseRequest, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)

    def engine(self, kind: type[Engine], options: EngineOptions = FAST) -> Engine:
        """Create an engine, which asks this server."""
        self.engines.append(kind(options))
        return self.engines[-1]


@asynccontextmanager
async def service(*answers: Any) -> AsyncIterator[Service]:
    served = Service([each if callable(each) else _response(each) for each in answers])

    async def answer(request: web.Request) -> web.Response:
        served.requests.append((request, await request.json() if request.method == "POST" else None))
        served.times.append(time.monotonic())
        given = served.answers.pop(0) if len(served.answers) > 1 else served.answers[0]
        if callable(given):
            return await given()
        return web.Response(status=given.status, body=given.body, headers=given.headers)

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    with pytest.MonkeyPatch.context() as patched:
        async with TestServer(application) as server:
            served.address = str(server.make_url("")).rstrip("/")
            for kind in ENGINES.values():
                patched.setattr(kind, "address", served.address, raising=False)
                patched.setenv(kind.key or "SEARXNG_URL", KEY if kind.key else served.address)
            yield served
            for engine in served.engines:
                await engine.close()


def _response(given: Any) -> web.Response:
    if isinstance(given, web.Response):
        return given
    if isinstance(given, int):
        return web.Response(status=given, text=f"no: {KEY}")
    return web.json_response(given)


@pytest.mark.parametrize("name", ENGINES)
async def test_results_become_passages(name: str) -> None:
    async with service(RECORDED[name]) as served:
        engine = served.engine(ENGINES[name])
        found = await engine.search("  lighthouse of\nkarsund ", 2)
    assert [passage.url for passage in found] == ["https://atlas.example/karsund", "https://atlas.example/veidnes"]
    assert [passage.title for passage in found] == ["The lighthouse of Karsund", "Veidnes"]
    assert [passage.text for passage in found] == ["The lighthouse of Karsund was built in 1889 & is 31 m high.", ""]
    request, body = served.requests[0]
    sent = dict(request.query) if body is None else body
    assert "lighthouse of karsund" in sent.values()
    assert KEY not in str(request.url)
    if ENGINES[name].key:
        assert any(KEY in value for value in request.headers.values())


def page_of(name: str, numbers: range, more: bool = True) -> Any:
    url, title = "https://atlas.example/{}", "Page {}"
    if name == "brave":
        results = [{"title": title.format(n), "url": url.format(n), "description": "x"} for n in numbers]
        return {"query": {"more_results_available": more}, "web": {"results": results}}
    if name == "serper":
        return {"organic": [{"title": title.format(n), "link": url.format(n), "snippet": "x"} for n in numbers]}
    if name == "wikipedia":
        pages = [{"title": title.format(n), "fullurl": url.format(n), "extract": "x", "index": n + 1} for n in numbers]
        return {"query": {"pages": pages}} | ({"continue": {"gsroffset": numbers.stop}} if more else {})
    return {"results": [{"title": title.format(n), "url": url.format(n), "content": "x"} for n in numbers]}


@pytest.mark.parametrize("name", ["brave", "serper", "wikipedia", "searxng"])
async def test_further_pages_are_asked_for_until_there_are_enough(name: str) -> None:
    kind = ENGINES[name]
    size = min(kind.page_size, 20)
    # the second page repeats the last result of the first one, as engines do
    pages = [page_of(name, range(size)), page_of(name, range(size - 1, 2 * size)), page_of(name, range(0), more=False)]
    async with service(*pages) as served:
        engine = served.engine(kind)
        found = await engine.search("x", size + 3)
        assert [passage.title for passage in found] == [f"Page {n}" for n in range(size + 3)]
        assert len(served.requests) == 2
        places = [
            [(body or request.query).get(name) for name in ("offset", "page", "pageno", "gsroffset")]
            for request, body in served.requests
        ]
        assert places[0] != places[1]


HOSTILE = ["", " \n", "\0", "\ud800", '"unbalanced', "AND OR NOT (", "a" * 10_000, "слово " * 3000, "\u202e\u200b"]
HOSTILE += ["🜁", "a&q=b#c"]


@pytest.mark.parametrize("name", ENGINES)
async def test_any_text_is_a_query(name: str) -> None:
    async with service(page_of(name, range(1), more=False)) as served:
        engine = served.engine(ENGINES[name])
        for query in HOSTILE:
            found = await engine.search(query, 1)
            assert len(found) == (1 if query.strip("\0\ud800\u202e\u200b \n") else 0)
        for request, body in served.requests:
            sent = dict(request.query) if body is None else body
            assert max(len(str(value)) for value in sent.values()) <= ENGINES[name].query_characters


@pytest.mark.parametrize(
    "failure",
    [
        web.Response(status=429, headers={"Retry-After": "0"}),
        500,
        web.Response(text="<html>"),
        web.Response(body=b"\xff{"),
    ],
    ids=["429", "500", "no JSON", "no text"],
)
async def test_what_passes_is_tried_again(failure: Any) -> None:
    async with service(failure, failure, RECORDED["brave"]) as served:
        engine = served.engine(Brave)
        assert len(await engine.search("x", 2)) == 2
        assert len(served.requests) == 3
        assert engine.gauges()["requests"] == 3


@pytest.mark.parametrize(("failure", "told"), [(429, "status 429"), (500, "status 500"), ("text", "is not JSON")])
async def test_what_stays_is_a_failure_of_the_infrastructure(failure: Any, told: str) -> None:
    answer = web.Response(text="<html>") if failure == "text" else failure
    async with service(answer) as served:
        engine = served.engine(Brave, replace(FAST, retry_seconds=0.3))
        with pytest.raises(ToolInfrastructureError, match=f"brave: .*{told}") as error:
            await engine.search("x", 2)
        assert KEY not in str(error.value)
        assert len(served.requests) >= 2


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(
    "answer",
    [
        *([], {}, "x", None, {"results": 3, "organic": 3, "web": 3}),
        {"results": [{}], "organic": [{}], "web": {"results": [{}]}, "query": {"pages": [{}]}},
    ],
)
async def test_another_format_is_told_at_once(name: str, answer: Any) -> None:
    if name == "wikipedia" and isinstance(answer, dict) and "query" not in answer:
        answer = {"query": {"pages": 3}}  # an answer without `query` has no results
    async with service(answer) as served:
        engine = served.engine(ENGINES[name])
        with pytest.raises(ToolInfrastructureError, match=f"{name}: its answer has an unexpected format"):
            await engine.search("x", 2)
        assert len(served.requests) == 1


@pytest.mark.parametrize("kind", WITH_KEYS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("status", [400, 401, 403, 422, 432])
async def test_a_wrong_key_has_its_variable(kind: type[Engine], status: int, caplog: pytest.LogCaptureFixture) -> None:
    async with service(status) as served:
        engine = served.engine(kind)
        with pytest.raises(ToolInfrastructureError, match=kind.key) as error:
            await engine.search("x", 2)
        assert len(served.requests) == 1  # no retry could help
        assert KEY not in str(error.value) + caplog.text
        assert [record.notice.topic for record in caplog.records if hasattr(record, "notice")]


@pytest.mark.parametrize("kind", [*WITH_KEYS, Searxng], ids=lambda kind: kind.name)
def test_a_missing_variable_is_named(kind: type[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    name = kind.key or "SEARXNG_URL"
    for value in (None, "", "  "):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
        with pytest.raises(SettingError, match=f"{kind.name} needs the environment variable {name}") as error:
            kind()
        assert error.value.fix == f"export {name}, and name it in the recipe: env: [{name}]"
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv(environment.VARIABLE, "OTHER")
    with pytest.raises(SettingError, match=f"{name}, which the recipe does not name; fix: name it in the recipe"):
        kind()
    environment.name_variables([name])
    kind()


async def test_a_redirect_does_not_take_the_key_elsewhere() -> None:
    async with (
        service(RECORDED["brave"]) as elsewhere,
        service(web.Response(status=302, headers={"Location": f"{elsewhere.address}/"})) as served,
    ):
        engine = served.engine(Brave)
        with pytest.raises(ToolInfrastructureError, match="status 302"):
            await engine.search("x", 2)
        assert elsewhere.requests == []


@pytest.mark.slow
async def test_requests_keep_the_rate() -> None:
    async with service(RECORDED["tavily"]) as served:
        engine = served.engine(Tavily, EngineOptions(calls_per_second=5.0))
        await asyncio.gather(*(engine.search(f"x{number}", 2) for number in range(11)))
    assert served.times[10] - served.times[0] >= 1.9


async def test_the_cache_is_shared_by_objects_and_runs(tmp_path: Path) -> None:
    options = replace(FAST, cache=tmp_path)
    async with service(RECORDED["brave"]) as served:
        first, second = served.engine(Brave, options), served.engine(Brave, options)
        found = await asyncio.gather(*(first.search("karsund", 2) for _ in range(8)))
        assert all(each == found[0] for each in found)
        assert await second.search(" karsund ", 2) == found[0]
        assert len(served.requests) == 1
        assert second.gauges() == {"requests": 0.0, "cache_hits": 1.0, "cache_misses": 0.0}
        await second.search("karsund", 1)  # another query
        await second.search("veidnes", 2)
        assert len(served.requests) == 3
        third = served.engine(Brave, options)
        assert await third.search("karsund", 2) == found[0]
        assert len(served.requests) == 3


async def test_a_budget_ends_the_search_but_not_what_is_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = replace(FAST, cache=tmp_path, calls=2)
    async with service(RECORDED["serper"]) as served:
        engine = served.engine(Serper, options)
        await engine.search("a", 2)
        await engine.search("b", 2)
        with pytest.raises(BudgetUsedUp, match="serper: the budget of 2 calls is used up"):
            await engine.search("c", 2)
        assert len(await engine.search("a", 2)) == 2
        resumed = served.engine(Serper, options)
        with pytest.raises(BudgetUsedUp):
            await resumed.search("c", 2)
        assert len(served.requests) == 2
        notices = {record.notice.topic for record in caplog.records if hasattr(record, "notice")}
        assert notices == {"budget of serper"}
        richer = served.engine(Serper, replace(options, calls=3))
        assert len(await richer.search("c", 2)) == 2


async def test_a_budget_in_dollars_counts_retries(tmp_path: Path) -> None:
    options = replace(FAST, cache=tmp_path, cost=0.3, price=0.1)
    async with service(500, RECORDED["serper"]) as served:
        engine = served.engine(Serper, options)
        await engine.search("a", 2)
        await engine.search("b", 2)
        with pytest.raises(BudgetUsedUp, match=r"the budget of 0\.3 dollars is used up"):
            await engine.search("c", 2)
        assert len(served.requests) == 3


@pytest.mark.parametrize("kind", WITH_KEYS, ids=lambda kind: kind.name)
async def test_no_key_is_written_anywhere(
    kind: type[Engine], tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    options = replace(FAST, cache=tmp_path, calls=100, retry_seconds=0.3)
    async with service(500, RECORDED[kind.name], 403) as served:
        engine = served.engine(kind, options)
        await engine.search("karsund", 2)
        with pytest.raises(ToolInfrastructureError) as error:
            await engine.search("veidnes", 2)
    said = capfd.readouterr()
    for written in (caplog.text, said.out, said.err, str(error.value), repr(error.value), repr(vars(options))):
        assert KEY not in written
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert all(KEY.encode() not in path.read_bytes() for path in files)


@pytest.mark.processes
async def test_the_tool_search_asks_an_engine_within_its_budget(tmp_path: Path) -> None:
    async with service(RECORDED["brave"]) as served:
        given = {"source": "brave", "count": 2, "engine": {"cache": str(tmp_path), "calls": 1}}
        async with tools_of("search", **given) as toolset, toolset.chain("a", {}) as one, toolset.chain("b", {}) as two:
            for chain in (one, two):
                result = await chain.call(ToolCall("0", "search", {"query": "lighthouse of Karsund"}))
                assert str(result.content).startswith('Doc 1(Title: "The lighthouse of Karsund")')
                assert result.info["documents"][0] == "https://atlas.example/karsund"
            for chain in (one, two):
                with pytest.raises(ToolInfrastructureError, match="the budget of 1 calls is used up"):
                    await chain.call(ToolCall("1", "search", {"query": "another question"}))
            gauges = await toolset.gauges()
        assert len(served.requests) == 1
    counts = {"searches": 4, "remembered": 1, "requests": 1, "cache_hits": 0, "cache_misses": 3}
    assert {name: gauges[f"environments/it/{name}"] for name in counts} == counts


@pytest.mark.parametrize(
    ("source", "engine", "field"),
    [
        ("brave", {"cashe": "x"}, "engine.cashe"),
        ("brave", {"calls": 5}, "engine.cache"),
        ("brave", {"cost": 5.0, "cache": "x"}, "engine.price"),
        ("brave", {"calls": 0, "cache": "x"}, "engine.calls"),
        ("brave", {"cache": "x", "calls": 5.5}, "engine.calls"),
        ("http://127.0.0.1:9/", {"calls_per_second": 1.0}, "engine"),
    ],
)
def test_settings_of_an_engine_that_cannot_work(source: str, engine: dict[str, Any], field: str) -> None:
    with pytest.raises(SettingError) as error:
        Search(source, engine=engine)
    assert error.value.field == field
