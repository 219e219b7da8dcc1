"""Confidence intervals against scipy's, and their coverage: exact by enumeration, or simulated for many cases."""

import math
from collections.abc import Iterator
from itertools import combinations_with_replacement

import numpy as np
import pytest
from scipy import stats

from agentfactory.rollout.evaluation.intervals import Share, of_mean, of_proportion

RATES = (0.01, 0.1, 0.5, 0.99)


def tasks_of(passed: list[int], samples: int) -> list[Share]:
    return [Share(float(count), samples, samples) for count in passed]


def one_each(passed: int, tasks: int) -> list[Share]:
    return tasks_of([1] * passed + [0] * (tasks - passed), 1)


@pytest.mark.parametrize(("passed", "tasks"), [(0, 1), (0, 2), (1, 2), (3, 7), (31, 60), (59, 60), (200, 200)])
def test_with_one_chain_per_task_it_is_scipys_exact_interval(passed: int, tasks: int) -> None:
    exact = stats.binomtest(passed, tasks).proportion_ci(0.95, method="exact")
    assert of_proportion(one_each(passed, tasks)) == pytest.approx((exact.low, exact.high), abs=1e-9)


def test_at_the_ends_it_is_the_closed_form() -> None:
    for tasks in (1, 2, 5, 200):
        for samples in (1, 16):
            nothing = of_proportion(tasks_of([0] * tasks, samples))
            everything = of_proportion(tasks_of([samples] * tasks, samples))
            assert nothing == (0.0, pytest.approx(1 - 0.025 ** (1 / tasks)))
            assert everything == (pytest.approx(0.025 ** (1 / tasks)), 1.0)


def test_several_samples_are_worth_what_the_design_effect_leaves() -> None:
    """The textbook computation, with scipy's distributions."""
    passed, samples = [4, 4, 1, 0, 3, 2, 0, 4, 4, 1], 4
    value, tasks, trials = sum(passed) / 40, 10, 40
    of_tasks = np.var([count / samples for count in passed], ddof=1) / tasks
    of_a_simple_sample = np.var([1] * sum(passed) + [0] * (trials - sum(passed)), ddof=1) / trials
    effective = trials / (of_tasks / of_a_simple_sample)
    effective *= (stats.t.ppf(0.975, trials - 1) / stats.t.ppf(0.975, tasks - 1)) ** 2
    assert effective == pytest.approx(40 / 2.8926 * (2.0227 / 2.2622) ** 2, rel=1e-4), "11 of 40"
    low = stats.beta.ppf(0.025, value * effective, (1 - value) * effective + 1)
    high = stats.beta.ppf(0.975, value * effective + 1, (1 - value) * effective)
    assert of_proportion(tasks_of(passed, samples)) == pytest.approx((low, high), abs=1e-9)
    # tasks that do not differ at all: every sample counts, and no more than every sample
    exact = stats.binomtest(20, 40).proportion_ci(0.95, method="exact")
    assert of_proportion(tasks_of([2] * 10, 4)) == pytest.approx((exact.low, exact.high), abs=1e-9)


def test_a_mean_of_rewards_has_students_interval() -> None:
    values = [0.25, 1.5, -2.0, 0.75, 3.0]
    expected = stats.t.interval(0.95, 4, np.mean(values), stats.sem(values))
    assert of_mean([Share(4 * value, 4, 4) for value in values]) == pytest.approx(expected)
    assert of_mean([Share(0.25, 1, 1)]) is None
    # tasks of unlike weight whose rewards are the same but for rounding
    assert of_mean([Share(0.1 + 0.1 + 0.1, 3, 3), Share(0.1, 1, 1)]) is None


@pytest.mark.parametrize("tasks", [1, 2, 5, 20, 60])
def test_coverage_with_one_chain_per_task(tasks: int) -> None:
    """Exact: all outcomes of the binomial distribution."""
    found = [of_proportion(one_each(passed, tasks)) for passed in range(tasks + 1)]
    for rate in (*RATES, *np.linspace(0.005, 0.995, 100)):
        chance = stats.binom.pmf(range(tasks + 1), tasks, rate)
        covered = sum(p for p, (low, high) in zip(chance, found, strict=True) if low <= rate <= high)
        assert covered >= 0.95 - 1e-9, rate


def beta(rate: float, likeness: float) -> tuple[float, float]:
    """Parameters of the rates of tasks: `likeness` is the correlation of a task's samples."""
    scale = 1 / likeness - 1
    return rate * scale, (1 - rate) * scale


def outcomes(tasks: int, samples: int) -> Iterator[tuple[list[int], int]]:
    """The sorted numbers of passing samples per task, and the number of permutations of the tasks."""
    for passed in combinations_with_replacement(range(samples + 1), tasks):
        orders = math.factorial(tasks)
        for count in set(passed):
            orders //= math.factorial(passed.count(count))
        yield list(passed), orders


@pytest.mark.parametrize(("tasks", "samples"), [(2, 4), (2, 16), (5, 4)])
def test_coverage_with_few_tasks_of_several_samples(tasks: int, samples: int) -> None:
    """Exact: all outcomes of the beta-binomial distribution, from tasks that hardly differ to those that are either
    solved or not."""
    cases = [(passed, orders, of_proportion(tasks_of(passed, samples))) for passed, orders in outcomes(tasks, samples)]
    for rate in RATES:
        for likeness in (0.01, 0.1, 0.5, 0.9):
            chance = stats.betabinom.pmf(range(samples + 1), samples, *beta(rate, likeness))
            covered = sum(
                orders * math.prod(float(chance[count]) for count in passed)
                for passed, orders, (low, high) in cases
                if low <= rate <= high
            )
            assert covered >= 0.95, (rate, likeness)


@pytest.mark.parametrize("samples", [4, 16])
@pytest.mark.parametrize(("tasks", "draws"), [(20, 600), (200, 200)])
def test_coverage_with_many_tasks_of_several_samples(tasks: int, draws: int, samples: int) -> None:
    """Simulated. If few tasks contain all passing samples, their variance estimate is poor: 90 % coverage at worst."""
    generator = np.random.default_rng(0)
    for rate in RATES:
        for likeness in (0.1, 0.5):
            covered = 0
            for _ in range(draws):
                passed = generator.binomial(samples, generator.beta(*beta(rate, likeness), tasks))
                low, high = of_proportion(tasks_of(passed.tolist(), samples))
                covered += low <= rate <= high
            # less three standard deviations of the simulation
            assert covered / draws >= 0.9 - 3 * math.sqrt(0.9 * 0.1 / draws), (rate, likeness)
