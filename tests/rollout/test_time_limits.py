"""Time limits of user code: each call that hangs is cut, and the error names it and its own setting."""

import asyncio
import logging
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.base.processes.threads import call_within, run_in_thread, run_on_loop
from agentfactory.rollout.chains import chain_runner
from agentfactory.rollout.rewards import Rewards
from agentfactory.rollout.trajectory import Outcome
from agentfactory.tools.environments import environment_host, pool
from agentfactory.tools.mcp_servers import recipe_server
from agentfactory.tools.sessions import tool_session
from tests.scripted_chains import scripted_chains

HANGS = '''
import asyncio
import sys
import threading
from agentfactory import Environment, reward, tool

never = threading.Event()


class Hall(Environment):
    """Hangs where its class attribute says."""

    def __init__(self, hangs: str = ""):
        self.hangs = hangs
        if hangs == "constructor":
            never.wait(3)

    def anchor(self):
        if self.hangs == "anchor" or (self.hangs == "later anchor" and self.noted):
            never.wait(3)
        if self.hangs == "no anchor":
            raise LookupError("no such place")

    def release(self):
        if self.hangs == "release":
            never.wait(3)

    def close(self):
        if self.hangs == "close":
            never.wait(3)

    def gauges(self):
        if self.hangs == "gauges":
            never.wait(3)
        return {} if self.hangs != "no gauges" else {}["none"]

    def reset(self, hangs: str = "", **task):
        self.hangs, self.noted = hangs or self.hangs, False
        if hangs == "reset":
            never.wait(3)

    @tool
    def note(self, text: str) -> str:
        """Take a note."""
        self.noted = True
        if self.hangs == "tool":
            never.wait(3)
        return "noted"

    @tool
    async def leave(self) -> str:
        """Leave."""
        sys.exit(3)

    def reward(self):
        if self.hangs == "verdict":
            never.wait(3)
        return 1.0


@reward
def judged(hangs: str = ""):
    if hangs == "reward":
        never.wait(3)
    return 1.0


@reward
async def leaves():
    sys.exit(3)
'''
HALL = {"tools": [], "mcp_servers": {"hall": {"module": "notes.py:Hall", "timeout_seconds": 1.0}}}
NOTE = '<tool_call>\n{"name": "note", "arguments": {"text": "a"}}\n</tool_call>'
LEAVE = '<tool_call>\n{"name": "leave", "arguments": {}}\n</tool_call>'


async def test_a_reset_that_hangs_ends_the_check_of_tasks_within_its_own_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(chain_runner, "QUIET_SECONDS", 0.1)
    fix = r"fix: correct it, or raise mcp_servers\.hall\.timeout_seconds"
    caplog.set_level(logging.INFO)
    async with scripted_chains(tmp_path, [], source=HANGS, **HALL, rewards=["notes.py:judged"]) as chains:
        started = time.monotonic()
        # the wait for an instance has its own limit, pool.wait_seconds=600
        problem = rf"hall, call of reset: Hall\.reset\(\) did not return within 1 s; {fix}"
        with pytest.raises(ToolInfrastructureError, match=problem):
            await chains.runner.check([{"question": "go", "hangs": "reset"}])
        assert time.monotonic() - started < 5
        assert "Hall.reset(), for the first row of data, has not returned after 0.1 s" in caplog.text


