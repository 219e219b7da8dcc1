"""Admission of chains by the tokens of their contexts, and by their number."""

import asyncio
from collections import Counter
from math import ceil
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import event, given, settings
from hypothesis import strategies as st

from agentfactory.rollout.chains.concurrency import Places
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.inference.admission import FULL, Admission, Cache, State
from agentfactory.rollout.inference.http_transport import InferenceError
from agentfactory.rollout.inference.routing import PrefixTokens, Replica
from agentfactory.rollout.inference.server_metrics import Load

LONGEST = 400


def check_seats(admission: Admission) -> None:
    """Compare the counts with those of all chains."""
    used = dict[object, float]()
    for home, cache in admission.caches.items():
        seated = [chain for chain in admission.chains.values() if chain.home == home]
        # contexts that have a block each share none
        blocks = {chain: chain.shared // cache.size if cache.size < LONGEST else 0 for chain in seated}
        shared = {chain.opening: blocks[chain] for chain in seated if chain.opening is not None}
        used[home] = sum(chain.taken for chain in seated) + sum(shared.values())
        running = [chain for chain in seated if chain.state is State.RUNNING]
        assert all(ceil(chain.tokens / cache.size) <= chain.taken + blocks[chain] for chain in running)
    assert {home: blocks for home, blocks in used.items() if blocks} == {
        home: blocks for home, blocks in admission.used.items() if blocks
    }
    assert Counter(chain.state for chain in admission.chains.values()) == +admission.states


@settings(deadline=None)
@given(st.data())
def test_seats_stay_within_the_caches_and_every_chain_ends(data: st.DataObject) -> None:
    """Also when chains are killed, and replicas come, go and change."""

    def caches() -> dict[object, Cache]:
        sizes = data.draw(st.lists(st.integers(20, 3000), min_size=1, max_size=3))
        return {number: Cache(tokens // size, size) for number, tokens in enumerate(sizes)}

    size, slots = data.draw(st.sampled_from([1, 16, LONGEST])), data.draw(st.sampled_from([2, 8, 64]))
    admission = Admission(caches(), LONGEST, slots)
    turns = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=24))
    group, left = data.draw(st.integers(1, 4)), dict[Any, int](enumerate(turns))
    may = set[Any]()
    for key in left:
        admission.enter(key, key // group)

    def settle() -> None:
        # seats that replicas lost, or that outgrew them, are no admission; chains that start give theirs to held ones
        starting = Counter[object]()
        for chain in admission.chains.values():
            starting[chain.home] += ceil(chain.taken) if chain.state is State.STARTING else 0
        full = {at: admission.used[at] - starting[at] > FULL * cache.blocks for at, cache in admission.caches.items()}
        for chain in admission.admit():
            assert chain.home in admission.caches
            alone = sum(other.home == chain.home for other in admission.chains.values()) == 1
            assert alone or not full[chain.home]
            assert alone or admission.used[chain.home] <= admission.caches[chain.home].blocks
            if chain.state is State.STARTING:
                assert not any(other.state is State.HELD for other in admission.chains.values())
            may.add(chain.key)
        check_seats(admission)

    settle()
    while left:
        assert may, "a chain waits although none runs"
        key = data.draw(st.sampled_from(sorted(may, key=str)))
        chain = admission.chains[key]
        match data.draw(st.sampled_from(["go on", "go on", "go on", "kill", "caches"])):
            case "kill":
                victim = data.draw(st.sampled_from(sorted(left)))
                admission.leave(victim)
                may.discard(victim)
                del left[victim]
            case "caches":
                admission.resize(caches())
                event("other caches")
            case _ if chain.state is State.RUNNING:
                admission.answer(key)
                left[key] -= 1
            case _ if not left[key]:
                admission.leave(key)
                may.discard(key)
                del left[key]
            case _:
                first = chain.state is State.STARTING
                tokens = data.draw(st.integers(1, LONGEST if first else 100))
                admission.ask(
                    key, *((tokens, (key // group, tokens)) if first else (min(LONGEST, chain.tokens + tokens),))
                )
                if chain.state is State.HELD:
                    event("held")
                    may.discard(key)
                    older = [other for other in admission.chains.values() if other.order < chain.order]
                    assert older or chain.home is None
        settle()
    assert not admission.states.total()
    assert not any(admission.used.values())
    assert not admission._groups


def test_a_number_is_a_number() -> None:
    admission = Admission({0: Cache(2, LONGEST)}, LONGEST)
    for key in range(4):
        admission.enter(key, key)
    assert [chain.key for chain in admission.admit()] == [0, 1]
    for _ in range(3):
        admission.ask(0, 300)
        assert admission.chains[0].state is State.RUNNING
        admission.answer(0)
    admission.leave(0)
    assert [chain.key for chain in admission.admit()] == [2]
    admission.resize({0: Cache(1, LONGEST)})
    admission.leave(1)
    assert admission.admit() == [], "chains that have begun go on, and others wait"


def test_the_youngest_gives_its_seat_and_the_oldest_gets_the_next_one() -> None:
    admission = Admission({0: Cache(1000, 1)}, 800)
    for key in "abc":
        admission.enter(key, key)
    assert [chain.key for chain in admission.admit()] == ["a"], "nothing is known of lengths"
    admission.ask("a", 100)
    admission.answer("a")
    assert [chain.key for chain in admission.admit()] == ["b", "c"]
    for key in "bc":
        admission.ask(key, 200)
        admission.answer(key)
    admission.ask("a", 700)
    assert admission.chains["c"].home is None
    assert admission.chains["a"].state is State.RUNNING
    admission.ask("c", 250)
    admission.ask("b", 500)
    assert {key: admission.chains[key].state for key in "bc"} == {"b": State.HELD, "c": State.HELD}
    admission.enter("d", "a")
    admission.answer("a")
    admission.leave("a")
    assert [chain.key for chain in admission.admit()] == ["b"], "no chain begins while others are held"
    admission.answer("b")
    admission.leave("b")
    assert next(chain.key for chain in admission.admit()) == "c"


def test_a_chain_that_starts_does_not_keep_others_from_ending() -> None:
    """It may be older, and wait for an environment that they have."""
    admission = Admission({0: Cache(850, 1)}, 800)
    for key, group in (("other", 1), ("young", 2)):
        admission.enter(key, group)
        assert [chain.key for chain in admission.admit()] == [key]
        admission.ask(key, 100)
        admission.answer(key)
    admission.enter("old", 1)
    admission.leave("other")
    assert [chain.key for chain in admission.admit()] == ["old"]
    admission.ask("young", 800)
    assert admission.chains["young"].state is State.RUNNING
    admission.ask("old", 200)
    assert admission.chains["old"].state is State.HELD


def test_chains_that_have_lost_their_seats_leave_room_to_others() -> None:
    admission = Admission({0: Cache(100, 16)}, 1600)
    for key in "ab":
        admission.enter(key, key)
        admission.admit()
        admission.ask(key, 200, key)
        admission.answer(key)
    admission.ask("a", 1500)
    assert admission.chains["b"].home is None
    admission.answer("a")
    admission.leave("a")
    # while b is in its tool
    admission.enter("c", "c")
    assert [chain.key for chain in admission.admit()] == ["c"]
    # an agent's own context is shorter than its first prompt
    admission.ask("c", 800, "c")
    admission.answer("c")
    admission.ask("c", 100)
    assert admission.used[0] == admission.chains["c"].taken > 0


async def test_a_server_that_hangs_keeps_no_chain_from_starting() -> None:
    reads = 0

    async def loads() -> dict[Replica, Load]:
        nonlocal reads
        reads += 1
        if reads > 1:
            await asyncio.sleep(60)
        raise InferenceError("no")

    fields = {"rollout": {"max_total_tokens": 64}, "server": {"max_num_seqs": 100}}
    recipe = RolloutRecipe.model_validate({"model": {"path": "m"}, **fields})
    places = Places(recipe, cast(Any, SimpleNamespace(loads=loads)))

    async def chain(name: str) -> None:
        async with places.place(name, name):
            await asyncio.sleep(0)

    async with asyncio.timeout(10):
        await chain("first")
        places._due = 0.0
        late = asyncio.create_task(chain("late"))
        await asyncio.sleep(0)
        await asyncio.gather(*(chain(f"{number}") for number in range(50)))
        late.cancel()


async def test_overlapping_turns_of_a_chain_stop_its_clock_together() -> None:
    fields = {"rollout": {"concurrency": 1, "max_total_tokens": 100}}
    places = Places(RolloutRecipe.model_validate({"model": {"path": "m"}, **fields}))
    async with places.place("a", "a") as place, asyncio.timeout(60) as place.timer:
        with place._held():
            with place._held():
                await asyncio.sleep(0)
                assert place.timer.when() is None
            assert place.timer.when() is None
        assert place.timer.when() is not None


async def test_a_held_turn_stops_the_clock_and_ends_with_its_client() -> None:
    fields = {"rollout": {"concurrency": 2, "max_total_tokens": 100}}
    places = Places(RolloutRecipe.model_validate({"model": {"path": "m"}, **fields}))
    held, sampled = list[float](), list[str]()

    async def chain(name: str, tokens: int, more: int, tool: float) -> None:
        async with places.place(name, name) as place, asyncio.timeout(0.3 + tool) as place.timer:
            place.note = lambda start, end: held.append(end - start)
            await asyncio.sleep(0.01)
            async with place.turn([1] * tokens):
                pass
            await asyncio.sleep(tool)
            async with place.turn([1] * (tokens + more)):
                sampled.append(name)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(chain("old", 30, 40, 0.5))
        young = tasks.create_task(chain("young", 30, 30, 0.05))
        await asyncio.sleep(0)
        places.admission.resize({0: Cache(80, 1)})
        await asyncio.sleep(0.15)
        assert [one.state for one in places.admission.chains.values()] == [State.IDLE, State.HELD]
        impatient = asyncio.create_task(chain("impatient", 10, 10, 0))
        await asyncio.sleep(0.05)
        assert not young.done()
        impatient.cancel()
    assert sampled == ["old", "young"]
    assert max(held) > 0.3, "longer than its limit"
    assert not places.admission.chains


async def test_turns_follow_their_seats() -> None:
    """Also where a server does not report its cache."""
    one, other = Replica("http://a"), Replica("http://b")
    assigned: dict[str, Replica] = {}

    async def loads() -> dict[Replica, Load]:
        return {one: Load(0, 0, 0, blocks=10, block_size=16), other: Load(0, 0, 0)}

    client = cast(Any, SimpleNamespace(loads=loads, router=SimpleNamespace(assign=assigned.__setitem__)))
    fields = {"rollout": {"max_total_tokens": 64}, "server": {"max_num_seqs": 2}}
    places = Places(RolloutRecipe.model_validate({"model": {"path": "m"}, **fields}), client)
    places.workers = 2
    async with places.place("a", "a"), places.place("b", "b"), places.place("c", "b"):
        assert places.admission.caches == {one: Cache(5, 16), other: Cache(2, 64)}
        assert set(assigned.values()) == {one, other}


def test_prefixes_are_computed_once_for_each_version_of_the_weights() -> None:
    tokens = PrefixTokens()
    tokens.note("a", [1] * 10, "v0", 5)
    tokens.note("b", [1] * 10, "v0", 5)  # the same prompt
    tokens.note("a", [1] * 18, "v0", 5)  # three tokens of a tool
    tokens.note("b", [1] * 18, "v1", 5)
    assert (tokens.sent, tokens.once) == (10 + 10 + 18 + 18, 10 + 0 + 3 + 18)
