"""Proxies of the environment: servers on this machine are reached directly, remote ones through the proxy."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from aiohttp import web
from aiohttp.test_utils import TestServer
from mcp.server.mcpserver import MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from openai import AsyncOpenAI

from agentfactory.base.config import ToolsRecipe
from agentfactory.base.errors import SettingError
from agentfactory.base.http.proxies import proxy_for, spare_loopback
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.people.judges.judge import Judge
from agentfactory.rollout.chains.chat_endpoint import ChatEndpoint
from agentfactory.rollout.gateway.client_agents import FunctionAgent
from agentfactory.rollout.inference.http_transport import ServerUnreachableError
from agentfactory.rollout.rewards.reward_spec import RewardError
from agentfactory.rollout.trajectory import Outcome
from agentfactory.tools.sessions.toolset import open_toolset
from agentfactory.worlds.search.engine import EngineOptions
from agentfactory.worlds.search.known_engines import Searxng
from agentfactory.worlds.search.sources import RetrievalClient
from tests.forward_proxy import forward_proxy
from tests.rollout.test_reward_library import said
from tests.scripted_chains import scripted_chains

VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
DEAD = {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "ALL_PROXY": "socks5h://127.0.0.1:9"}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, *map(str.lower, VARIABLES)):
        monkeypatch.delenv(name, raising=False)


def set_all(monkeypatch: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


@asynccontextmanager
async def service() -> AsyncIterator[str]:
    """A judge, a chat endpoint, an index and a search engine in one; yield its address."""

    async def chat(_: web.Request) -> web.Response:
        message = {"role": "assistant", "content": "Score: 10"}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}]})

    async def retrieve(_: web.Request) -> web.Response:
        return web.json_response({"result": [[{"id": "1", "contents": "found"}]]})

    async def search(_: web.Request) -> web.Response:
        return web.json_response({"results": [{"url": "http://a.example/", "title": "found"}]})

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", chat), web.post("/retrieve", retrieve)])
    app.add_routes([web.get("/search", search)])
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def ask_judge(url: str, _: pytest.MonkeyPatch) -> None:
    judge = Judge(url=f"{url}/v1", model="m", prompt="{prediction}", pattern=r"(\d+)", best=10, retries=0)
    assert await judge(said("a")) == 1.0
    await judge.close()


async def ask_index(url: str, _: pytest.MonkeyPatch) -> None:
    client = RetrievalClient(url, retry_seconds=0.0)
    try:
        assert [passage.contents for passage in await client.search("a", 1)] == ["found"]
    finally:
        await client.close()


async def ask_engine(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEARXNG_URL", url)
    engine = Searxng(EngineOptions(retry_seconds=0.0))
    try:
        assert [passage.id for passage in await engine.search("a", 1)] == ["http://a.example/"]
    finally:
        await engine.close()


async def ask_endpoint(url: str, _: pytest.MonkeyPatch) -> None:
    async with ChatEndpoint(url, "m", None, 0.0, {}) as endpoint:
        answer = await endpoint.ask([{"role": "user", "content": "a"}], [], 1.0, 16)
        assert answer.message["content"] == "Score: 10"


async def ask_mcp_server(url: str, _: pytest.MonkeyPatch) -> None:
    recipe = ToolsRecipe.model_validate({"mcp_servers": {"far": {"url": url}}})
    async with open_toolset(recipe, Path()) as toolset:
        assert [spec.name for spec in toolset.specs] == ["add"]


Ask = Callable[[str, pytest.MonkeyPatch], Awaitable[None]]
CLIENTS: list[Ask] = [ask_judge, ask_index, ask_engine, ask_endpoint, ask_mcp_server]
FAILURES = (RewardError, ToolInfrastructureError, ServerUnreachableError)


@asynccontextmanager
async def served_to(ask: Ask) -> AsyncIterator[str]:
    if ask is not ask_mcp_server:
        async with service() as url:
            yield url
        return
    mcp = MCPServer("far")
    mcp.tool(name="add")(lambda: 3)
    # by default, it refuses names of other machines
    app = mcp.streamable_http_app(transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve([listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
        finally:
            server.should_exit = True
            await serving


def far(url: str) -> str:
    """The address with a host name that only a proxy resolves."""
    return url.replace("127.0.0.1", "far.example")


@pytest.mark.parametrize(
    ("ask", "variable", "scheme"),
    [
        *((ask, "HTTP_PROXY", "http://") for ask in CLIENTS),
        *((ask, "ALL_PROXY", "socks5h://") for ask in (ask_index, ask_mcp_server)),
    ],
)
async def test_remote_servers_by_proxy(ask: Ask, variable: str, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served_to(ask) as url, forward_proxy() as proxy:
        monkeypatch.setenv(variable, f"{scheme}127.0.0.1:{proxy.port}")
        await ask(far(url), monkeypatch)
    assert {*proxy.asked} == {urlsplit(far(url)).netloc}


@pytest.mark.parametrize("ask", CLIENTS)
async def test_an_error_names_the_proxy_but_not_its_password(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://me:secret@127.0.0.1:9")
    with pytest.raises(FAILURES) as error:
        await ask("http://far.example:8000", monkeypatch)
    assert "it went through the proxy http://127.0.0.1:9 (HTTP_PROXY)" in str(error.value)
    assert "NO_PROXY" in str(error.value)
    assert "secret" not in str(error.value)


@pytest.mark.processes  # the SDK looks at the machine by `uname`
async def test_an_agents_client_reaches_the_gateway_directly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, DEAD)

    async def run(client: AsyncOpenAI, task: dict[str, Any]) -> None:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": task["question"]}])

    async with scripted_chains(tmp_path, ["done"], agent=FunctionAgent("a.py:run", run)) as chains:
        assert (await chains.run()).outcome is Outcome.COMPLETED


@pytest.mark.parametrize(
    ("no_proxy", "url"),
    [
        ("far.example", "http://far.example:8000"),
        (".example", "http://far.example:8000"),
        ("*", "http://far.example"),
        ("10.0.0.0/8", "http://10.1.2.3:8000"),
        ("[fd00::1]:80,fd00::1", "http://[fd00::1]:8000"),
        ("", "http://127.0.0.9:8000"),
        ("", "https://localhost"),
    ],
)
def test_hosts_without_a_proxy(no_proxy: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, {**DEAD, "NO_PROXY": no_proxy})
    assert proxy_for(url) is None


IN_ALL = "the proxy http://a:1 (ALL_PROXY)"


@pytest.mark.parametrize(
    ("variables", "url", "found"),
    [
        ({"HTTP_PROXY": "http://a:1"}, "http://far.example", "the proxy http://a:1 (HTTP_PROXY)"),
        ({"HTTP_PROXY": "http://a:1"}, "https://far.example", "None"),
        ({"all_proxy": "http://u:p@a:1"}, "https://far.example", "the proxy http://a:1 (all_proxy)"),
        ({"HTTP_PROXY": "a:1", "http_proxy": "b:2"}, "http://far.example", "the proxy http://b:2 (http_proxy)"),
        ({"HTTP_PROXY": "http://a:1", "http_proxy": ""}, "http://far.example", "None"),
        ({"ALL_PROXY": "a:1", "NO_PROXY": "o.example,x.far.example"}, "http://far.example", IN_ALL),
        ({"ALL_PROXY": "a:1", "NO_PROXY": "far.example:80,10.0.0.0/8"}, "http://far.example:8000", IN_ALL),
    ],
)  # fmt: skip
def test_variables_that_count(variables: dict[str, str], url: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, variables)
    assert str(proxy_for(url)) == found


@pytest.mark.parametrize("value", ["ftp://a:1", "http://a:99999"])
def test_what_is_no_proxy_is_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", value)
    with pytest.raises(SettingError, match=r"HTTPS_PROXY: .* is no address of a proxy; fix: write http://HOST:PORT"):
        proxy_for("https://far.example")


def test_libraries_and_children_reach_this_machine_directly() -> None:
    environment = {"HTTPS_PROXY": "http://a:1", "NO_PROXY": "corp.example,localhost"}
    spare_loopback(environment)
    assert environment["NO_PROXY"] == environment["no_proxy"] == "corp.example,localhost,127.0.0.1,::1"
    spare_loopback(environment)
    assert environment["NO_PROXY"] == "corp.example,localhost,127.0.0.1,::1"
    all_spared, none = {"all_proxy": "http://a:1", "no_proxy": "*"}, {"PATH": "/bin"}
    spare_loopback(all_spared)
    spare_loopback(none)
    assert (all_spared, none) == ({"all_proxy": "http://a:1", "no_proxy": "*"}, {"PATH": "/bin"})
