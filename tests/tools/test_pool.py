"""Tests of pools: order, bounds, faults, and that cancellation at any moment loses nothing."""

import asyncio
import gc
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfactory.base.config import PoolConfig
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.tools.environments import pool as pool_module
from agentfactory.tools.environments.pool import Pool
from tests.waiting import settle, until


class Thing:
    def __init__(self, number: int) -> None:
        self.number = number
        self.holders = 0
        self.resets = 0
        self.sick = self.retired = False


class Factory:
    """A factory that counts the existing things. Its methods await `pause`, and its resets raise `reset_faults`."""

    def __init__(self, pause: Callable[[], Awaitable[None]] | None = None) -> None:
        self.things: list[Thing] = []
        self.existing = self.most = 0
        self.reset_faults: list[Exception] = []
        self.pause = pause

    async def make(self) -> Thing:
        self.existing += 1
        self.most = max(self.most, self.existing)
        try:
            if self.pause:
                await self.pause()
        except BaseException:
            self.existing -= 1
            raise
        thing = Thing(len(self.things))
        self.things.append(thing)
        return thing

    async def reset(self, thing: Thing) -> None:
        if self.pause:
            await self.pause()
        if self.reset_faults:
            raise self.reset_faults.pop(0)
        thing.resets += 1

    async def healthy(self, thing: Thing) -> bool:
        if self.pause:
            await self.pause()
        return not thing.sick

    async def retire(self, thing: Thing) -> None:
        assert (thing.retired, thing.holders) == (False, 0)
        thing.retired = True
        try:
            if self.pause:
                await self.pause()
        finally:
            self.existing -= 1

    def pool(self, **config: Any) -> Pool[Thing]:
        return Pool("pads", self.make, PoolConfig(**config), reset=self.reset, healthy=self.healthy, retire=self.retire)


def counts(pool: Pool[Thing]) -> tuple[float, ...]:
    gauges = pool.gauges()
    return tuple(gauges[name] for name in ("in_use", "idle", "waiting"))


async def test_instances_go_round_in_the_order_of_asking() -> None:
    factory = Factory()
    pool = factory.pool(capacity=2)
    held = [await pool.acquire() for _ in range(2)]
    assert [lease.value.number for lease in held] == [0, 1]
    served: list[int] = []

    async def take(number: int) -> None:
        lease = await pool.acquire()
        served.append(number)
        await asyncio.sleep(0)
        await lease.release()

    takers = [asyncio.create_task(take(number)) for number in range(10)]
    await settle()
    assert counts(pool) == (2, 0, 10)
    for lease in held:
        await lease.release()
        await lease.release()  # the second release does nothing
    await asyncio.gather(*takers)
    assert served == list(range(10))
    assert counts(pool) == (0, 2, 0)
    assert factory.most == 2
    assert sum(thing.resets for thing in factory.things) == 12
    await pool.close()
    assert factory.existing == 0
    assert set(pool.gauges().values()) == {0.0, 2.0}  # 2: `made`
    with pytest.raises(ToolInfrastructureError, match="pads: its pool is closed"):
        await pool.acquire()


async def test_waiting_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PoolConfig, "wait_seconds", 0.2)
    pool = Factory().pool(capacity=1)
    lease = await pool.acquire()
    full = r"pads: no instance within 0.2 s: all 1 \(pool.capacity\) are taken; fix: raise pool.capacity"
    with pytest.raises(ToolInfrastructureError, match=full):
        await pool.acquire()
    await lease.release()
    await (await pool.acquire()).release()
    await pool.close()

    factory = Factory(partial(asyncio.sleep, 60))
    monkeypatch.setattr(PoolConfig, "wait_seconds", 0.01)
    pool = factory.pool(create_seconds=0.05)
    with pytest.raises(ToolInfrastructureError, match=r"no instance within 0.01 s: the creation of .* takes longer"):
        await pool.acquire()
    await until(lambda: not factory.existing)
    await pool.close()
    monkeypatch.setattr(PoolConfig, "wait_seconds", 60)
    pool = factory.pool(create_seconds=0.01)
    late = r"pads: the creation of an instance did not end within 0\.01 s; fix: correct it, or raise pool\.create_sec"
    with pytest.raises(ToolInfrastructureError, match=late):
        await pool.acquire()
    await pool.close()


async def test_warm_instances_are_made_ahead() -> None:
    factory = Factory()
    pool = factory.pool(warm=2, capacity=4)
    pool.advance()
    await settle()
    assert (len(factory.things), counts(pool)) == (2, (0, 2, 0))
    leases = [await pool.acquire() for _ in range(2)]
    assert {lease.value.number for lease in leases} == {0, 1}
    await settle()
    assert (len(factory.things), counts(pool)) == (4, (2, 2, 0))  # two more are warm while two are held
    leases += [await pool.acquire() for _ in range(2)]
    await settle()
    assert (len(factory.things), counts(pool)) == (4, (4, 0, 0))  # within capacity
    for lease in leases:
        await lease.release()
    assert (len(factory.things), counts(pool)) == (4, (0, 4, 0))
    await pool.close()


