"""Confidence intervals against scipy's, and their coverage: exact by enumeration, or simulated for many cases."""

import math
from collections.abc import Iterator
from itertools import combinations_with_replacement

import numpy as np
import pytest
from scipy import stats

from agentfactory.rollout.evaluation.pass_at_k import Share, of_mean, of_proportion

RATES = (0.01, 0.1, 0.5, 0.99)


def tasks_of(passed: list[int], samples: int) -> list[Share]:
    return [Share(float(count), samples) for count in passed]


def one_each(passed: int, tasks: int) -> list[Share]:
    return tasks_of([1] * passed + [0] * (tasks - passed), 1)


@pytest.mark.parametrize(
    ("passed", "tasks"), [(0, 1), (0, 2), (1, 2), (3, 7), (31, 60), (59, 60), (200, 200), (99997, 100000)]
)
def test_with_one_chain_per_task_it_is_scipys_exact_interval(passed: int, tasks: int) -> None:
    exact = stats.binomtest(passed, tasks).proportion_ci(0.95, method="exact")
    assert of_proportion(one_each(passed, tasks)) == pytest.approx((exact.low, exact.high), abs=1e-8)


def test_at_the_ends_it_is_the_closed_form() -> None:
    for tasks in (1, 2, 5, 200):
        for samples in (1, 16):
            nothing = of_proportion(tasks_of([0] * tasks, samples))
            everything = of_proportion(tasks_of([samples] * tasks, samples))
            assert nothing == (0.0, pytest.approx(1 - 0.025 ** (1 / tasks)))
            assert everything == (pytest.approx(0.025 ** (1 / tasks)), 1.0)


def test_its_bounds_are_gaffkes() -> None:
    """Quantiles of the mean with uniform spacings as weights, and one further value of 0 or 1, drawn a million times;
    tasks may have unequal numbers of chains."""
    shares = [Share(4, 4), Share(3, 4), Share(1, 2), Share(0, 4), Share(3, 3)]
    weights = np.random.default_rng(0).exponential(size=(1_000_000, 6))
    totals, sizes = np.array(shares).T
    average = sizes.mean()
    below = weights @ np.append(sizes, average)
    low = np.quantile(weights @ np.append(totals, 0.0) / below, 0.025)
    high = np.quantile(weights @ np.append(totals, average) / below, 0.975)
    assert of_proportion(shares) == pytest.approx((low, high), abs=1e-3)


def test_a_mean_of_rewards_has_students_interval() -> None:
    values = [0.25, 1.5, -2.0, 0.75, 3.0]
    expected = stats.t.interval(0.95, 4, np.mean(values), stats.sem(values))
    assert of_mean([Share(4 * value, 4) for value in values]) == pytest.approx(expected)
    assert of_mean([Share(0.25, 1)]) is None
    # tasks of unlike weight whose rewards are the same but for rounding
    assert of_mean([Share(0.1 + 0.1 + 0.1, 3), Share(0.1, 1)]) is None


def beta(rate: float, likeness: float) -> tuple[float, float]:
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
