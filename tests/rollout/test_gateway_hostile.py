"""Invalid requests to the gateway: slow, late, huge and broken ones. None blocks a chain, and each is refused in its
protocol's error format."""

import asyncio
import gzip
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from agentfactory.base.run_notices import notice_of
from agentfactory.rollout.gateway import request_bodies, responses
from agentfactory.rollout.gateway.client_agents import ChainEnded, ChainTools, FunctionAgent
from agentfactory.rollout.gateway.request_options import Refusal
from agentfactory.rollout.trajectory import Outcome
from agentfactory.rollout.workers.worker_socket import encode
from tests.rollout.test_gateway_outside import TOKEN, Program, begin, elsewhere, taken
from tests.scripted_chains import scripted_chains

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "go"}]}


# the SDKs look at the machine by `uname`
pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFACTORY_TOKEN", TOKEN)


@asynccontextmanager
async def connected(program: Program) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(program.url.rpartition(":")[2]))
    try:
        yield reader, writer
    finally:
        writer.close()


def head(path: str, key: str, length: int, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", *headers, f"Content-Length: {length}"]
    return "\r\n".join([*lines, "", ""]).encode()


async def answer(reader: asyncio.StreamReader) -> tuple[int, Any]:
    start = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    assert "content-type: application/json" in start
    length = int(start.partition("content-length: ")[2].split()[0])
    return int(start.split()[1]), json.loads(await reader.readexactly(length))


async def send(program: Program, path: str, key: str, body: bytes, *headers: str) -> tuple[int, Any]:
    async with connected(program) as (reader, writer):
        writer.write(head(path, key, len(body), *headers) + body)
        return await answer(reader)


@pytest.mark.parametrize("path", [CHAT, "/reward"])
async def test_a_slow_body_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(request_bodies, "BODY_SECONDS", 0.5)
    async with elsewhere(tmp_path, ["a"], rewards=[]) as (chains, program):
        running, key = await taken(chains, program)

        async def one_byte_a_time() -> tuple[int, Any]:
            async with connected(program) as (reader, writer):
                writer.write(head(path, key, 1000))
                answered = asyncio.create_task(answer(reader))
                while not answered.done():
                    writer.write(b" ")
                    await asyncio.sleep(0.05)
                return await answered

        # more than is read at a time
        for status, body in await asyncio.gather(*[one_byte_a_time() for _ in range(6)]):
            assert status == 408
            assert "did not arrive within 0.5 s" in body["error"]["message"]
        assert (await program.ask(key))[0] == 200
        await program.post("/reward", key, reward=1)
        assert (await running).outcome is Outcome.COMPLETED


@pytest.mark.parametrize(("path", "body"), [(CHAT, ASKED), ("/reward", {"reward": 7})])
async def test_a_request_after_its_chain_changes_nothing(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    async with elsewhere(tmp_path, ["a", "b"], rewards=[]) as (chains, program):
        running = begin(chains)
        key, late = (await program.take())["key"], json.dumps(body).encode()
        async with connected(program) as (reader, writer):
            writer.write(head(path, key, len(late)))
            await program.ask(key)  # so that the header is read before the chain ends
            await program.post("/reward", key, reward=1)
            chain = await running
            writer.write(late)
            assert (await answer(reader))[0] == 401
        assert (chain.turns, chain.reward, len(chain.rows)) == (1, 1.0, 1)
        assert len(chains.server.requests) == 1
        chains.check(chain)


async def test_a_stream_ends_with_its_chain(tmp_path: Path) -> None:
    async with elsewhere(tmp_path, ["a"], rewards=[]) as (chains, program):
        chains.server.delay = 600
        running = begin(chains)
        key, asked = (await program.take())["key"], json.dumps({**ASKED, "stream": True}).encode()
        async with connected(program) as (reader, writer):
            writer.write(head(CHAT, key, len(asked)) + asked)
            assert b"text/event-stream" in await reader.readuntil(b"\r\n\r\n")
            await program.post("/reward", key, reward=1)
            chain = await running
            assert b"data:" not in await reader.read(), "it is closed"
        assert (chain.turns, chain.rows) == (0, [])


async def test_bodies_of_all_chains_share_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_bodies, "TOGETHER_BYTES", 300_000)
    async with elsewhere(tmp_path, [], rewards=[]) as (chains, program), AsyncExitStack() as stack:
        running, sent = [], []
        for name in ("c0", "c1", "c2", "c3"):
            running.append(begin(chains, name))
            sent.append(((await program.take())["key"], await stack.enter_async_context(connected(program))))
        body = b"[" + b" " * 100_000 + b"]"
        for key, (_, writer) in sent:
            writer.write(head(CHAT, key, len(body)) + body[:-1])
        key, (reader, writer) = sent[3]
        writer.write(body[-1:])
        with pytest.raises(TimeoutError):  # it waits for one of the others
            await asyncio.wait_for(asyncio.shield(last := asyncio.create_task(answer(reader))), 0.5)
        small = await send(program, CHAT, key, b"[]")
        sent[0][1][1].write(body[-1:])
        for status, refused in (small, await answer(sent[0][1][0]), await last):
            assert (status, refused["error"]["message"]) == (400, "the request is not a JSON object")
        for chain in running:
            chain.cancel()


async def test_what_no_handler_sees_is_refused_as_clients_expect(tmp_path: Path) -> None:
    async with elsewhere(tmp_path, [], rewards=[], rollout={"max_total_tokens": 64, "max_tokens": 8}) as served:
        chains, program = served
        running, key = await taken(chains, program)
        long = json.dumps({"messages": [{"role": "user", "content": "x" * 2_000_000}]}).encode()
        told = "context length is 64 tokens; the conversation leaves no room: a request may have 1,052,672 bytes"
        for path, body, status, text in (
            (CHAT, long, 400, told),
            (MESSAGES, long, 400, told),
            ("/v1/embeddings", b"{}", 404, "POST /v1/embeddings: Not Found"),
            ("/v1/models", b"{}", 405, "Method Not Allowed"),
        ):
            got, answered = await send(program, path, key, body)
            assert got == status
            assert text in answered["error"]["message"]
        async with connected(program) as (reader, writer):
            writer.write(b"GARBAGE\r\n\r\n")
            status, answered = await answer(reader)
            assert (status, answered["error"]["type"]) == (400, "invalid_request_error")
        # as the SDKs read it
        text = "x" * 2_000_000
        async with openai.AsyncOpenAI(base_url=f"{program.url}/v1", api_key=key, max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match="maximum context length") as refused:
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
            assert refused.value.code == "context_length_exceeded"
        async with anthropic.AsyncAnthropic(base_url=program.url, api_key=key, max_retries=0) as other:
            with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
                await other.messages.create(model="m", max_tokens=1, messages=[{"role": "user", "content": text}])
        running.cancel()


async def test_broken_bodies_are_refused_and_the_chain_goes_on(tmp_path: Path) -> None:
    async with elsewhere(tmp_path, ["a"], rewards=[], rollout={"max_total_tokens": 32768}) as (chains, program):
        running, key = await taken(chains, program)
        asked = json.dumps(ASKED).encode()
        deep = b'{"messages": ' + b"[" * 500 + b"]" * 500 + b"}"
        for body, status, text, *headers in (
            (b'{"messages": "\xff"}', 400, "not JSON"),
            (asked[:-1] + b', "metadata": {"x": NaN}}', 400, "NaN is not JSON"),
            (asked[:-1] + b', "temperature": 1e999}', 400, "1e999 is too large"),
            (deep, 400, "nested more than 100 levels deep"),
            (b'{"messages": ' + b"[" * 100_000, 400, "nested more than 100 levels deep"),
            (b'{"messages": [' + b"[]," * 600_000 + b"[]]}", 413, "more than 1048576 JSON values"),
            (gzip.compress(asked), 415, "Content-Encoding: got gzip", "Content-Encoding: gzip"),
        ):
            told, answered = await send(program, CHAT, key, body, *headers)
            assert told == status
            assert text in answered["error"]["message"]
        told, answered = await send(program, RESPONSES, key, b'{"input": "go", "instructions": [{}]}')
        assert (told, answered["error"]["code"]) == (400, "invalid_request")
        assert (await program.ask(key))[0] == 200
        await program.post("/reward", key, reward=1)
        assert (await running).turns == 1


async def test_lone_surrogates_reach_the_person_and_the_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    half = "no \ud800 plan"
    async with elsewhere(tmp_path, ["a"], rewards=[]) as (chains, program):
        chains.runner = chains.runner.watched(tasks=1)
        for number in range(4):  # as many as are reported
            running, key = await taken(chains, program, f"{number}.0")
            body = json.dumps({**ASKED, "reasoning_effort": half, "max_tokens": "many"}).encode()
            assert (await send(program, CHAT, key, body))[0] == 400
            if not number:
                body = json.dumps({**ASKED, "reasoning_effort": half}).encode()
                assert (await send(program, CHAT, key, body))[0] == 200
            assert (await send(program, "/reward", key, json.dumps({"error": half}).encode()))[0] == 200
            assert (await running).outcome is Outcome.AGENT_ERROR
    told = [notice for record in caplog.records if (notice := notice_of(record))]
    assert {notice.topic for notice in told} == {"agents ask for reasoning_effort", "chains that end as agent_error"}
    for notice in told:
        assert "no ? plan" in notice.text
        assert b"no ? plan" in encode("notice", **asdict(notice))


def test_answers_that_are_kept_for_later_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "_MOST_STORED", 10_000)
    stored = responses.Stored()
    for number in range(3):
        stored.put(f"resp_{number}", [{"id": f"msg_{number}", "role": "user", "content": "go"}], 4000)
    assert [stored.get(f"resp_{number}") is None for number in range(3)] == [True, False, False]
    for body, code in (
        ({"input": "on", "previous_response_id": "resp_0"}, "previous_response_not_found"),
        ({"input": [{"type": "item_reference", "id": "msg_0"}]}, "item_not_found"),
    ):
        with pytest.raises(Refusal) as refused:
            responses.read(body, 1.0, stored)
        assert (refused.value.status, refused.value.code) == (404, code)
    for known in ({"previous_response_id": "resp_2"}, {"input": [{"type": "item_reference", "id": "msg_2"}]}):
        assert responses.read({"input": [], **known}, 1.0, stored).messages == [{"role": "user", "content": "go"}]


