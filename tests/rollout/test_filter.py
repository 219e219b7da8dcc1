"""A group's training value by its chains' endings and rewards, and runs without hope of any signal."""

from typing import Any

import pytest

from agentfactory.rollout.config import OutcomePolicy, RolloutConfig
from agentfactory.rollout.groups.group_filter import (
    MAX_EQUAL_IN_A_ROW,
    MAX_LOST_IN_A_ROW,
    GroupFilter,
    Worth,
    counted,
    worth,
)
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


def test_chains_that_count() -> None:
    chains = [WON, BROKEN, MASKED, DROPPED, LATE, LATE_UNSCORED]
    assert counted(chains, RolloutConfig.model_validate(CUT)) == [WON, MASKED, LATE]
    assert counted(chains, RolloutConfig()) == [WON, MASKED, DROPPED], "a chain that broke does not count by itself"


def test_a_group_of_one_chain_is_kept() -> None:
    groups = GroupFilter(RolloutConfig(group_size=1), at_once=1)
    assert [groups.judge([chain]) for chain in (WON, BROKEN)] == [Worth.TEACHES, Worth.LOST]


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


def test_where_there_is_no_hope_the_commonest_error_is_named() -> None:
    groups = GroupFilter(RolloutConfig(), at_once=4)
    bug, page = "RewardError: shaped raised KeyError: 'lft'", "x\n" * 1000
    for number in range(MAX_LOST_IN_A_ROW):
        wrong = Trajectory("c", [], [], Outcome.REWARD_ERROR, error=bug if number % 4 else f"{number} {page}")
        groups.judge([wrong, BROKEN if number % 8 else wrong])
    assert (groups.no_hope() or "").endswith(f"; 72 of 128 chains ended as reward_error, such as: {bug}")


def test_there_is_no_hope_when_all_rewards_are_equal() -> None:
    config = RolloutConfig.model_validate({"equal_rewards": "refill"})
    groups = GroupFilter(config, at_once=4)
    for _ in range(MAX_EQUAL_IN_A_ROW - 1):
        groups.judge([LOST, LOST])
    assert groups.no_hope() is None
    groups.judge([WON, WON])
    assert (groups.no_hope() or "").startswith(
        "256 groups in a row had chains of equal rewards (255 groups of reward 0, 1 groups of reward 1): the tasks are "
        "too easy or too hard"
    )
    groups.judge([WON, LOST])
    assert groups.no_hope() is None
    many = GroupFilter(config, at_once=100)
    for _ in range(399):
        many.judge([LOST, LOST])
    assert many.no_hope() is None, "the groups that are open at once are given their time"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"on_outcome": {"reward_error": "keep"}}, "on_outcome.reward_error: got keep.* use drop or retry"),
        ({"on_outcome": {"reward_error": "mask"}}, "on_outcome.reward_error: got mask"),
        ({"on_outcome": {"cancelled": "retry"}}, "on_outcome.cancelled: got retry.* use drop"),
        ({"on_outcome": {"finished": "keep"}}, "on_outcome.finished"),
        ({"on_outcome": {"completed": "refill"}}, "on_outcome.completed"),
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        RolloutConfig.model_validate(fields)


def test_policies_by_default() -> None:
    config = RolloutConfig.model_validate({"on_outcome": {"max_tokens": "mask", "timeout": "retry"}})
    policies = {outcome: config.outcome_policy(outcome) for outcome in Outcome}
    assert policies.pop(Outcome.MAX_TOKENS) is OutcomePolicy.MASK
    assert policies.pop(Outcome.TIMEOUT) is OutcomePolicy.RETRY
    for outcome, policy in policies.items():
        assert policy is (OutcomePolicy.DROP if outcome.failed else OutcomePolicy.KEEP)
    assert config.scored == {o for o in Outcome if not o.failed}
