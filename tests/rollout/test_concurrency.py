"""The number of live chains: a limit that changes while it is in use, and the rule that sets it."""

import asyncio

from agentfactory.rollout.inference.concurrency import Places, next_limit
from agentfactory.rollout.inference.server_metrics import Load


async def hold(places: Places, release: asyncio.Event) -> None:
    async with places:
        await release.wait()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_places_grow_and_shrink_while_they_are_held() -> None:
    places = Places(2)
    events = [asyncio.Event() for _ in range(12)]
    async with asyncio.TaskGroup() as tasks:
        for event in events:
            tasks.create_task(hold(places, event))
        await settle()
        assert places.taken == 2
        places.resize(5)
        await settle()
        assert places.taken == 5
        places.resize(3)
        await settle()
        assert places.taken == 5, "who is in stays in"
        for number, expected in ((0, 4), (1, 3), (2, 3)):
            events[number].set()
            await settle()
            assert places.taken == expected
        places.resize(1)
        places.resize(4)
        await settle()
        assert places.taken == 4
        for event in events:
            event.set()


def test_the_limit_grows_while_it_is_reached_and_the_server_has_room() -> None:
    idle = Load(waiting=0, running=4, cache=0.2)
    assert next_limit(16, 8, idle, alive=10) == 16, "nobody needs more"
    assert [next_limit(limit, 8, idle, alive=limit) for limit in (16, 24)] == [24, 32]
    assert next_limit(32, 8, Load(waiting=3, running=16, cache=0.2), alive=32) == 25
    assert next_limit(25, 8, Load(waiting=0, running=16, cache=0.95), alive=20) == 16
    assert next_limit(25, 8, Load(waiting=0, running=16, cache=0.9), alive=20) == 25, "the cache has room"
    assert [next_limit(limit, 8, Load(9, 9, 0.9), alive=16) for limit in (16, 12, 9)] == [12, 9, 8], "one step at least"
