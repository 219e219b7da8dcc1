"""The states of a started group."""

import pytest

from agentfactory.rollout.data import Place
from agentfactory.rollout.groups.open_group import OpenGroup, State
from agentfactory.rollout.groups.resumed_positions import Pending
from agentfactory.rollout.trajectory import Group, Outcome, Trajectory


def group(state: State = State.RUNNING) -> OpenGroup:
    made = OpenGroup(Place(7, attempt=1), {"question": "go"}, version=3, size=2)
    if state is not State.RUNNING:
        if state is not State.CANCELLED:
            made.end(0)
            made.end(1)
            made.move(State.COMPLETE)
        if state is not State.COMPLETE:
            made.move(state)
    return made


def test_chains_end_one_by_one_and_then_the_group_is_complete() -> None:
    made = group()
    assert [chain.id for chain in made.left] == ["g000007-1.0", "g000007-1.1"]
    made.end(1)
    assert [chain.id for chain in made.ended] == ["g000007-1.1"]
    with pytest.raises(ValueError, match=r"g000007-1 \(running, 1 running chains\) cannot become complete"):
        made.move(State.COMPLETE)
    made.end(0)
    made.move(State.COMPLETE)
    assert made.as_group() == Group("g000007-1", {"question": "go"}, made.ended, version=3)


def test_a_chain_may_be_tried_again_while_it_runs() -> None:
    made = group()
    made.retry(1)
    assert [chain.id for chain in made.left] == ["g000007-1.0", "g000007-1.1.retry"]
    made.end(1)
    with pytest.raises(ValueError, match="chain 1 of group g000007-1, which is running, does not run"):
        made.end(1)


def test_the_first_turn_decides_how_old_a_group_is() -> None:
    made = group()
    made.note_turn(4)
    made.note_turn(5)
    assert made.oldest == 4


MAY_FOLLOW = {
    State.RUNNING: [State.COMPLETE, State.DELIVERED, State.CANCELLED],
    State.COMPLETE: [State.DELIVERED, State.CANCELLED, State.DROPPED],
}


@pytest.mark.parametrize("following", State)
@pytest.mark.parametrize("state", State)
def test_states_follow_each_other(state: State, following: State) -> None:
    made = group(state)
    if (state, following) == (State.RUNNING, State.COMPLETE):
        made.running.clear()
    if following in MAY_FOLLOW.get(state, ()):
        made.move(following)
        assert made.state is following
        return
    with pytest.raises(ValueError, match=f"cannot become {following}"):
        made.move(following)
    assert made.state is state


def test_a_chain_that_ends_while_its_group_is_cancelled_ends_nothing() -> None:
    made = group(State.CANCELLED)
    with pytest.raises(ValueError, match=f"which is {State.CANCELLED}"):
        made.end(1)


def test_a_group_of_an_earlier_run_is_complete() -> None:
    chains = [Trajectory("g000002.0", [], [], Outcome.COMPLETED, 1.0)]
    made = OpenGroup.resumed(Pending(Place(2), Group("g000002", {}, chains, version=5), oldest=4))
    assert (made.id, made.state, made.version, made.oldest, made.ended) == ("g000002", State.COMPLETE, 5, 4, chains)
    assert made.left == []
    assert made.saved is None