async def test_an_agent_that_outlives_its_chain_calls_no_tool_of_the_next_one(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[1] / "tools" / "notebook.py", tmp_path)
    program = {"command": "python", "args": ["-S", str(tmp_path / "notebook.py")], "isolation": "process"}
    pad = {**program, "environment": {"reset": "begin", "reward": "judge", "close": None}, "pool": {"capacity": 1}}
    kept: list[ChainTools] = []
    running: list[asyncio.Task[Any]] = []

    async def run(tools: ChainTools) -> Any:
        kept.append(tools)
        if len(kept) == 1:
            running.append(asyncio.create_task(tools.call("read", {"seconds": 1})))
            await asyncio.sleep(0.1)  # so that it has begun
            return None
        with pytest.raises(ChainEnded, match="the chain has ended"):
            await kept[0].call("write", {"word": "of the first"})
        return await tools.call("read", {})

    fields: dict[str, Any] = {"tools": [], "mcp_servers": {"pad": pad}}
    async with scripted_chains(tmp_path, [], agent=FunctionAgent("a.py:run", run), **fields) as chains:
        first, second = await chains.run(word="one"), await chains.run(word="two")
        assert first.outcome is Outcome.AGENT_ERROR  # neither requests a turn
        assert (second.outcome, second.result) == (Outcome.AGENT_ERROR, "two")
        with pytest.raises(ChainEnded, match="while the tool was running"):
            await running[0]


async def test_deep_arguments_are_no_json(tmp_path: Path) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "note", "arguments": "[" * 100_000}}
    said = [{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": [call]}]
    body = {"messages": [*said, {"role": "tool", "tool_call_id": "a", "content": "x"}]}
    async with elsewhere(tmp_path, ["a"], rewards=[], rollout={"max_total_tokens": 8192}) as (chains, program):
        running, key = await taken(chains, program)
        status, _ = await program.post(CHAT, key, **body)
        assert status in (200, 400)
        status, called = await program.post("/tools", key, name="note", arguments="[" * 100_000)
        assert (status, "not JSON" in str(called)) == (200, True)
        running.cancel()