async def test_worn_instances_are_replaced() -> None:
    factory = Factory()
    pool = factory.pool(capacity=1, max_uses=2)
    numbers = []
    for _ in range(5):
        (await pool.acquire()).give_back()  # which wears nothing
        lease = await pool.acquire()
        numbers.append(lease.value.number)
        await lease.release()
    assert numbers == [0, 0, 1, 1, 2]
    assert pool.gauges()["recycled"] == 2
    assert factory.most == 1  # a retiring instance counts until it is gone
    await pool.close()


async def test_broken_instances_are_replaced(caplog: pytest.LogCaptureFixture) -> None:
    factory = Factory()
    pool = factory.pool(capacity=1)
    await (await pool.acquire()).release(broken=True)
    lease = await pool.acquire()
    assert lease.value.number == 1
    lease.value.sick = True
    await lease.release()
    lease = await pool.acquire()
    assert lease.value.number == 2
    factory.reset_faults = [ValueError("clings")]
    await lease.release()
    assert "pads: the reset of an instance failed: ValueError: clings" in caplog.text
    lease = await pool.acquire()
    assert lease.value.number == 3
    assert pool.gauges()["broken"] == 3
    lease.give_back()
    assert counts(pool) == (0, 1, 0)
    await pool.close()
    assert factory.existing == 0


async def test_care_that_hangs_costs_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "CARE_SECONDS", 0.05)
    factory, hangs = Factory(), set[str]()

    def hanging(kind: str, care: Callable[[Thing], Awaitable[Any]]) -> Callable[[Thing], Awaitable[Any]]:
        async def hang_once(thing: Thing) -> Any:
            if kind in hangs:
                hangs.discard(kind)
                await asyncio.sleep(60)
            return await care(thing)

        return hang_once

    for kind in ("reset", "healthy", "retire"):
        setattr(factory, kind, hanging(kind, getattr(factory, kind)))
    pool = factory.pool(capacity=1)
    for kinds, expected in [({"reset"}, 0), ({"healthy"}, 1), ({"reset", "retire"}, 2), (set(), 3)]:
        hangs |= kinds
        lease = await pool.acquire()
        assert lease.value.number == expected
        await lease.release()
    await pool.close()


async def test_closing_ends_held_instances_and_fails_those_who_wait() -> None:
    factory = Factory()
    pool = factory.pool(capacity=1, warm=1)
    lease = await pool.acquire()
    waiting = asyncio.create_task(pool.acquire())
    await settle()
    await pool.close()
    assert factory.existing == 0
    with pytest.raises(ToolInfrastructureError, match="pool is closed"):
        await waiting
    await lease.release()
    assert counts(pool) == (0, 0, 0)


@settings(max_examples=75, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    capacity=st.one_of(st.none(), st.integers(1, 6)),
    warm=st.integers(0, 3),
    max_uses=st.one_of(st.none(), st.integers(1, 3)),
)
def test_cancellations_and_faults_lose_nothing(
    seed: int, capacity: int | None, warm: int, max_uses: int | None
) -> None:
    chance = random.Random(seed)

    async def pause() -> None:
        for _ in range(chance.choice((0, 0, 1, 2, 5))):
            await asyncio.sleep(0)
        if chance.random() < 0.1:
            raise OSError("now and then")

    factory = Factory(pause)

    async def live(pool: Pool[Thing]) -> None:
        with suppress(OSError):  # it cannot be made
            lease = await pool.acquire()
            thing = lease.value
            assert (thing.retired, thing.holders) == (False, 0)
            thing.holders += 1
            try:
                for _ in range(chance.randrange(6)):
                    await asyncio.sleep(0)
                thing.sick = chance.random() < 0.1
            finally:
                thing.holders -= 1
                if chance.random() < 0.05:
                    lease.give_back()
                else:
                    await lease.release(broken=chance.random() < 0.1)

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        pool = factory.pool(capacity=capacity, warm=warm, max_uses=max_uses)
        pool.advance()
        chains = [asyncio.create_task(live(pool)) for _ in range(30)]
        for _ in range(40):
            await asyncio.sleep(0)
            if chance.random() < 0.5:
                chance.choice(chains).cancel()
            assert capacity is None or factory.existing <= capacity
        results = await asyncio.gather(*chains, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results), results
        while pool.gauges()["in_use"]:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert counts(pool)[2] == 0
        # no place was lost: as many instances as before can be held at a time
        leases = await asyncio.gather(*(pool.acquire() for _ in range(min(capacity or 3, 3))), return_exceptions=True)
        for lease in leases:
            if isinstance(lease, BaseException):
                assert isinstance(lease, OSError)
            else:
                await lease.release()
        if chance.random() < 0.5:
            await settle()
        await pool.close()
        assert all(thing.retired for thing in factory.things)
        assert (factory.existing, counts(pool), len(asyncio.all_tasks())) == (0, (0, 0, 0), 1)
        assert pool.gauges()["made"] == len(factory.things)

    complaints: list[dict[str, Any]] = []
    asyncio.run(main())
    gc.collect(1)  # now asyncio reports futures whose errors were never retrieved
    assert not complaints
