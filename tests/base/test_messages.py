"""Tests of `EnvironmentReward`: parsing of verdicts, and sums."""

from typing import Any

import pytest

from agentfactory.base.messages import EnvironmentReward


@pytest.mark.parametrize(
    ("verdict", "reward"),
    [
        (1, EnvironmentReward(1.0)),
        ({"reward": 0.5, "success": True}, EnvironmentReward(0.5, {"success": 1.0})),
        ({"reward": 0, "turn_rewards": (1, 2.5)}, EnvironmentReward(0.0, {}, [1.0, 2.5])),
        ({"reward": 0, "turn_rewards": []}, EnvironmentReward(0.0, {}, [])),
    ],
)
def test_verdicts(verdict: Any, reward: EnvironmentReward) -> None:
    assert EnvironmentReward.parse(verdict, "it") == reward
    assert EnvironmentReward.parse(reward.to_json(), "it") == reward


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        ("much", "it returned 'much' for reward; it has to be a finite number"),
        ({"success": 1}, "it returned a dict without `reward`"),
        ({"reward": 10**400}, "for reward; it has to be a finite number"),
        (-1e308, "it returned -1e[+]308 for reward; it has to be a finite number between -1e[+]12 and 1e[+]12"),
        ({"reward": 1, "turn_rewards": [1e13]}, "it returned 10000000000000.0 for turn_rewards"),
        ({"reward": 1, "flops": 1e31}, "it returned 1e[+]31 for flops; .* between -1e[+]30 and 1e[+]30"),
        ({"reward": 1, **{f"m{i}": 1 for i in range(101)}}, "it returned 101 numbers beside the reward; "),
        ({"reward": 1, "m" * 101: 1}, "a metric called 'm{100}'; its name has to be of 1 to 100 printable"),
        ({"reward": 1, "a\ud800": 1}, r"a metric called 'a.ud800'"),
        ({"reward": 1, "turn_rewards": [1, [2]]}, r"it returned \[2\] for turn_rewards"),
    ],
)
def test_what_is_no_verdict(verdict: Any, reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        EnvironmentReward.parse(verdict, "it")


def test_sums() -> None:
    total = EnvironmentReward(0.0)
    total.add(EnvironmentReward(1.0, {"a": 1.0}))
    assert total == EnvironmentReward(1.0, {"a": 1.0})
    total.add(EnvironmentReward(0.5, {"b": 2.0}, [1.0, 2.0]))
    total.add(EnvironmentReward(0.5, {"a": 3.0}))
    total.add(EnvironmentReward(0.0, {}, [0.0, -1.0]))
    assert total == EnvironmentReward(2.0, {"a": 3.0, "b": 2.0}, [1.0, 1.0])
    with pytest.raises(ValueError, match="argument 2 is longer"):
        total.add(EnvironmentReward(0.0, {}, [1.0, 2.0, 3.0]))


def test_sums_keep_to_the_limits() -> None:
    """Check the bounds of sums: otherwise the mean of a group would overflow and end the run."""
    for total, other, problem in [
        (EnvironmentReward(9e11), EnvironmentReward(9e11), "rewards of the chain together returned 18.* for reward"),
        (EnvironmentReward(0, {}, [9e11]), EnvironmentReward(0, {}, [9e11]), "together returned 18.* for turn_rew"),
        (
            *(EnvironmentReward(0, {f"{name}{i}": 1.0 for i in range(60)}) for name in "ab"),
            "together returned 120 numbers beside",
        ),
    ]:
        with pytest.raises(TypeError, match=problem):
            total.add(other)
