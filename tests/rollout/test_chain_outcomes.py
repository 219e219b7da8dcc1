"""Warnings about chains' outcomes, and rewards that never work."""

from pathlib import Path

import pytest

from agentfactory.launching.progress import tell_warnings
from agentfactory.rollout.chains import chain_runner
from agentfactory.rollout.chains.chain_runner import FirstVerdicts, RolloutStoppedError
from agentfactory.rollout.chains.outcome_warnings import ChainOutcomes
from agentfactory.rollout.config import RolloutConfig
from agentfactory.rollout.trajectory import Outcome, Trajectory
from agentfactory.tools.errors import SettingError
from tests.scripted_chains import scripted_chains


def chain(outcome: Outcome = Outcome.COMPLETED, error: str | None = None) -> Trajectory:
    return Trajectory("c", [], [], outcome, None if outcome.failed else 0.0, error=error)


def told(chains: list[Trajectory], config: RolloutConfig | None = None) -> list[str]:
    said: list[str] = []
    outcomes = ChainOutcomes(config or RolloutConfig())
    with tell_warnings(said.append):
        for each in chains:
            outcomes.note(each)
    return said


GONE = chain(Outcome.TOOL_INFRASTRUCTURE, "tool server search died")


def test_chains_that_are_lost_are_told_once_and_again_in_the_last_lines() -> None:
    first, last = told([chain()] * 16 + [GONE] * 80 + [chain()] * 32 + [GONE] * 20)
    such = "chains ended as tool_infrastructure, such as: tool server search died; they are not trained"
    assert first == f"warning: 4 of 20 {such}"
    assert last == f"warnings of this run:\n  100 of 148 {such}"


def test_a_few_lost_chains_are_no_news() -> None:
    assert told([*[chain()] * 30, GONE] * 20) == []
    assert told([GONE] * 3) == []


def test_what_the_recipe_drops_and_what_does_not_fit_are_told_too() -> None:
    cut, long = chain(Outcome.MAX_TOKENS), chain(Outcome.CONTEXT_OVERFLOW)
    assert told([cut] * 50) == []
    assert (
        "50 of 50 chains ended as max_tokens; they are not trained"
        in told([cut] * 50, RolloutConfig.model_validate({"on_outcome": {"max_tokens": "drop"}}))[-1]
    )
    assert told([long] * 8)[-1].endswith(
        "8 of 8 chains ended as context_overflow; fix: raise rollout.max_total_tokens, or set rollout.context"
    )


TASK = {"question": "go"}
BROKEN = chain(Outcome.REWARD_ERROR, "right raised KeyError: 'lft'")


@pytest.mark.parametrize(("group_size", "chains"), [(16, 16), (8, 8), (1, 4)])
def test_a_reward_that_never_works_costs_as_many_chains_as_a_group_has(group_size: int, chains: int) -> None:
    verdicts = FirstVerdicts(group_size, tasks=100)
    tasks = [TASK.copy() for _ in range(4)]
    for number in range(chains - 1):
        verdicts.note(BROKEN, tasks[number % 4])
        verdicts.note(GONE, tasks[number % 4])
    with pytest.raises(RolloutStoppedError, match=f"{chains} ended as reward_error: right raised KeyError: 'lft'; "):
        verdicts.note(BROKEN, tasks[0])


def test_one_row_that_no_reward_can_judge_stops_nothing() -> None:
    verdicts = FirstVerdicts(2, tasks=100)
    # rows may be equal
    first, second, third = (TASK.copy() for _ in range(3))
    for _ in range(50):
        verdicts.note(BROKEN, first)
        verdicts.note(BROKEN, second)
    with pytest.raises(RolloutStoppedError):
        verdicts.note(BROKEN, third)
    alone = FirstVerdicts(2, tasks=1)
    for _ in range(3):
        alone.note(BROKEN, first)
    with pytest.raises(RolloutStoppedError):
        alone.note(BROKEN, first)


def test_a_reward_that_has_worked_may_fail() -> None:
    verdicts = FirstVerdicts(2, tasks=1)
    verdicts.note(chain(), TASK)
    for _ in range(100):
        verdicts.note(BROKEN, TASK)
    # the reward per chain works; the reward that compares chains does not
    for _ in range(3):
        verdicts.note_group(BROKEN, TASK)
    with pytest.raises(RolloutStoppedError):
        verdicts.note_group(BROKEN, TASK)


RAISES = """
from agentfactory import reward

@reward
def right(trajectory):
    raise KeyError("lft")
"""


async def test_only_a_watched_runner_stops_when_its_first_rewards_fail(tmp_path: Path) -> None:
    fields = {"tools": [], "rewards": ["notes.py:right"], "rollout": {"group_size": 2}}
    async with scripted_chains(tmp_path, ["done"] * 9, source=RAISES, **fields) as chains:
        await chains.runner.check([{"question": "go"}])
        for _ in range(5):
            assert (await chains.run()).outcome is Outcome.REWARD_ERROR
        chains.runner = chains.runner.watched(tasks=1)
        for _ in range(3):
            await chains.run()
        with pytest.raises(RolloutStoppedError, match="4 ended as reward_error"):
            await chains.run()


HANGS = """
import time

from agentfactory import Environment, tool

class Hangs(Environment):
    def reset(self, **task):
        time.sleep(6)

    @tool
    def look(self) -> str:
        "Look."
        return "nothing"

    def reward(self):
        return 1.0
"""


@pytest.mark.slow
async def test_a_reset_that_hangs_is_announced_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the check of the first task, and in a chain."""
    monkeypatch.setattr(chain_runner, "_SLOW_SECONDS", 0.1)
    monkeypatch.setattr(chain_runner, "_LEAST_CHECK_SECONDS", 0.5)
    caplog.set_level("INFO")
    fields = {"tools": ["notes.py:Hangs"], "rewards": [], "rollout": {"timeout_seconds": 0.5}}
    async with scripted_chains(tmp_path, ["done"], source=HANGS, **fields) as chains:
        problem = r"^data: with row 1, the first reset, of Hangs, did not end within 0\.5 s; fix: "
        with pytest.raises(SettingError, match=problem):
            await chains.runner.check([{"question": "go"}])
        assert "still waiting for the first reset, of Hangs, for up to 0.5 s" in caplog.messages
        trajectory = await chains.run()
        assert trajectory.outcome is Outcome.TIMEOUT
        assert trajectory.error is not None
        assert trajectory.error.endswith(
            "; the reset of its environments, or the start of its tool servers had not ended"
        )
