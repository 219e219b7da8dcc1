"""Batches: their contents, and that micro-batching, layout, order and distribution change no gradient."""

import math
import pickle
import random
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed as dist

from agentfactory.rollout.token_row import ImageSpan, Row, Span
from agentfactory.trainers.batches.batch import (
    Batching,
    TrainingRow,
    deal_batch,
    make_batches,
    make_plans,
    only_targets,
    training_row,
)
from agentfactory.trainers.update.learner import Learner
from agentfactory.trainers.update.policy_update import update_policy
from tests.trainers.conftest import Make, make_row, on_cpu

pytestmark = pytest.mark.numbers

BATCHINGS: tuple[Batching, ...] = ("padded", "packed", "tree")


def rows_of(count: int, seed: int = 0) -> list[TrainingRow]:
    """Return ragged rows; every second one continues the prefix of the previous one differently."""
    rng = random.Random(seed)
    rows: list[TrainingRow] = []
    for number in range(count):
        row = make_row(rng, turns=rng.randint(4, 8))
        if number % 2:
            sampled = row.token_ids
            row = Row()
            row.append_context(rows[-1].token_ids[:-3].tolist())
            row.append_sampled(sampled, [-3.0] * len(sampled), [Span("0", 0, len(sampled))])
        rows.append(training_row(row, rng.gauss(0, 1)))
    return rows


def plain(row: TrainingRow) -> Any:
    return row.token_ids.tolist(), row.targets.tolist(), {name: s.tolist() for name, s in row.streams.items()}


def test_streams_stand_at_their_tokens() -> None:
    row = Row([5, 6, 7, 8, 9], [0, 1, 0, 1, 0], [0.0, -1.0, 0.0, -2.0, 0.0], [Span("1", 1, 4, mixed=True)])
    other = Row([4, 3], [0, 1], [0.0, -3.0], weights=[9.0, 0.5])
    made = [training_row(row, 2.0), training_row(other, -1.0)]
    part = make_batches([r for r in made if r], "padded", token_budget=100)[0].micro_batches[0]
    assert part.ids.tolist() == [[5, 6, 7], [4, 0, 0]]  # the last observation, and the last tokens, predict nothing
    assert part.labels.tolist() == [6, 8, 3]
    assert part.ids.flatten()[part.sources].tolist() == [5, 7, 4]
    assert part.sequence.tolist() == [0, 0, 1]
    assert part.rows == (0, 1)
    streams = {name: stream.tolist() for name, stream in part.streams.items()}
    assert streams == {
        "behaviour": [-1.0, -2.0, -3.0],
        "advantage": [2.0, 2.0, -1.0],
        "weight": [1.0, 1.0, 0.5],
        "mixed": [1.0, 1.0, 0.0],
    }


def test_the_first_token_and_untrained_rows_are_left_out() -> None:
    assert training_row(Row([1, 2], [1, 0], [0.0, 0.0])) is None
    assert training_row(Row([1, 2], [0, 0], [0.0, 0.0])) is None


def test_refusals() -> None:
    with pytest.raises(ValueError, match="a row of 2 tokens has 1 logprobs"):
        training_row(Row([1, 2], [0, 1], [0.0]))
    ids, targets = np.array([1, 2]), np.array([1])
    with pytest.raises(ValueError, match=r"sum to 0\.0; they must sum to more"):
        make_batches([TrainingRow(ids, targets, {"weight": np.zeros(1)})], "padded", token_budget=10)


def test_masked_positions_are_never_read() -> None:
    """A NaN log-probability and a huge weight do not reach a batch."""
    row = make_row(random.Random(0))
    clean = plain(training_row(row))
    row.logprobs = [p if trained else math.nan for p, trained in zip(row.logprobs, row.mask, strict=True)]
    row.weights = [1.0 if trained else 1e30 for trained in row.mask]
    assert plain(training_row(row)) == clean


def test_the_normaliser_is_the_weight_of_all_processes_or_what_is_given() -> None:
    rows = rows_of(11)
    batches = make_batches(rows, "tree", token_budget=60, processes=3)
    assert {batch.normaliser for batch in batches} == {float(sum(len(row.targets) for row in rows))}
    weights = [float(part.streams["weight"].sum()) for batch in batches for part in batch.micro_batches]
    assert sum(weights) == batches[0].normaliser
    assert make_batches(rows, "tree", 60, normaliser=7.0)[0].normaliser == 7.0


