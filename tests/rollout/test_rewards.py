"""`@reward`: arguments by name, sums, and mistakes that are told."""

from dataclasses import replace
from pathlib import Path

import pytest

from rollout.rewards import Rewards, prediction_of, reward
from rollout.trajectory import Outcome, Trajectory
from tools.messages import EnvironmentReward

MESSAGES = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "let me see", "tool_calls": []},
    {"role": "tool", "content": "5"},
    {"role": "assistant", "content": "4"},
    {"role": "tool", "content": "too late"},
]
TRAJECTORY = Trajectory("c", MESSAGES, [], Outcome.COMPLETED)


@reward
def exact(prediction: str, answer: str) -> dict:
    hit = float(prediction == answer)
    return {"reward": hit, "success": hit}


@reward
async def brevity(trajectory: Trajectory, environment: EnvironmentReward | None, scale: float = 0.5) -> float:
    return scale * (environment.reward if environment else 1.0) / len(trajectory.messages)


def test_the_prediction_is_the_last_assistant_message() -> None:
    assert prediction_of(TRAJECTORY) == "4"
    assert prediction_of(Trajectory("c", [], [], Outcome.COMPLETED)) == ""


async def test_rewards_are_summed_and_metrics_kept() -> None:
    rewards = Rewards([exact, brevity])
    scored = await rewards.score(TRAJECTORY, {"answer": "4"}, None)
    assert scored == EnvironmentReward(1.0 + 0.1, {"success": 1.0})
    scored = await rewards.score(TRAJECTORY, {"answer": "5", "scale": 5.0}, EnvironmentReward(2.0, {"moves": 3.0}))
    assert scored == EnvironmentReward(0.0 + 2.0, {"moves": 3.0, "success": 0.0})


async def test_without_rewards_the_environment_counts() -> None:
    given = EnvironmentReward(0.25, {"success": 0.0})
    assert await Rewards([]).score(TRAJECTORY, {}, given) == given
    with pytest.raises(ValueError, match="no reward"):
        await Rewards([]).score(TRAJECTORY, {}, None)


def test_a_field_that_no_row_has_is_told_before_the_run() -> None:
    with pytest.raises(ValueError, match=r"exact wants 'answer'.*question"):
        Rewards([exact]).check({"question": "q"})
    Rewards([exact, brevity]).check({"question": "q", "answer": "4"})


async def test_rewards_of_turns_are_summed_by_turn() -> None:
    @reward
    def effort(trajectory: Trajectory) -> dict:
        return {"reward": 1.0, "turn_rewards": [-0.5] * trajectory.turns}

    @reward
    def insight() -> dict:
        return {"reward": 0.0, "turn_rewards": (0, 2), "deep": True}

    chain = replace(TRAJECTORY, turns=2)
    scored = await Rewards([exact, effort, insight]).score(chain, {"answer": "4"}, None)
    assert scored == EnvironmentReward(2.0, {"success": 1.0, "deep": 1.0}, [-0.5, 1.5])
    with pytest.raises(ValueError, match="insight gave 2 turn_rewards, and the chain has 3 assistant turns"):
        await Rewards([effort, insight]).score(replace(TRAJECTORY, turns=3), {}, None)
    given = EnvironmentReward(0.5, {}, [1.0])
    with pytest.raises(ValueError, match="the environment gave 1 turn_rewards, and the chain has 2"):
        await Rewards([]).score(chain, {}, given)
    assert await Rewards([]).score(replace(chain, turns=1), {}, given) == given


@pytest.mark.parametrize(
    "result",
    [
        None,
        "high",
        {"success": 1},
        {"reward": None},
        float("nan"),
        {"reward": 1, "depth": float("inf")},
        {"reward": 1, "turn_rewards": 0.5},
        {"reward": 1, "turn_rewards": [0.5, None]},
        {"reward": 1, "turn_rewards": [float("nan"), 0.5]},
    ],
)
async def test_results_that_are_no_numbers_are_errors(result: object) -> None:
    @reward
    def odd() -> object:
        return result

    with pytest.raises(TypeError, match=r"odd.* returned"):
        await Rewards([odd]).score(TRAJECTORY, {}, None)


def test_parameters_must_have_names() -> None:
    with pytest.raises(TypeError, match="cannot be filled by name"):
        reward(lambda *everything: 0.0)


def test_loading(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from agentfactory import reward\n\n@reward\ndef one(): return 1\n\ndef two(): return 2\n"
    )
    assert len(Rewards.load(["mine.py:one"], tmp_path).functions) == 1
    with pytest.raises(ValueError, match=r"mine\.py:two is not a reward; put @reward"):
        Rewards.load(["mine.py:two"], tmp_path)
