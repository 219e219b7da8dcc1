"""The number of chains alive: a limit that changes while it is held, and the rule that sets it."""

import asyncio

import pytest

from agentfactory.rollout.concurrency import ConcurrencyControl, Load, Places, parse_load, write_load


async def hold(places: Places, alive: list[int], release: asyncio.Event) -> None:
    async with places:
        alive.append(places.taken)
        await release.wait()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_places_grow_and_shrink_while_they_are_held() -> None:
    places = Places(2)
    events = [asyncio.Event() for _ in range(12)]
    async with asyncio.TaskGroup() as tasks:
        for event in events:
            tasks.create_task(hold(places, [], event))
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


async def test_a_smaller_limit_holds_for_free_places_too() -> None:
    places = Places(5)
    places.resize(2)
    release = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(hold(places, [], release))
        await settle()
        assert places.taken == 2
        release.set()


VLLM_PAGE = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 3.0
vllm:num_requests_running{engine="1",model_name="policy"} 4.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 0.0
vllm:num_requests_waiting{engine="1",model_name="policy"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="policy"} 0.125
vllm:prompt_tokens_total{engine="0",model_name="policy"} 30.0
vllm:prompt_tokens_total{engine="1",model_name="policy"} 40.0
vllm:prompt_tokens_created{engine="1",model_name="policy"} 1.7e+09
vllm:generation_tokens_total{engine="0",model_name="policy"} 5.0
vllm:generation_tokens_total{engine="1",model_name="policy"} 6.0
"""


def test_the_load_is_read_from_vllms_page() -> None:
    assert parse_load(VLLM_PAGE) == Load(1, 7, 0.25, prompt_tokens=70, generation_tokens=11)
    assert parse_load(write_load(Load(2, 3, 0.5, 40, 7))) == Load(2, 3, 0.5, 40, 7)
    with pytest.raises(ValueError, match="has no vllm:num_requests_waiting"):
        parse_load("vllm:num_requests_running 1\n")


def test_the_limit_grows_while_it_is_reached_and_the_server_has_room() -> None:
    control = ConcurrencyControl(limit=16, step=8)
    idle = Load(waiting=0, running=4, cache=0.2)
    assert control.observe(idle, alive=10) == 16, "nobody needs more"
    assert [control.observe(idle, alive=limit) for limit in (16, 24)] == [24, 32]
    assert control.observe(Load(waiting=3, running=16, cache=0.2), alive=32) == 25
    assert control.observe(Load(waiting=0, running=16, cache=0.95), alive=20) == 16
    assert [control.observe(Load(9, 9, 0.9), alive=16) for _ in range(3)] == [12, 9, 8], "never below one step"


def test_the_limit_settles_where_the_server_is_just_full() -> None:
    """A server that decodes 32 at a time, and chains that spend a fourth of their time in it."""
    control, seen = ConcurrencyControl(limit=32, step=8), []
    for _ in range(100):
        wanted = control.limit / 4
        control.observe(Load(max(0.0, wanted - 32), min(wanted, 32), 0.5), control.limit)
        seen.append(control.limit)
    assert min(seen[30:]) >= 100
    assert max(seen[30:]) <= 136