@pytest.mark.parametrize(
    ("hangs", "outcome", "error"),
    [
        ("anchor", Outcome.TOOL_INFRASTRUCTURE, "environment hall: Hall.anchor() took longer than rollout.timeout"),
        (
            "tool",
            Outcome.TIMEOUT,
            "the chain took longer than rollout.timeout_seconds=1.5; a call of note had run for ",
        ),
        ("verdict", Outcome.REWARD_ERROR, "the environment's reward took longer than rollout.timeout_seconds=1.5"),
        ("reward", Outcome.REWARD_ERROR, "RewardError: judged took longer than rollout.timeout_seconds=1.5"),
    ],
)
async def test_what_a_chain_waits_for_is_named(tmp_path: Path, hangs: str, outcome: Outcome, error: str) -> None:
    hall = {"tools": [], "mcp_servers": {"hall": {"module": "notes.py:Hall"}}}
    rollout = {"timeout_seconds": 1.5}
    said = scripted_chains(tmp_path, [NOTE, "done"], source=HANGS, **hall, rewards=["notes.py:judged"], rollout=rollout)
    async with said as chains:
        trajectory = await chains.run(hangs=hangs)
    assert (trajectory.outcome, trajectory.reward) == (outcome, None)
    assert str(trajectory.error).startswith(error)


async def test_an_anchor_that_hangs_or_raises_is_named(tmp_path: Path) -> None:
    hall = {"tools": [], "mcp_servers": {"hall": {"module": "notes.py:Hall", "timeout_seconds": 0.3}}}
    async with scripted_chains(tmp_path, [NOTE, "done"], source=HANGS, **hall, rewards=["notes.py:judged"]) as chains:
        first = r"Hall\.anchor\(\) did not return within 0\.3 s; fix: correct it, or raise mcp_servers\.hall\.timeout_s"
        with pytest.raises(ToolInfrastructureError, match=first):
            await chains.runner.check([{"question": "go", "hangs": "anchor"}])
        with pytest.raises(ToolInfrastructureError, match=r"Hall\.anchor\(\) raised LookupError: no such place; fix"):
            await chains.runner.check([{"question": "go", "hangs": "no anchor"}])
        trajectory = await chains.run(hangs="later anchor")
    # the model did not cause it, and does not read it
    assert trajectory.outcome is Outcome.TOOL_INFRASTRUCTURE
    assert "hall: Hall.anchor(), after note, did not return within 0.3 s; fix: correct it" in str(trajectory.error)


async def test_a_constructor_that_hangs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(chain_runner, "QUIET_SECONDS", 0.1)
    monkeypatch.setattr(pool, "QUIET_SECONDS", 0.1)
    hall = {"module": "notes.py:Hall", "options": {"hangs": "constructor"}}
    limited = {"tools": [], "mcp_servers": {"hall": {**hall, "pool": {"create_seconds": 0.5}}}}
    async with scripted_chains(tmp_path, [], source=HANGS, **limited, rewards=["notes.py:judged"]) as chains:
        problem = r"hall: Hall\(\) did not end within 0\.5 s; fix: correct it, or raise pool\.create_seconds"
        with pytest.raises(ToolInfrastructureError, match=problem):
            await chains.runner.check([{"question": "go"}])
    assert "hall: Hall() has not ended after 0.1 s; it is given 0.5 s (pool.create_seconds)" in caplog.text
    assert "Hall(), for the first row of data, has not returned after 0.1 s" in caplog.text
    unlimited = {"tools": [], "mcp_servers": {"hall": hall}, "rollout": {"timeout_seconds": 0.5}}
    async with scripted_chains(tmp_path, [], source=HANGS, **unlimited, rewards=["notes.py:judged"]) as chains:
        trajectory = await chains.run()
    assert trajectory.error == "environment hall: Hall() took longer than rollout.timeout_seconds=0.5"


async def test_a_release_or_a_close_that_hangs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tool_session, "_CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(environment_host, "_CLOSE_SECONDS", 0.2)
    async with scripted_chains(tmp_path, ["done"], source=HANGS, **HALL, rewards=["notes.py:judged"]) as chains:
        assert (await chains.run(hangs="release")).outcome is Outcome.COMPLETED
    assert "environment hall: Hall.release() failed: it did not return within 0.2 s; fix: correct it" in caplog.text
    async with scripted_chains(tmp_path, ["done"], source=HANGS, **HALL, rewards=["notes.py:judged"]) as chains:
        assert (await chains.run(hangs="close")).outcome is Outcome.COMPLETED
    assert "hall: Hall.close() did not return within 0.2 s at the end; fix: correct it" in caplog.text


