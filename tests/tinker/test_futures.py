"""Turns and futures without HTTP: gaps, limits, and what is forgotten."""

import asyncio

import pytest

from agentfactory.tinker import futures
from agentfactory.tinker.futures import Answer, Futures, Turns
from agentfactory.tinker.messages import RequestError


async def test_a_request_that_never_comes_fails_those_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "_GAP_SECONDS", 0.05)
    turns, ran = Turns(), list[int]()

    def work(number: int, seconds: float = 0.0):
        async def run() -> Answer:
            await asyncio.sleep(seconds)
            ran.append(number)
            return {}

        return turns.wait_for(number, run)

    # 2 waits long for 1, which runs; 4 and 5 wait for 3, which never comes
    slow, second, fourth, fifth = work(1, 0.3), work(2), work(4), work(5)
    results = await asyncio.gather(fifth(), fourth(), second(), slow(), return_exceptions=True)
    assert ran == [1, 2]
    for failed in results[:2]:
        assert isinstance(failed, RequestError)
        assert "seq_id: 3 was refused, or never came" in str(failed)
    with pytest.raises(RequestError, match="seq_id: 3 was refused"):
        await work(6)()


async def test_a_request_runs_once_and_its_answer_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "_MOST_BYTES", 3000)
    known, ran = Futures(), list[str]()

    def work(name: str):
        async def run() -> Answer:
            ran.append(name)
            return b"x" * 1000

        return run

    for name in ("m:1", "m:1", "m:2", "m:3", "m:4"):
        note = known.begin(name, work(name))
        assert await known[note["request_id"]] == b"x" * 1000
    assert ran == ["m:1", "m:2", "m:3", "m:4"]
    with pytest.raises(RequestError, match="was answered long ago") as refused:
        known["m:1"]
    assert refused.value.status == 410
