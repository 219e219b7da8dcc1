"""Advantages compared with hand-computed values, TRL's GRPOTrainer and RLOOTrainer, and their full definitions."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentfactory.trainers.loop.advantages import (
    generalized_advantages,
    grpo,
    grpo_advantages,
    overlong_penalty,
    process_advantages,
    raft_advantages,
    returns,
    rloo_advantages,
    whiten,
)
from tests.trainers.trl_oracle import Chains, RlooOracle, make_oracle

pytestmark = pytest.mark.numbers

NAN = float("nan")


def test_group_advantages_by_hand() -> None:
    # mean 2, sample variance (1 + 0 + 1) / 2 = 1
    assert grpo_advantages([1.0, 2.0, 3.0]) == pytest.approx([-1 / 1.0001, 0.0, 1 / 1.0001])
    assert grpo_advantages([1.0, 2.0, 3.0], "none") == pytest.approx([-1.0, 0.0, 1.0])
    assert grpo_advantages([1.0, 2.0, 3.0], "batch", 0.5) == pytest.approx([-1 / 0.5001, 0.0, 1 / 0.5001])
    with pytest.raises(ValueError, match="the standard deviation of the batch's rewards"):
        grpo_advantages([0.0, 1.0], "batch")
    # the broken chain is excluded everywhere
    assert grpo_advantages([1.0, None, 2.0, 3.0]) == pytest.approx([-1 / 1.0001, 0.0, 0.0, 1 / 1.0001])


def test_rejection_sampling_selects_the_best() -> None:
    assert raft_advantages([0.5, None, 2.0, -1.0, 2.0]) == [0.0, 0.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "estimate",
    [
        *(grpo_advantages, raft_advantages, rloo_advantages),
        # also those of the batch
        lambda rewards: grpo([0.0, 1.0], rewards, "batch"),
    ],
)
def test_rewards_that_are_not_finite_are_refused(estimate: Callable[..., Any]) -> None:
    for rewards in ([float("inf"), 0.0], [NAN, 1.0]):
        with pytest.raises(ValueError, match=r"rewards must be finite numbers, not \[(inf|nan), "):
            estimate(rewards)


@pytest.mark.parametrize("rewards", [[0.1] * 7, [None, 0.7], [0.5], [None, None], []])
def test_nothing_to_compare_is_exactly_zero(rewards: list[float | None]) -> None:
    zeros = [0.0] * len(rewards)
    assert grpo_advantages(rewards) == grpo_advantages(rewards, "batch", 1.0) == rloo_advantages(rewards) == zeros
    assert raft_advantages(rewards) == zeros


REWARDS = [0.3, None, 0.9, 0.1, None, 0.35, 0.35, 0.2, 0.5, 0.5, 0.5, 0.5]
GROUPS = [REWARDS[0:4], REWARDS[4:8], REWARDS[8:12]]


def test_leave_one_out_equals_trl(model_folder: Path, tmp_path: Path) -> None:
    chains = Chains.random(12)
    chains.rewards = REWARDS
    oracle = make_oracle(RlooOracle, model_folder, tmp_path, chains, 4, beta=0.0, normalize_advantages=False)
    ours = [value for group in GROUPS for value in rloo_advantages(group)]
    assert ours == pytest.approx(oracle.score()["advantages"].tolist(), abs=1e-12)


def test_turn_advantages_by_hand() -> None:
    """Rewards 1, 0 | 2 | 1 of the turns of three chains: mean 1, sample variance (0 + 1 + 1 + 0) / 3."""
    unit = 1 / (math.sqrt(2 / 3) + 1e-4)
    found = process_advantages([[1.0, 0.0], [2.0], [], [1.0]])
    assert found == [pytest.approx(values) for values in ([-unit, -unit], [unit], [], [0.0])]
    assert process_advantages([[1.0, 0.0], [2.0], [1.0]], "none") == [[-1.0, -1.0], [1.0], [0.0]]
    assert process_advantages([[0.5, 0.5], [0.5]]) == [[0.0, 0.0], [0.0]]


def test_returns_by_hand() -> None:
    # 4, 2 + 4 / 2, 0 + 4 / 2
    assert returns([0.0, 2.0, 4.0], 0.5) == [2.0, 4.0, 4.0]
    assert returns([0.0, 0.0, 1.0]) == [1.0, 1.0, 1.0]
    assert returns([]) == []


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.99, 0.9), (0.9, 0.0)])
def test_gae_steps_over_tool_tokens(gamma: float, lam: float) -> None:
    """Against equation 16 as a sum over all later sampled tokens of a whole row, in which tool tokens hold NaN."""
    rng = random.Random(1)
    mask = [0, 0, 1, 1, 0, 0, 0, 1, 0, 1, 1, 1, 0]
    rewards, values = ([rng.gauss(0, 1) if kept else NAN for kept in mask] for _ in range(2))
    steps = [position for position, kept in enumerate(mask) if kept]
    wanted = []
    for start in range(len(steps)):
        total = 0.0
        for ahead, step in enumerate(steps[start:]):
            following = values[steps[start + ahead + 1]] if start + ahead + 1 < len(steps) else 0.0
            total += (gamma * lam) ** ahead * (rewards[step] + gamma * following - values[step])
        wanted.append(total)
    own_rewards, own_values = [rewards[step] for step in steps], [values[step] for step in steps]
    with pytest.raises(ValueError, match=rf"{len(steps)} rewards came with 0 values"):
        generalized_advantages(own_rewards, [], gamma, lam)
    advantages, targets = generalized_advantages(own_rewards, own_values, gamma, lam)
    assert advantages == pytest.approx(wanted, abs=1e-12)
    assert targets == pytest.approx([a + v for a, v in zip(wanted, own_values, strict=True)], abs=1e-12)
    if lam == 1.0:
        assert targets == pytest.approx(returns(own_rewards, gamma), abs=1e-12)


def test_whitening_by_hand() -> None:
    """Tokens 1, 1, 1 of one chain and 5 of another: mean 2, variance (1 + 1 + 1 + 9) / 4 = 3."""
    unit = 1 / math.sqrt(3)
    assert whiten([[1.0] * 3, [], [5.0]]) == [pytest.approx([-unit] * 3), [], pytest.approx([3 * unit])]
    assert whiten([[0.1, 0.1], [0.1]]) == [[0.0, 0.0], [0.0]]
    assert whiten([[], []]) == [[], []]
    assert whiten([]) == []


@pytest.mark.parametrize(("length", "wanted"), [(0, 0.0), (80, 0.0), (85, -0.5), (90, -1.0), (100, -2.0), (120, -2.0)])
def test_overlong_punishment_by_hand(length: int, wanted: float) -> None:
    """A limit of 100, and a penalty of -2 over the last 20 tokens before it: -0.1 per token."""
    assert overlong_penalty(length, 100, 20, 2.0) == pytest.approx(wanted)
