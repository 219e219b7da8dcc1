"""The mixture of several sources' tasks."""

from collections import Counter

import pytest
from scipy.stats import chisquare

from agentfactory.rollout.data import TaskMix, TaskOrder

SIZES = (5, 700, 40)
ORDERS = [[{"question": f"{source}-{row}"} for row in range(size)] for source, size in enumerate(SIZES)]


def mix(seed: int = 0, weights: tuple[float, ...] = (1.0, 2.0, 5.0)) -> TaskMix:
    return TaskMix([TaskOrder(tasks, seed, shuffle=True) for tasks in ORDERS], weights, seed)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sources_come_in_proportion_to_their_weights(seed: int) -> None:
    """The probability of a worse fit by chance is not tiny."""
    made = mix(seed)
    counts = Counter(made.place(position)[0] for position in range(8000))
    found = chisquare([counts[source] for source in range(3)], [1000, 2000, 5000])
    assert found.pvalue > 0.001


def test_a_place_depends_on_its_position_alone() -> None:
    made, other = mix(), mix()
    later = [other.place(position) for position in (5000, 3, 1024, 0)]
    assert [made.place(position) for position in (0, 3, 1024, 5000)] == [later[3], later[1], later[2], later[0]]
    another = mix(1)
    assert [another.place(position) for position in range(50)] != [made.place(position) for position in range(50)]


def test_each_source_keeps_its_own_order_and_visits_each_row_once_an_epoch() -> None:
    made = mix()
    drawn: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for position in range(3000):
        source, row = made.place(position)
        assert made.source(position) == source
        drawn[source].append(row)
    for source, tasks in enumerate(ORDERS):
        order = TaskOrder(tasks, 0, shuffle=True)
        assert drawn[source] == [order.row(position) for position in range(len(drawn[source]))]
    numbers = {made.number(position) for position in range(3000)}
    assert max(numbers) < sum(SIZES)
    assert numbers >= set(range(5)), "rows of the first source come first"
    assert len(numbers) == sum(len(set(rows)) for rows in drawn.values()), "a row's number is its own"
