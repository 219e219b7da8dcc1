"""Token trees: every token attends exactly to its row's prefix and is computed once, with the gradients of padded
rows."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agentfactory.trainers.batches.batch import Batch, Batching, MicroBatch, TrainingRow, make_batches
from agentfactory.trainers.batches.packing import PAIRS_PER_TOKEN, TreePlan, deal, fill, grow, merge
from agentfactory.trainers.config import TrainConfig
from agentfactory.trainers.networks.network import apply_options
from agentfactory.trainers.networks.policy import Policy
from tests.placement.shapes import sizes
from tests.trainers.float64 import TOLERANCE, assert_equal, in_float64

pytestmark = pytest.mark.numbers

BATCHINGS: tuple[Batching, ...] = ("padded", "packed", "tree")


def training(ids: list[int], targets: list[int], tag: float = 1.0) -> TrainingRow:
    values = {"behaviour": -1.0, "advantage": tag, "weight": 1.0, "mixed": 0.0}
    return TrainingRow(ids, targets, {name: [value] * len(targets) for name, value in values.items()})


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(64) for _ in range(count)]


def group(rng: random.Random, prompt: int, answers: list[int]) -> list[TrainingRow]:
    start, ends = tokens(rng, prompt), [prompt + length for length in answers]
    return [training(start + tokens(rng, end - prompt), list(range(prompt, end)), rng.gauss(0, 1)) for end in ends]


def rows_per_turn(rng: random.Random, turns: int, prompt: int = 20) -> list[TrainingRow]:
    """Return a chain stored as one row per turn: the whole history, and the turn, which is trained."""
    rows, ids = [], tokens(rng, prompt)
    for _ in range(turns):
        start = len(ids)
        ids = ids + tokens(rng, rng.randint(4, 12))
        rows.append(training(ids, list(range(start, len(ids))), rng.gauss(0, 1)))
        ids = ids + tokens(rng, rng.randint(4, 12))
    return rows


def input_ids(rows: list[TrainingRow]) -> list[np.ndarray]:
    return [np.array(row.token_ids[: row.targets[-1]]) for row in rows]


def sight(part: MicroBatch) -> torch.Tensor:
    """Return whether a token (second dimension) attends to another (third) of its line (first)."""
    place = torch.arange(part.ids.shape[1])
    before = place[:, None] >= place
    return before.expand(len(part.ids), -1, -1) if part.ends is None else before & (place[:, None] < part.ends[:, None])


# few words, so that random rows share prefixes, are prefixes of others, and are equal
ROWS = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=10)
    .map(lambda drawn: [8 * word + place for word in drawn for place in range(8)])
    .flatmap(lambda ids: st.tuples(st.just(ids), st.sets(st.integers(1, len(ids) - 1), min_size=1).map(sorted))),
    min_size=1,
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(ROWS, st.integers(1, 400), st.integers(1, 4), st.sampled_from(BATCHINGS))
def test_a_target_is_predicted_from_its_prefix(
    drawn: list[tuple[list[int], list[int]]], budget: int, processes: int, batching: Batching
) -> None:
    """The source of each target attends to the row up to there, at positions 0, 1, ...; nothing is lost or
    duplicated."""
    rows = [training(ids, targets, tag) for tag, (ids, targets) in enumerate(drawn)]
    batches = make_batches(rows, batching, budget, processes)
    assert len({len(batch.micro_batches) for batch in batches}) == 1
    parts = [part for batch in batches for part in batch.micro_batches]
    assert sorted(row for part in parts for row in part.rows) == list(range(len(rows)))
    for part in parts:
        lines, length = part.ids.shape
        seen_by = sight(part)
        positions = part.positions if part.positions is not None else torch.arange(length).expand(lines, length)
        if part.ids.numel() > budget:
            assert lines == 1
            assert length in {rows[index].targets[-1] for index in part.rows}
        assert part.streams["weight"].tolist() == [float(bool(part.rows))] * len(part.labels)
        place = 0
        for number, index in enumerate(part.rows):
            row = rows[index]
            for target in row.targets:
                line, source = divmod(int(part.sources[place]), length)
                seen = seen_by[line, source]
                order = positions[line][seen].argsort()
                assert positions[line][seen][order].tolist() == list(range(target))
                assert part.ids[line][seen][order].tolist() == row.token_ids[:target]
                assert int(part.labels[place]) == row.token_ids[target]
                assert int(part.sequence[place]) == number
                assert float(part.streams["advantage"][place]) == index
                place += 1


@settings(max_examples=100, deadline=None)
@given(ROWS, st.integers(1, 400))
def test_a_tree_holds_each_shared_token_once(drawn: list[tuple[list[int], list[int]]], budget: int) -> None:
    rows = [np.array(ids) for ids, _ in drawn]
    for plan in merge(rows, budget):
        tree = grow((number, rows[number]) for number in plan.rows)
        assert plan[1:] == (len(tree.ids), len(tree.ids) + tree.positions.sum() / PAIRS_PER_TOKEN, tree.plain)
        assert len(tree.ids) <= max(budget, *(len(rows[number]) for number in tree.paths))
        prefixes = {tuple(rows[number][: end + 1]) for number in tree.paths for end in range(len(rows[number]))}
        assert len(tree.ids) == len(prefixes)
        assert tree.plain == (len(prefixes) == max(len(rows[number]) for number in tree.paths))
        for number, path in tree.paths.items():
            assert tree.ids[path].tolist() == rows[number].tolist()
            assert tree.positions[path].tolist() == list(range(len(path)))


def test_answers_to_one_prompt_are_one_line_and_a_row_per_turn_a_plain_one() -> None:
    rows = group(random.Random(0), 512, [64] * 8)
    (part,) = make_batches(rows, "tree", 16384)[0].micro_batches
    # the last token of an answer predicts nothing
    assert part.ids.shape == (1, 512 + 8 * 63)
    assert part.ends is not None
    rows = rows_per_turn(random.Random(0), turns=8)
    (part,) = make_batches(rows, "tree", 16384)[0].micro_batches
    assert part.ids.tolist() == [rows[-1].token_ids[:-1]]
    assert part.positions is part.ends is None


def test_what_shares_too_little_is_padded() -> None:
    """One shared token costs more than it saves: the rows' attention would no longer be plain causal attention."""
    rng = random.Random(0)
    rows = [training([1, *tokens(rng, 200 + 10 * number)], [150, 190 + 10 * number]) for number in range(12)]
    padded, tree = (make_batches(rows, batching, 2000)[0].micro_batches for batching in ("padded", "tree"))
    assert all(part.ends is None for part in tree)
    assert [part.ids.tolist() for part in padded] == [part.ids.tolist() for part in tree]
    longer = [training([*range(50), *row.token_ids], row.targets) for row in rows]
    assert len(make_batches(longer, "tree", 4000)[0].micro_batches) == 1


