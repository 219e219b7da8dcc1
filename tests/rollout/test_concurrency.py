"""Admission of chains by the tokens of their contexts, and by their number."""

from collections import Counter
from math import ceil
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from agentfactory.rollout.inference.admission import FULL, Admission, Cache, State

LONGEST = 400


def check_seats(admission: Admission) -> None:
    """Compare the counts with those of all chains."""
    used = dict[object, float]()
    for home, cache in admission.caches.items():
        seated = [chain for chain in admission.chains.values() if chain.home == home]
        shared = {chain.opening: chain.shared for chain in seated if chain.opening is not None}
        used[home] = sum(chain.taken for chain in seated) + sum(tokens // cache.size for tokens in shared.values())
        running = [chain for chain in seated if chain.state is State.RUNNING]
        assert all(ceil(chain.tokens / cache.size) <= chain.taken + chain.shared // cache.size for chain in running)
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
        # seats that replicas lost, or that outgrew them, are no admission
        full = {home: admission.used[home] > FULL * cache.blocks for home, cache in admission.caches.items()}
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
    admission = Admission({0: Cache(1000, 1)}, 1000)
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
