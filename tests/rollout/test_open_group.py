"""The states of a started group."""

import pytest

from agentfactory.rollout.data import Place
from agentfactory.rollout.groups.open_group import OpenGroup, State
from agentfactory.rollout.groups.resumed_positions import Pending
from agentfactory.rollout.trajectory import Group, Outcome, Trajectory

LATER = [State.DELIVERED, State.CANCELLED, State.DROPPED]


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


@pytest.mark.parametrize("state", [State.DELIVERED, State.CANCELLED])
def test_a_batch_takes_a_running_group_or_leaves_it_for_good(state: State) -> None:
    made = group()
    made.end(0)
    made.move(state)
    assert made.state is state
    # a tool that fails while its chain is cancelled ends nothing
    with pytest.raises(ValueError, match=f"which is {state}"):
        made.end(1)


@pytest.mark.parametrize("state", LATER)
def test_a_complete_group_is_delivered_cancelled_or_dropped(state: State) -> None:
    made = group(State.COMPLETE)
    made.move(state)
    assert made.state is state


@pytest.mark.parametrize(
    ("state", "following"),
    [
        (State.RUNNING, State.DROPPED),
        (State.RUNNING, State.RUNNING),
        (State.COMPLETE, State.RUNNING),
        (State.COMPLETE, State.COMPLETE),
        *((state, following) for state in LATER for following in State),
    ],
)
def test_other_changes_are_errors(state: State, following: State) -> None:
    made = group(state)
    with pytest.raises(ValueError, match=f"cannot become {following}"):
        made.move(following)
    assert made.state is state


def test_a_group_of_an_earlier_run_is_complete() -> None:
    chains = [Trajectory("g000002.0", [], [], Outcome.COMPLETED, 1.0)]
    made = OpenGroup.resumed(Pending(Place(2), Group("g000002", {}, chains, version=5), oldest=4))
    assert (made.id, made.state, made.version, made.oldest, made.ended) == ("g000002", State.COMPLETE, 5, 4, chains)
    assert made.left == []
    assert made.saved is None