def test_a_tree_over_the_budget_is_split_and_repeats_its_prompt_but_a_chain_is_not() -> None:
    rows = group(random.Random(0), 100, [21] * 8)
    for budget, totals in ((179, [140, 160, 160]), (180, [180, 180])):
        assert sorted(tree.tokens for tree in merge(input_ids(rows), budget)) == totals
    rows = rows_per_turn(random.Random(0), turns=8)
    (tree,) = merge(input_ids(rows), token_budget=50)
    assert tree.tokens == len(rows[-1].token_ids) - 1


def test_one_group_is_shared_out_over_processes() -> None:
    rows = group(random.Random(0), 100, [41] * 16)
    (alone,) = merge(input_ids(rows), 16384)
    work = [tree.cost for tree in merge(input_ids(rows), 16384, processes=4)]
    assert max(sum(work[piece] for piece in share) for share in deal(work, 4)) < 0.45 * alone.cost


def test_processes_get_equal_work() -> None:
    rng = random.Random(0)
    rows = [row for _ in range(12) for row in group(rng, rng.randint(50, 300), [rng.randint(10, 200)] * 8)]
    for batching in BATCHINGS:
        batches = make_batches(rows, batching, 2048, processes=4)
        loads = [sum(part.ids.numel() for part in batch.micro_batches) for batch in batches]
        assert max(loads) < 1.2 * sum(loads) / 4


def test_lines_are_full() -> None:
    rng = random.Random(0)
    lines = fill([TreePlan((number,), rng.randint(5, 40), 1.0) for number in range(100)], 100)
    lengths = [sum(tree.tokens for tree in line) for line in lines]
    assert max(lengths) <= 100
    assert 0.95 * 100 * len(lines) <= sum(lengths)


def make_policy(width: int, layers: int, family: str = "qwen3") -> Policy:
    torch.manual_seed(0)
    config, kind = (Qwen3Config, Qwen3ForCausalLM) if family == "qwen3" else (LlamaConfig, LlamaForCausalLM)
    shape = sizes(width, 3 * width, layers, 8, 4, 64)
    network: Any = kind(config(**shape, head_dim=width // 8, tie_word_embeddings=True))
    return in_float64(Policy(network, torch.float64).train())


def gradient(policy: Policy, batch: Batch) -> torch.Tensor:
    policy.zero_grad()
    for part in batch.micro_batches:
        logprob, _ = policy(part.ids, part.sources, part.labels, part.positions, part.ends)
        ((part.streams["weight"] * part.streams["advantage"] * logprob).sum() / batch.normaliser).backward()
    return torch.cat([weight.grad.flatten() for weight in policy.parameters() if weight.grad is not None])


@pytest.mark.parametrize(
    ("family", "batching", "budget"),
    [
        *(("qwen3", "tree", budget) for budget in (1, 200, 700, 16384)),
        *(("qwen3", "packed", 700), ("llama", "packed", 16384), ("llama", "tree", 700)),
    ],
)
def test_all_shapes_together(family: str, budget: int, batching: Batching) -> None:
    """Groups, long branches, chains that fork after each turn, prefixes of others, and equal rows in one batch."""
    rng = random.Random(budget)
    rows = group(rng, 40, [3, 9, 14, 1, 20]) + group(rng, 30, [300, 270, 260]) + rows_per_turn(rng, 5)
    for turn in rows_per_turn(rng, 4):
        rows += [turn, training(turn.token_ids + tokens(rng, 6), [len(turn.token_ids) + 3], rng.gauss(0, 1))]
    rows += [rows[0], rows[7]]
    policy = make_policy(64, 2, family)
    expected = gradient(policy, make_batches(rows, "padded", 16384)[0])
    found = gradient(policy, make_batches(rows, batching, budget)[0])
    assert (found - expected).norm() < TOLERANCE * expected.norm()


def test_layers_that_are_computed_again_see_the_same() -> None:
    rows = group(random.Random(0), 60, [20, 9, 14])
    policy = make_policy(64, 2)
    expected = gradient(policy, make_batches(rows, "tree", 16384)[0])
    apply_options(policy.network, TrainConfig(steps=1, gradient_checkpointing=True), "cpu", "tree")
    assert_equal(gradient(policy, make_batches(rows, "tree", 16384)[0]), expected)