@pytest.mark.parametrize("budget", [1, 200])
@pytest.mark.parametrize("batching", BATCHINGS)
def test_cutting_and_order_change_no_gradient(make_recipe: Make, batching: Batching, budget: int) -> None:
    """8 x 1 = 4 x 2 = 1 x 8 up to float32: gradient norm, loss, and the weights after the update."""
    recipe = make_recipe(learning_rate=1e-3, optimizer={"name": "sgd"})
    rows = rows_of(8)
    whole, parts = Learner(recipe, on_cpu()), Learner(recipe, on_cpu())
    one = update_policy(whole, make_batches(rows, "padded", 10_000)[0], recipe).updates[0]
    shuffled = random.Random(7).sample(rows, len(rows))
    batches = make_batches(shuffled, batching, budget)
    assert (batching != "padded" and budget > 100) == any(part.ends is not None for part in batches[0].micro_batches)
    other = update_policy(parts, batches[0], recipe).updates[0]
    assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    assert other.loss == pytest.approx(one.loss, abs=1e-6)
    assert other.sums == pytest.approx(one.sums, rel=1e-5)
    assert other.maxima == pytest.approx(one.maxima, rel=1e-5)
    for name, weight in parts.policy.gather().items():
        torch.testing.assert_close(weight, whole.policy.gather()[name], atol=1e-7, rtol=1e-5)


def test_a_row_with_fewer_targets_is_the_row_that_was_made_for_them() -> None:
    """Two turns with an image between them. Of several servers, one may sample the later turn with older weights."""
    row = Row(
        token_ids=list(range(8)),
        mask=[0, 0, 1, 1, 0, 0, 1, 1],
        logprobs=[0.0, 0.0, -0.1, -0.2, 0.0, 0.0, -0.3, -0.4],
        images=[ImageSpan(4, 1, "digest", (1, 2, 2))],
    )
    both = training_row(row)
    first = training_row(Row(row.token_ids, [0, 0, 1, 1, 0, 0, 0, 0], row.logprobs, images=row.images))
    early, late = (only_targets(both, np.array(kept, dtype=bool)) for kept in ([1, 1, 0, 0], [0, 0, 1, 1]))
    for name, value in vars(first).items():
        np.testing.assert_equal(vars(early)[name], value, err_msg=name)
    assert (late.token_ids.tolist(), late.targets.tolist()) == (list(range(8)), [6, 7])
    assert late.images == both.images == tuple(row.images)
    assert only_targets(both, np.zeros(4, dtype=bool)) is None


class Vision:
    def positions(self, length: int, spans: tuple[ImageSpan, ...]) -> np.ndarray:
        return np.arange(length) - np.array([[0], [len(spans)], [sum(span.length for span in spans)]])


def varied_rows(seed: int, count: int, with_images: bool) -> list[TrainingRow]:
    """Return rows with a stream of several values per target and, for some, the same image or another in its place."""
    draw, rows = random.Random(seed), []
    for number, row in enumerate(rows_of(count, seed)):
        spans = [ImageSpan(1, 2, f"digest {draw.randrange(2)}", (1, 2, 4))] if with_images and number % 3 else []
        top = np.array([[draw.gauss(0, 1) for _ in range(3)] for _ in row.targets])
        rows.append(replace(row, streams=row.streams | {"top": top}, images=tuple(spans)))
    return rows


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 99), st.integers(1, 9), st.integers(1, 4), st.integers(1, 200), st.booleans())
@pytest.mark.parametrize("batching", BATCHINGS)
def test_what_a_process_builds_of_received_rows_is_what_rank_0_would_build(
    batching: Batching, seed: int, count: int, processes: int, budget: int, with_images: bool
) -> None:
    rows, vision, cpu = varied_rows(seed, count, with_images), Vision() if with_images else None, torch.device("cpu")
    plans = make_plans(rows, batching, budget, processes, None, with_images)
    wire: list[list[torch.Tensor]] = [[] for _ in plans]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "scatter_object_list", Mock())
        patch.setattr(dist, "isend", lambda sent, rank, group: wire[rank].append(sent.clone()) or Mock())
        found = [deal_batch(plans, rows, vision, cpu, None)]
        for rank in range(1, processes):
            own = pickle.loads(pickle.dumps(plans[rank]))
            patch.setattr(dist, "scatter_object_list", lambda received, _, src, own=own: received.__setitem__(0, own))
            patch.setattr(dist, "recv", lambda into, src, group, rank=rank: into.copy_(wire[rank].pop(0)))
            found.append(deal_batch(None, [], vision, cpu, None))
    assert not any(wire[1:])
    expected = make_batches(rows, batching, budget, processes, vision=vision)
    for own, other in zip(found, expected, strict=True):
        assert (own.normaliser, own.tokens) == (other.normaliser, other.tokens)
        for part, same in zip(own.micro_batches, other.micro_batches, strict=True):
            for name, value in vars(replace(same, streams={})).items():
                given = vars(replace(part, streams={}))[name]
                assert torch.equal(given, value) if isinstance(value, torch.Tensor) else given == value, name
            for name, stream in part.streams.items() if part.rows else ():
                values = np.concatenate([rows[index].streams[name] for index in part.rows])
                np.testing.assert_array_equal(stream.numpy(), values.astype(np.float32), err_msg=name, strict=True)
