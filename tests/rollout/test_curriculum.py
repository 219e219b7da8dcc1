"""The curriculum: success rates, skipped tasks, and replay."""

import random

import pytest

from agentfactory.rollout.config import CurriculumConfig
from agentfactory.rollout.groups.curriculum import Curriculum, successes
from agentfactory.rollout.trajectory import Outcome, Trajectory

SOLVED, HOPELESS, MIXED, NEW = range(4)


def curriculum(seed: int = 0, visit: float = 0.25) -> Curriculum:
    made = Curriculum(CurriculumConfig(visit=visit), seed)
    made.observe(SOLVED, [1.0] * 8)
    made.observe(HOPELESS, [0.0] * 8)
    made.observe(MIXED, [1.0, 0.0, 0.0, 0.0])
    return made


def test_each_visit_counts_half() -> None:
    made = curriculum()
    assert made.rates == {SOLVED: 1.0, HOPELESS: 0.0, MIXED: 0.25}
    made.observe(SOLVED, [0.0, 1.0])
    made.observe(SOLVED, [0.0])
    assert made.rates[SOLVED] == 0.375
    made.observe(MIXED, [])
    assert made.rates[MIXED] == 0.25, "a group of which no chain counts says nothing"


def test_only_solved_and_hopeless_tasks_are_passed_over_and_come_at_times() -> None:
    made = curriculum()
    passed = {row: sum(made.passes_over(position, row) for position in range(4000)) for row in range(4)}
    assert passed[MIXED] == passed[NEW] == 0
    # 4000 draws at 0.75: a standard deviation is 27
    assert abs(passed[SOLVED] - 3000) < 140
    assert passed[HOPELESS] == passed[SOLVED], "it depends on the position, not on the row"
    sums = {"curriculum/passed_over": sum(passed.values()), "curriculum/solved": 1, "curriculum/hopeless": 1}
    assert made.take_figures() == sums
    assert made.take_figures() == sums | {"curriculum/passed_over": 0}
    made.observe(HOPELESS, [1.0, 0.0])
    assert not any(made.passes_over(position, HOPELESS) for position in range(100)), "there is hope again"


def test_it_follows_from_seed_and_observations_alone() -> None:
    def choices(seed: int) -> list[bool]:
        draw, made = random.Random(3), Curriculum(CurriculumConfig(), seed)
        passed = []
        for position in range(300):
            row = position % 20
            passed.append(made.passes_over(position, row))
            if not passed[-1]:
                made.observe(row, [float(draw.random() < row / 19) for _ in range(4)])
        return passed

    assert choices(5) == choices(5)
    assert choices(5) != choices(6)
    assert 0 < sum(choices(5)) < 300


def test_a_reward_that_does_not_say_success_is_told() -> None:
    chain = Trajectory("g000003.1", [], [], Outcome.COMPLETED, 1.0, {"success": 0.5})
    assert successes([chain]) == [0.5]
    with pytest.raises(ValueError, match=r"the reward of chain g000003.1 did not report success; .*curriculum=null"):
        successes([Trajectory("g000003.1", [], [], Outcome.COMPLETED, 1.0, {"distance": 0.5})])
