"""Batches: what is carried, and that cutting, order and dealing change no gradient."""

import math
import random
from collections.abc import Callable

import pytest
from accelerate import Accelerator

from rollout.trajectory import Group, Row
from trainers.batch import TrainingRow, padded, scatter, training_row
from trainers.config import TrainRecipe
from trainers.grpo import credit, ppo_updates
from trainers.learner import Learner

Rows = Callable[..., Row]


def rows_of(make_row: Rows, count: int, seed: int = 0) -> list[TrainingRow]:
    """Ragged rows with random advantages."""
    rng = random.Random(seed)
    rows = [training_row(make_row(rng, turns=rng.randint(1, 5)), rng.gauss(0, 1)) for _ in range(count)]
    return [row for row in rows if row is not None]


def test_streams_stand_at_their_tokens() -> None:
    row = Row([5, 6, 7, 8, 9], [0, 1, 0, 1, 0], [0.0, -1.0, 0.0, -2.0, 0.0])
    other = Row([4, 3], [0, 1], [0.0, -3.0], weights=[9.0, 0.5])
    made = [training_row(row, 2.0), training_row(other, -1.0)]
    part = padded([r for r in made if r], token_budget=100)[0].micro_batches[0]
    assert part.ids.tolist() == [[5, 6, 7, 8], [4, 3, 0, 0]]  # the last observation is cut off
    assert part.labels.tolist() == [6, 8, 3]
    assert part.ids.flatten()[part.sources].tolist() == [5, 7, 4]
    assert part.behaviour.tolist() == [-1.0, -2.0, -3.0]
    assert part.advantage.tolist() == [2.0, 2.0, -1.0]
    assert part.weight.tolist() == [1.0, 1.0, 0.5]


def test_the_first_token_and_untrained_rows_are_left_out() -> None:
    assert training_row(Row([1, 2], [1, 0], [0.0, 0.0])) is None
    assert training_row(Row([1, 2], [0, 0], [0.0, 0.0])) is None


def test_ragged_streams_are_refused() -> None:
    with pytest.raises(ValueError, match="a row of 2 tokens has 1 logprobs"):
        training_row(Row([1, 2], [0, 1], [0.0]))


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_every_row_goes_to_one_process_once(make_row: Rows, processes: int) -> None:
    rows = rows_of(make_row, 11)
    batches = padded(rows, token_budget=60, processes=processes)
    assert len({len(batch.micro_batches) for batch in batches}) == 1
    assert {batch.normaliser for batch in batches} == {float(sum(len(row.targets) for row in rows))}
    parts = [part for batch in batches for part in batch.micro_batches]
    assert all(part.ids.numel() <= 60 or len(part.ids) == 1 for part in parts)
    labels = [int(x) for part in parts for x, weight in zip(part.labels, part.weight, strict=True) if weight]
    assert sorted(labels) == sorted(row.token_ids[t] for row in rows for t in row.targets)
    assert sum(float(part.weight.sum()) for part in parts) == batches[0].normaliser


def test_fewer_rows_than_processes_leaves_idle_ones(make_row: Rows) -> None:
    batches = padded(rows_of(make_row, 1), token_budget=60, processes=3)
    assert [float(batch.micro_batches[0].weight.sum()) > 0 for batch in batches] == [True, False, False]


def test_weights_that_sum_to_nothing_are_refused() -> None:
    row = training_row(Row([1, 2], [0, 1], [0.0, -1.0], weights=[0.0, 0.0]))
    assert row is not None
    with pytest.raises(ValueError, match="sum to more than 0"):
        padded([row], token_budget=10)


@pytest.mark.parametrize("budget", [1, 40, 100])
def test_cutting_and_order_change_no_gradient(
    make_recipe: Callable[..., TrainRecipe], make_row: Rows, accelerator: Accelerator, budget: int
) -> None:
    """8 x 1 = 4 x 2 = 1 x 8 up to float32: gradient norm, loss, and the weights after the update."""
    recipe = make_recipe(learning_rate=1e-3)
    rows = rows_of(make_row, 8)
    whole, parts = Learner(recipe, accelerator), Learner(recipe, accelerator)
    one = ppo_updates(whole, scatter(padded(rows, 10_000), accelerator), recipe)[0]
    shuffled = random.Random(7).sample(rows, len(rows))
    other = ppo_updates(parts, scatter(padded(shuffled, budget), accelerator), recipe)[0]
    assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    assert other.loss == pytest.approx(one.loss, abs=1e-6)
    assert other.sums == pytest.approx(one.sums, rel=1e-5)
    assert other.maxima == pytest.approx(one.maxima, rel=1e-5)


def test_masked_positions_are_never_read(
    make_recipe: Callable[..., TrainRecipe], make_groups: Callable[..., list[Group]], accelerator: Accelerator
) -> None:
    recipe = make_recipe()
    clean, dirty = make_groups(2, 4), make_groups(2, 4)
    for group in dirty:
        for row in (row for chain in group.trajectories for row in chain.rows):
            row.logprobs = [p if trained else math.nan for p, trained in zip(row.logprobs, row.mask, strict=True)]
            row.weights = [1.0 if trained else 1e30 for trained in row.mask]
    one, other = (
        ppo_updates(Learner(recipe, accelerator), scatter(padded(credit(g, recipe), 200), accelerator), recipe)[0]
        for g in (clean, dirty)
    )
    assert one == other
