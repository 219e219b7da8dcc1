"""The watch over user code: it names what takes long, and what blocks the event loop."""

import asyncio
import os
from pathlib import Path

import pytest

from agentfactory.base.processes.threads import run_on_loop
from agentfactory.base.user_code import watch
from agentfactory.base.user_code.loading import load_module
from agentfactory.base.user_code.watch import Place, described, loop_watched, parsed_dump
from tests.waiting import wait_for

SLOW = """
import time

def waits():
    time.sleep(0.4)

waits()
"""

ASYNC = """
import asyncio
import time

async def blocks(seconds):
    pause(seconds)

def pause(seconds):
    time.sleep(seconds)

async def yields(seconds):
    await asyncio.sleep(seconds)
"""


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(watch, "QUIET_SECONDS", 0.1)
    monkeypatch.setattr(watch, "_say", found.append)
    return found


def test_a_slow_import_is_named_with_its_line_at_growing_intervals(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    load_module(tmp_path / "slow.py")
    assert 1 <= len(said) <= 2
    assert said[0].startswith("still importing slow.py, 0 s so far (in slow.py, line 5, in waits, called by <module>)")
    assert not watch._doing


def blocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> list[str]:
    (tmp_path / "asyncs.py").write_text(ASYNC)
    module = load_module(tmp_path / "asyncs.py")
    monkeypatch.setattr(watch, "BLOCKED_SECONDS", 0.05)
    found: list[str] = []

    async def run() -> None:
        with loop_watched(lambda topic, text: found.append(text)), loop_watched(lambda topic, text: None):
            await run_on_loop(getattr(module, call)(0.4))

    asyncio.run(run())
    wait_for(lambda: not watch._watched)
    return found


def test_a_blocking_call_in_an_async_function_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = blocked(tmp_path, monkeypatch, "blocks")
    begin = "blocks blocks the event loop (asyncs.py, line 9, in pause, called by blocks), so that all chains wait"
    assert found == [f"{begin} for it; fix: {watch.BLOCKS_LOOP}"]


def test_an_async_function_that_yields_is_not_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert blocked(tmp_path, monkeypatch, "yields") == []


def test_only_users_code_is_blamed() -> None:
    ours, library = watch.__file__, str(Path(pytest.__file__))
    standard = os.__file__
    assert described([Place(ours, 1, "a"), Place(standard, 2, "b"), Place(library, 3, "c")]) is None
    users = [Place("/home/me/tools.py", 4, "search"), Place("/home/me/helpers.py", 5, "wait"), Place(standard, 6, "d")]
    assert described([Place(ours, 1, "a"), *users]) == "helpers.py, line 5, in wait, called by search"
    assert described(users[:1]) == "tools.py, line 4, in search"
    script = Place("/home/me/script.py", 9, "<module>")
    assert described([script, Place(ours, 1, "a"), Place(library, 3, "c")]) is None
    assert described([script, Place(asyncio.events.__file__, 1, "_run"), users[0]]) == "tools.py, line 4, in search"


def test_a_dump_is_read() -> None:
    lines = ('File "/a b/tools.py", line 7 in <module>', 'File "/x.py", line ??? in f')
    dump = "\n  ".join(["Stack (most recent call first):", *lines, ""])
    assert parsed_dump(dump) == [Place("/x.py", 0, "f"), Place("/a b/tools.py", 7, "<module>")]
