"""A group's training value by its chains' endings and rewards, and runs without hope of any signal."""

from typing import Any

import pytest

from agentfactory.rollout.config import RolloutConfig
from agentfactory.rollout.groups.group_filter import MAX_LOST_IN_A_ROW, GroupFilter, Worth, worth
from agentfactory.rollout.trajectory import Outcome, Trajectory

CUT = {"on_outcome": {"max_tokens": "mask", "max_turns": "drop", "timeout": "keep"}}


def chain(reward: float | None, outcome: Outcome = Outcome.COMPLETED, turns: list[float] | None = None) -> Trajectory:
    return Trajectory("c", [], [], outcome, reward, turn_rewards=turns)


WON, LOST = chain(1.0), chain(0.0)
BROKEN = chain(None, Outcome.INFERENCE_ERROR)
MASKED, MASKED_WIN = chain(0.0, Outcome.MAX_TOKENS), chain(1.0, Outcome.MAX_TOKENS)
DROPPED = chain(0.0, Outcome.MAX_TURNS)
LATE = chain(0.0, Outcome.TIMEOUT)
LATE_UNSCORED = chain(None, Outcome.TIMEOUT)


@pytest.mark.parametrize(
    ("chains", "teaches"),
    [
        ([WON, LOST], Worth.TEACHES),
        ([WON, WON], Worth.EQUAL),
        ([WON], Worth.LOST),
        ([WON, BROKEN], Worth.LOST),
        ([WON, LOST, BROKEN], Worth.TEACHES),
        ([WON, MASKED], Worth.TEACHES),  # the masked one is in the baseline
        ([LOST, MASKED], Worth.EQUAL),
        ([MASKED, MASKED_WIN], Worth.LOST),  # none of its chains may be trained
        ([WON, DROPPED], Worth.LOST),
        ([WON, WON, DROPPED], Worth.EQUAL),
        ([WON, LATE], Worth.TEACHES),
        ([WON, LATE_UNSCORED], Worth.LOST),
        ([chain(1.0, turns=[0.5, 0.5]), chain(1.0, turns=[0.5, 0.5])], Worth.EQUAL),
        ([chain(1.0, turns=[0.5, 0.5]), chain(1.0, turns=[0.0, 1.0])], Worth.TEACHES),  # the rewarded turns differ
    ],
)
def test_what_a_group_teaches(chains: list[Trajectory], teaches: Worth) -> None:
    assert worth(chains, RolloutConfig.model_validate(CUT)) is teaches


@pytest.mark.parametrize("policy", ["drop", "refill"])
def test_equal_rewards_are_left_out_and_counted_where_the_recipe_says_so(policy: str) -> None:
    assert GroupFilter(RolloutConfig(), at_once=4).judge([WON, WON]) is Worth.TEACHES
    groups = GroupFilter(RolloutConfig.model_validate({"equal_rewards": policy}), at_once=4)
    found = [groups.judge(chains) for chains in ([WON, WON], [WON, LOST], [LOST, LOST], [BROKEN, WON])]
    assert found == [Worth.EQUAL, Worth.TEACHES, Worth.EQUAL, Worth.LOST]
    assert groups.take_figures() == {"chains": 0, "filtered/groups": 2}
    assert groups.take_figures() == {"chains": 0, "filtered/groups": 0}, "symptoms compare each step's"


def test_chains_that_do_not_count_are_counted_by_outcome() -> None:
    groups = GroupFilter(RolloutConfig.model_validate(CUT), at_once=4)
    for ended in (WON, MASKED, DROPPED, BROKEN, BROKEN, LATE, LATE_UNSCORED):
        groups.ended(ended)
    lost = {"filtered/inference_error": 2, "filtered/max_turns": 1, "filtered/timeout": 1}
    assert groups.take_figures() == {"chains": 7, "filtered/groups": 0, **lost}


def test_there_is_no_hope_when_all_groups_are_lost() -> None:
    groups = GroupFilter(RolloutConfig(), at_once=4)
    for _ in range(MAX_LOST_IN_A_ROW - 1):
        groups.judge([BROKEN, WON])
    assert groups.no_hope() is None
    groups.judge([WON, LOST])
    groups.judge([BROKEN, WON])
    assert groups.no_hope() is None, "not in a row"
    for _ in range(MAX_LOST_IN_A_ROW - 1):
        groups.judge([BROKEN, WON])
    reason = groups.no_hope() or ""
    assert "64 groups in a row had fewer than two chains that count" in reason
    assert reason.endswith("; 64 of 128 chains ended as inference_error"), "only of the groups in a row"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"on_outcome": {"reward_error": "keep"}}, "on_outcome.reward_error: got keep.* use drop or retry"),
        ({"on_outcome": {"cancelled": "retry"}}, "on_outcome.cancelled: got retry.* use drop"),
        ({"on_outcome": {"completed": "refill"}}, "on_outcome.completed"),
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        RolloutConfig.model_validate(fields)
