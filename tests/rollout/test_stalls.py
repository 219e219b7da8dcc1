"""Detection of servers that accept requests but produce no tokens."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import repeat

import pytest

from agentfactory.rollout.inference import stalls
from agentfactory.rollout.inference.http_transport import ServerUnreachableError
from agentfactory.rollout.inference.inference_client import InferenceClient
from agentfactory.rollout.inference.server_metrics import Load, write_load
from agentfactory.rollout.inference.stalls import Stall
from tests.rollout.test_client import Server, connected, hang

SAMPLING = {"temperature": 1.0, "max_tokens": 4}


async def test_only_a_server_with_requests_and_without_progress_is_quiet() -> None:
    stall = Stall()
    assert stall.seconds(100.0) == 0.0
    first, second = asyncio.timeout(None), asyncio.timeout(None)
    stall.begin(first, 100.0)
    stall.begin(second, 110.0)
    assert stall.seconds(112.0) == 12.0, "a request more is no progress"
    stall.count(50.0, 113.0)
    assert stall.seconds(115.0) == 15.0, "the first count says nothing"
    stall.count(50.0, 116.0)
    assert stall.seconds(117.0) == 17.0
    stall.count(51.0, 118.0)
    assert stall.seconds(120.0) == 2.0
    stall.end(first, 121.0)
    assert stall.seconds(123.0) == 2.0
    stall.end(second, 124.0)
    assert stall.seconds(200.0) == 0.0


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(stalls, "STALL_SECONDS", 0.5)


@asynccontextmanager
async def silent(page: Callable[[], str], seconds: float) -> AsyncIterator[tuple[Server, InferenceClient]]:
    """A server that never answers a request for tokens, with this page of metrics, and a client."""
    server = Server(hang)
    server.page = page
    async with connected(server, retry_seconds=seconds) as client:
        yield server, client


async def test_a_server_that_computes_nothing_is_told_of_and_given_up(caplog: pytest.LogCaptureFixture) -> None:
    async with silent(lambda: write_load(Load(1, 0, 0.0, 7, 7)), 1.0) as (_, client):
        with pytest.raises(ServerUnreachableError, match=r"completed a request for 1 s.*gave no token for 1 s"):
            await client.generate([1], "policy", SAMPLING)
    told = [text for text in caplog.messages if "has given no token" in text]
    assert told[0].endswith("1 request waits, and it computes none")


@pytest.mark.parametrize(
    ("counts", "paused", "told"),
    [
        pytest.param(iter(range(10**6)), False, None, id="a long answer"),
        pytest.param(None, False, None, id="a server without counts"),
        pytest.param(repeat(7), True, "1 request waits, and it is paused or asleep", id="a paused server"),
    ],
)
async def test_a_turn_that_is_not_given_up(
    counts: Iterator[int] | None, paused: bool, told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    def page() -> str:
        return "nothing here" if counts is None else write_load(Load(0, 1, 0.0, 7, next(counts)))

    async with silent(page, 0.6) as (server, client):
        server.held = "is_paused" if paused else None
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.generate([1], "policy", SAMPLING), 1.5)
    assert ("no token" in caplog.text) == (told is not None)
    assert told is None or told in caplog.text
