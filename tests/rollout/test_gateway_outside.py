"""External programs as agents: they take tasks over HTTP, and a foreign key gets nothing."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentfactory.base.errors import SettingError
from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.config import OutsideOptions
from agentfactory.rollout.gateway import outside_agent as outside
from agentfactory.rollout.gateway.outside_agent import OutsideAgent
from agentfactory.rollout.trajectory import Outcome, Trajectory
from tests.scripted_chains import NOTE, Scripted, scripted_chains

TOKEN = "for tests"
CALL = '<tool_call>\n{"name": "note", "arguments": {"text": "tea"}}\n</tool_call>'


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTFACTORY_TOKEN", TOKEN)


class Program:
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self.url = url

    async def post(self, path: str, key: str, **body: Any) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}"}
        async with self._session.post(f"{self.url}{path}", json=body, headers=headers) as response:
            return response.status, await response.json() if response.status != 204 else None

    async def take(self) -> dict[str, Any]:
        """Poll until a task is available, and return it."""
        status, task = 204, None
        async with asyncio.timeout(60):
            while status == 204:
                status, task = await self.post("/tasks", TOKEN)
        assert status == 200, task
        assert task["url"] == f"{self.url}/v1"
        return dict(task)

    async def ask(self, key: str) -> tuple[int, Any]:
        body = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
        return await self.post("/v1/chat/completions", key, **body)


@asynccontextmanager
async def elsewhere(folder: Path, texts: list[str], **fields: Any) -> AsyncIterator[tuple[Scripted, Program]]:
    agent = OutsideAgent(OutsideOptions(**fields.pop("outside", {})))
    async with scripted_chains(folder, texts, agent=agent, **fields) as chains, aiohttp.ClientSession() as session:
        yield chains, Program(session, chains.runner.gateway.url)


def begin(chains: Scripted, name: str = "c0", **task: Any) -> "asyncio.Task[Trajectory]":
    runner = chains.runner
    run = runner.run(name, {"question": "go", **task}, Sampling("policy", 1.0, seed=name), runner.setup.config.scored)
    return asyncio.create_task(run)


async def taken(chains: Scripted, program: Program, name: str = "c0") -> "tuple[asyncio.Task[Trajectory], str]":
    """A chain that has begun, and its key, which the program has."""
    running = begin(chains, name)
    return running, (await program.take())["key"]


async def test_a_chain_is_taken_played_and_reported(tmp_path: Path) -> None:
    async with elsewhere(tmp_path, [CALL, "done"], rewards=[]) as (chains, program):
        running = begin(chains, secret="tea")
        task = await program.take()
        assert (task["chain"], task["task"], task["opening"]) == ("c0", {"question": "go", "secret": "tea"}, None)
        (definition,) = task["tools"]
        assert definition["function"]["name"] == "note"
        assert (await program.ask(task["key"]))[0] == 200
        called = await program.post("/tools", task["key"], name="note", arguments='{"text": "tea"}')
        assert called == (200, {"content": "noted tea"})
        assert (await program.ask(task["key"]))[0] == 200
        report = {"reward": {"reward": 0.5, "success": 1}, "answer": "found"}
        assert await program.post("/reward", task["key"], **report) == (200, {"chain": "c0"})
        trajectory = await running
        chains.check(trajectory)
        assert (trajectory.outcome, trajectory.error) == (Outcome.COMPLETED, None)
        assert (trajectory.reward, trajectory.metrics["success"], trajectory.result) == (0.5, 1.0, "found")
        # the key has ended with its chain
        for path in ("/reward", "/tools", "/v1/chat/completions"):
            assert (await program.post(path, task["key"], reward=1.0))[0] == 401


async def test_the_recipes_reward_judges_and_sees_the_report(tmp_path: Path) -> None:
    source = f"""{NOTE}
@reward
def turns(prediction, environment, trajectory):
    return 10 * trajectory.turns + (environment.reward if environment else 0) + len(prediction)