@pytest.mark.parametrize(
    ("hangs", "said"), [("gauges", "did not return within 0.1 s"), ("no gauges", "raised KeyError: 'none'")]
)
async def test_gauges_that_fail_are_named_once(
    hangs: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recipe_server, "_GAUGE_SECONDS", 0.1)
    async with scripted_chains(tmp_path, ["done"], source=HANGS, **HALL, rewards=["notes.py:judged"]) as chains:
        await chains.run(hangs=hangs)
        for _ in range(2):
            assert await chains.runner.toolset.gauges() == {}
    text = f"environment hall: gauges() {said}; its numbers are no longer logged; fix: correct it"
    assert [record.message for record in caplog.records if "gauges" in record.message] == [text]


@pytest.mark.parametrize("error", ["SystemExit", "KeyboardInterrupt", "asyncio.CancelledError"])
async def test_what_would_end_the_loop_is_an_error_of_user_code(error: str) -> None:
    async def user_code() -> None:
        raise eval(error)("mine")

    with pytest.raises(RuntimeError, match=f"^{error.removeprefix('asyncio.')}: mine$"):
        await run_on_loop(user_code())


@pytest.mark.parametrize("base", [Exception, BaseException])
async def test_an_error_whose_text_cannot_be_read_is_named(base: type[BaseException]) -> None:
    # its message was built in the thread, which died: the call never returned
    class Odd(base):  # type: ignore[misc, valid-type]
        def __str__(self) -> str:
            raise ValueError

    def fails() -> None:
        raise Odd

    async def fails_on_loop() -> None:
        raise Odd

    text = "^Odd, whose text cannot be read: its __str__ raised ValueError$"
    async with asyncio.timeout(5):
        with pytest.raises(RuntimeError, match=text):
            await run_in_thread(fails)
        with pytest.raises(RuntimeError, match=text):
            await run_on_loop(fails_on_loop())
    with pytest.raises(RuntimeError, match=text):
        call_within(fails, 5)


async def test_a_cancelled_chain_cancels_its_user_code() -> None:
    task = asyncio.create_task(run_on_loop(asyncio.sleep(60)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await run_on_loop(asyncio.sleep(60))


async def test_code_that_exits_ends_its_chain_and_not_the_process(tmp_path: Path) -> None:
    texts = [LEAVE, "done", "done"]
    async with scripted_chains(tmp_path, texts, source=HANGS, **HALL, rewards=["notes.py:judged"]) as chains:
        trajectory = await chains.run()
        assert trajectory.outcome is Outcome.COMPLETED
        assert [m["content"] for m in trajectory.messages if m["role"] == "tool"] == ["RuntimeError: SystemExit: 3"]
    async with scripted_chains(tmp_path, ["done"], source=HANGS, **HALL, rewards=["notes.py:leaves"]) as chains:
        trajectory = await asyncio.wait_for(chains.run(), 10)
        assert trajectory.outcome is Outcome.REWARD_ERROR
        assert trajectory.error == "RewardError: leaves raised RuntimeError: SystemExit: 3"


def test_a_check_of_rows_that_hangs_is_named() -> None:
    class Slow:
        is_reward = True

        def __call__(self, prediction: str) -> float:
            return 1.0

        def check(self, task: dict[str, object]) -> None:
            time.sleep(0.5)

    rewards = Rewards([Slow()])
    rewards._entries = [replace(entry, timeout_seconds=0.1) for entry in rewards._entries]
    told = r"Slow\.check took longer than rewards\.0\.timeout_seconds=0\.1, in row 1 of data; fix: correct it, or raise"
    with pytest.raises(SettingError, match=told):
        rewards.check_rows([{"question": "?"}], "data")
