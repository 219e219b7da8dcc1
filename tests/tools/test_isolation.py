"""Tests of chains' isolation: a thousand chains over sixteen instances, with cancellations, over every backend."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentfactory.base.config import McpServerConfig
from agentfactory.base.messages import CallError, ToolCall, ToolInfrastructureError
from agentfactory.tools.mcp_servers import recipe_server
from agentfactory.tools.mcp_servers.recipe_server import ToolServer
from agentfactory.tools.mcp_servers.server_entry import target_of
from agentfactory.tools.sessions.toolset import Toolset, open_toolset
from tests.forked import reserved_port
from tests.tools import conftest
from tests.tools.conftest import ROLES, ask, check_own_words, recipe_of, running
from tests.waiting import until

pytestmark = pytest.mark.processes

INSTANCES = 16
POOL = {"capacity": INSTANCES}
NOTEBOOK = {**conftest.NOTEBOOK, "isolation": "process", "deny": ["burn"]}


@contextmanager
def backend(kind: str) -> Iterator[dict[str, Any]]:
    """Yield the `mcp_servers` entry of a pad whose sixteen instances are in this process, in subprocesses, or behind
    HTTP."""
    if kind == "in process":
        yield {"module": "scratchpad.py:Scratchpad", "pool": POOL}
    elif kind == "subprocess":
        yield {**NOTEBOOK, "environment": ROLES, "pool": POOL}
    else:
        with running("sessions.py", "0") as (_, url):
            yield {"url": url, "isolation": "session", "pool": {**POOL, "max_uses": 20}}


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


async def at_rest(toolset: Toolset) -> dict[str, float]:
    """Return the gauges of the server `pad` once all released instances have been reset."""
    await toolset.closed()
    while (gauges := await gauges_of(toolset))["in_use"]:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return gauges


async def gauges_of(toolset: Toolset) -> dict[str, float]:
    return {name.removeprefix("environments/pad/"): value for name, value in (await toolset.gauges()).items()}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "chains"),
    [("in process", 1000), pytest.param("subprocess", 1000, marks=pytest.mark.long), ("http sessions", 100)],
)
async def test_a_thousand_chains_over_sixteen_instances(kind: str, chains: int, folder: Path) -> None:
    before = set(children())
    alive = most = 0

    async def live(toolset: Toolset, number: int, calling: asyncio.Event | None = None) -> bool:
        nonlocal alive, most
        word = f"word {number}"
        async with toolset.chain(f"{kind} {number} {calling is not None}", {"word": "first"}) as session:
            alive += 1
            most = max(most, alive)
            try:
                if calling is not None:
                    calling.set()
                await ask(session, "write", word=word)
                await asyncio.sleep(0.001 * (number % 4))
                return await ask(session, "read") == word
            finally:
                alive -= 1

    async def cancel(toolset: Toolset, number: int) -> None:
        calling = asyncio.Event()
        chain = asyncio.create_task(live(toolset, number, calling))
        await calling.wait()
        for _ in range(number % 7):  # cancel at a different step of the call each time
            await asyncio.sleep(0)
        chain.cancel()
        with pytest.raises(asyncio.CancelledError):
            await chain

    with backend(kind) as entry:
        async with open_toolset(recipe_of(pad=entry), folder) as toolset:
            # every fifth is cancelled, at any of seven moments
            lives = [live(toolset, number) if number % 5 else cancel(toolset, number) for number in range(chains)]
            right = await asyncio.gather(*lives)
            assert (right.count(True), most <= INSTANCES) == (chains * 4 // 5, True)
            assert (await at_rest(toolset))["waiting"] == 0

            # none leaked: all sixteen can be held at once
            most = 0
            async with asyncio.timeout(60):
                together = asyncio.Barrier(INSTANCES)

                async def hold(number: int) -> None:
                    async with toolset.chain(f"{kind} held {number}", {"word": "held"}):
                        await together.wait()

                await asyncio.gather(*(hold(number) for number in range(INSTANCES)))
            assert (await at_rest(toolset))["idle"] <= INSTANCES
    assert set(children()) <= before


async def test_a_stateful_process_serves_one_chain(folder: Path) -> None:
    async with open_toolset(recipe_of(pad={**NOTEBOOK, "pool": {"capacity": 2, "warm": 1}}), folder) as toolset:
        await check_own_words(toolset, range(12), seconds=0.01)
        assert (await at_rest(toolset))["recycled"] == 12


async def test_a_process_at_work_on_a_call_that_was_given_up_is_replaced(folder: Path) -> None:
    entry = {**NOTEBOOK, "environment": ROLES, "pool": {"capacity": 1}}
    async with open_toolset(recipe_of(pad=entry), folder) as toolset:
        async with toolset.chain("a", {"word": "a"}) as session:
            late = await session.call(ToolCall("1", "read", {"seconds": 60}), timeout_seconds=0.05)
            assert (late.content, late.error) == ("read did not answer within 0.05 s.", CallError.TIMEOUT)
        async with toolset.chain("b", {"word": "b"}) as session:
            assert await session.reward() is not None
        assert (await at_rest(toolset))["broken"] == 1


async def test_a_process_that_dies_ends_its_chain_alone(folder: Path) -> None:
    entry = {**NOTEBOOK, "deny": [], "pool": {"capacity": 2}}
    async with open_toolset(recipe_of(pad=entry), folder) as toolset, toolset.chain("other", {}) as other:
        async with toolset.chain("dying", {}) as dying:
            with pytest.raises(ToolInfrastructureError, match="tool server pad died during a call of burn"):
                await ask(dying, "burn")
            with pytest.raises(ToolInfrastructureError, match=r"tool server pad: .*notebook\.py"):
                await ask(dying, "read")
            assert await ask(other, "read") == "nothing"
        async with toolset.chain("next", {}) as following:
            assert await ask(following, "read") == "nothing"
        gauges = await gauges_of(toolset)
        assert (gauges["in_use"], gauges["broken"]) == (1, 1)


async def test_chains_that_need_two_scarce_servers_never_block_each_other(folder: Path) -> None:
    one = {**NOTEBOOK, "environment": ROLES, "pool": {"capacity": 2}}
    two = {**one, "prefix": "second_", "pool": {"capacity": 1}}
    pads = {"module": "scratchpad.py:Scratchpad", "prefix": "third_", "pool": {"capacity": 1}}
    async with open_toolset(recipe_of(one=one, pad=pads, two=two), folder) as toolset:

        async def live(number: int) -> None:
            async with toolset.chain(str(number), {"word": str(number)}) as session:
                for name in ("read", "second_read", "third_read"):
                    assert await ask(session, name) == str(number)

        await asyncio.gather(*(live(number) for number in range(20)))
        gauges = await toolset.gauges()
    counted = [gauges[f"environments/{name}/{key}"] for name in ("one", "pad", "two") for key in ("in_use", "waiting")]
    assert not any(counted)


async def test_sessions_keep_chains_apart_and_are_replaced_when_their_server_is_started_anew(folder: Path) -> None:
    port = reserved_port()
    roles = {"reset": "write", "reward": None, "close": None}
    with running("sessions.py", str(port)) as (process, url):
        entry = {"url": url, "isolation": "session", "environment": roles, "pool": {"capacity": 4}}
        async with open_toolset(recipe_of(pad=entry), folder) as toolset:

            async def live(number: int) -> str:
                async with toolset.chain(str(number), {"word": str(number)}) as session:
                    await asyncio.sleep(0.01)
                    return await ask(session, "read")

            assert await asyncio.gather(*map(live, range(12))) == [str(number) for number in range(12)]
            process.kill()
            process.wait()
            with running("sessions.py", str(port)):
                assert await live(99) == "99"
                assert (await at_rest(toolset))["broken"] > 0


@pytest.mark.parametrize(("file", "isolation", "told"), [("", "process", 1), ("${chain}/", None, 0), ("", "shared", 0)])
async def test_a_file_that_chains_share_is_named_once_they_have_changed_it(
    folder: Path, tmp_path: Path, file: str, isolation: str | None, told: int, caplog: pytest.LogCaptureFixture
) -> None:
    (shared := tmp_path / "words.txt").write_text("seed")
    args = [*NOTEBOOK["args"], f"--file={file or f'{tmp_path}/'}words.txt"]
    entry = {**NOTEBOOK, "args": args, "isolation": isolation}
    async with open_toolset(recipe_of(pad=entry), folder) as toolset:
        for word in ("one", "two", "three"):
            async with toolset.chain(word, {}) as session:
                await ask(session, "write", word=word)
    assert caplog.text.count(f"chains have changed {shared}, and each sees what the others wrote; fix: ") == told


async def test_fewer_processes_run_from_when_one_has_taken_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_server, "memory_of", lambda pid: 200 << 20)
    records: list[dict[str, Any]] = []
    config = McpServerConfig.model_validate(conftest.NOTEBOOK)
    server = ToolServer("pad", config, target_of("pad", config, folder, 1 << 20), records.append, memory=1 << 30)

    def told() -> list[tuple[int, int]]:
        isolated = [record for record in records if record["event"] == "tool_server_isolated"]
        return [(record["processes"], record["mebibytes_each"]) for record in isolated]

    await server.open()
    try:
        assert told() == [(13, 75)]
        _, lease = await server.acquire()
        await lease.release()
        await until(lambda: told()[1:] == [(5, 200)])
        assert "up to 5 at a time, of about 200 MiB each" in server.isolation_text
        leases = [(await server.acquire())[1] for number in range(5)]
        further = asyncio.create_task(server.acquire())
        pool = server._pool
        await until(lambda: pool.gauges()["waiting"] == 1)
        assert (pool.gauges()["in_use"], pool.gauges()["idle"]) == (5, 0)
        await leases[0].release()
        assert (await further)[1] is not None
    finally:
        await server.close()