"""
    async with elsewhere(tmp_path, ["one", "two"], source=source) as (chains, program):
        for report, reward in ({"answer": "ab"}, 12.0), ({"reward": 0.25, "answer": ""}, 10.25):
            running, key = await taken(chains, program)
            await program.ask(key)
            assert (await program.post("/reward", key, **report))[0] == 200
            assert (await running).reward == reward


async def test_a_foreign_key_gives_nothing(tmp_path: Path) -> None:
    async with elsewhere(tmp_path, ["a", "b"]) as (chains, program):
        running = [begin(chains, name) for name in ("c0", "c1")]
        for wrong in ("", "chain-x", TOKEN + "x"):
            assert (await program.post("/tasks", wrong))[0] == 401
        reader, writer = await asyncio.open_connection("127.0.0.1", int(program.url.rpartition(":")[2]))
        writer.write(b"POST /tasks HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\r\nContent-Length: 0\r\n\r\n")
        assert b" 401 " in await reader.readline()
        writer.close()
        first, second = [await program.take() for _ in running]
        assert {first["chain"], second["chain"]} == {"c0", "c1"}
        for key in ("", "none", TOKEN):
            for path in ("/reward", "/tools", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
                status, answer = await program.post(path, key, reward=1.0)
                assert (status, "key" in str(answer)) == (401, True)
        assert (await program.post("/tasks", first["key"]))[0] == 401
        # reports on one chain do not affect the other
        await program.ask(first["key"])
        await program.post("/reward", first["key"], answer="first")
        ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        assert [chain.result().result for chain in ended] == ["first"]
        await program.ask(second["key"])
        await program.post("/reward", second["key"], answer="second")
        assert {(await chain).result for chain in running} == {"first", "second"}
        assert all(chain.result().turns == 1 for chain in running)


async def test_a_request_that_ends_takes_no_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with elsewhere(tmp_path, ["a"]) as (chains, program):
        monkeypatch.setattr(outside, "POLL_SECONDS", 0.1)
        assert await program.post("/tasks", TOKEN) == (204, None)
        gone = asyncio.create_task(program.post("/tasks", TOKEN))
        await asyncio.sleep(0.05)
        gone.cancel()
        await asyncio.wait([gone])
        running = begin(chains)
        task = await program.take()
        await program.ask(task["key"])
        await program.post("/reward", task["key"])
        assert (await running).outcome is Outcome.COMPLETED


async def test_a_wrong_report_is_told_and_can_be_corrected(tmp_path: Path) -> None:
    async with elsewhere(tmp_path, ["a"], rewards=[]) as (chains, program):
        running, key = await taken(chains, program)
        await program.ask(key)
        reports: list[tuple[dict[str, Any], str]] = [
            ({}, "reward: missing"),
            ({"reward": "much"}, "'much' for reward; it has to be a finite number"),
            ({"reward": math.nan}, "NaN is not JSON"),
            ({"reward": 1, "answer": "x" * 1_000_001}, "answer: has 1000001 characters; use 1000000 at most"),
            ({"reward": 1, "error": "broken"}, "a failed chain has no reward"),
        ]
        for report, problem in reports:
            status, answer = await program.post("/reward", key, **report)
            assert status == 400
            assert problem in answer["error"]["message"]
        assert (await program.post("/reward", key, reward=1))[0] == 200
        assert (await running).reward == 1.0


async def test_settings_that_cannot_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with elsewhere(tmp_path, []) as (_, program):
        port = int(program.url.rpartition(":")[2])
        with pytest.raises(SettingError, match=rf"rollout\.agent\.options\.port: got {port}: .*in use"):
            async with OutsideAgent(OutsideOptions(port=port)).gateway():
                pass
    monkeypatch.delenv("AGENTFACTORY_TOKEN")
    with pytest.raises(SettingError, match=r"rollout\.agent: the variable AGENTFACTORY_TOKEN is not set"):
        OutsideAgent(OutsideOptions())
