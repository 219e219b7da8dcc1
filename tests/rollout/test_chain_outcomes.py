"""Warnings about chains' outcomes, and rewards that never work."""

from pathlib import Path

import pytest

from agentfactory.launching.progress import tell_warnings
from agentfactory.rollout.chains.chain_runner import FirstVerdicts, RolloutStoppedError
from agentfactory.rollout.chains.outcome_warnings import ChainOutcomes
from agentfactory.rollout.config import RolloutConfig
from agentfactory.rollout.inference.http_transport import InferenceError
from agentfactory.rollout.trajectory import Activity, Outcome, Trajectory
from tests.scripted_chains import scripted_chains


def chain(outcome: Outcome = Outcome.COMPLETED, error: str | None = None) -> Trajectory:
    return Trajectory("c", [], [], outcome, None if outcome.failed else 0.0, error=error)


def told(chains: list[Trajectory]) -> list[str]:
    said: list[str] = []
    outcomes = ChainOutcomes(RolloutConfig())
    with tell_warnings(said.append):
        for each in chains:
            outcomes.note(each)
    return said


GONE = chain(Outcome.TOOL_INFRASTRUCTURE, "tool server search died")


def test_chains_that_are_lost_are_told_once_and_again_in_the_last_lines() -> None:
    first, last = told([chain()] * 16 + [GONE] * 80 + [chain()] * 32 + [GONE] * 20)
    such = "chains ended as tool_infrastructure, such as: tool server search died; they are not trained; fix: "
    such += "repair the tool server; its own output is in the log"
    assert first == f"warning: 4 of 20 {such}"
    assert last == f"warnings of this run:\n  100 of 148 {such}"


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


def test_a_reward_that_has_worked_may_fail() -> None:
    verdicts = FirstVerdicts(2, tasks=1)
    verdicts.note(chain(), TASK)
    for _ in range(100):
        verdicts.note(BROKEN, TASK)
    # the reward per chain works; the reward that compares chains does not
    for _ in range(3):
        verdicts.note(BROKEN, TASK, by_group=True)
    with pytest.raises(RolloutStoppedError):
        verdicts.note(BROKEN, TASK, by_group=True)


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


async def test_chains_that_may_be_trained_are_graded_outside_their_place(tmp_path: Path) -> None:
    """A grade that fails costs the chain, and its reward; chains that are dropped are not graded."""
    free: list[int] = []

    async def grade(trajectory: Trajectory) -> int:
        free.append(len(chains.runner.places.admission.chains))
        if trajectory.turns == 2:
            raise InferenceError("no grades")
        return 7

    fields = {"rewards": ["notes.py:turns"], "rollout": {"max_turns": 3, "on_outcome": {"max_turns": "drop"}}}
    call = '<tool_call>\n{"name": "note", "arguments": {"text": "a"}}\n</tool_call>'
    answers = ["done", call, "done", call, call, call, "done"]
    async with scripted_chains(tmp_path, answers, **fields) as chains:
        plain, chains.runner = chains.runner, chains.runner.graded_by(grade)
        graded, failed, dropped = [await chains.run() for _ in range(3)]
        chains.runner = plain
        assert "teacher_tokens" not in (await chains.run()).metrics
    assert free == [0, 0]
    assert (graded.outcome, graded.reward, graded.metrics["teacher_tokens"]) == (Outcome.COMPLETED, 1.0, 7.0)
    assert graded.timeline[-1].activity is Activity.TEACHER
    assert graded.seconds >= graded.timeline[-1].end - 1e-3
    assert (failed.outcome, failed.reward, failed.error) == (Outcome.INFERENCE_ERROR, None, "teacher: no grades")
    assert failed.metrics["teacher_tokens"] == 0
    assert (dropped.outcome, dropped.metrics["teacher_tokens"]) == (Outcome.MAX_TURNS, 0.0)
    assert Activity.TEACHER not in {stretch.activity for stretch in dropped.timeline}
