"""Attention by runs, and FlexAttention's masks and precision compared with sdpa. FlexAttention has no backward pass on
a CPU: tests/gpu tests its gradients."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.flex_attention import flex_attention_forward

from agentfactory.trainers.batches.batch import Batching, MicroBatch, TrainingRow, make_batches
from agentfactory.trainers.networks import attention as attention_module
from agentfactory.trainers.networks.attention import BLOCK, block_mask, use_ours, whole_blocks
from agentfactory.trainers.networks.policy import load_policy
from tests.trainers.conftest import Make

pytestmark = pytest.mark.numbers

KINDS = ("sdpa", "flex_attention")


def micro_batches(rows: list[list[int]], batching: Batching) -> list[MicroBatch]:
    training = [TrainingRow(ids, list(range(1, len(ids))), {"weight": [1.0] * (len(ids) - 1)}) for ids in rows]
    return make_batches(training, batching, 16384)[0].micro_batches


def ragged() -> list[list[int]]:
    """Two groups of rows that share a prompt of 150 tokens, of which two rows share 100 further ones."""
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(64) for _ in range(count)]

    rows = []
    for _ in range(2):
        shared, begun = tokens(150), tokens(100)
        rows += [shared + tokens(draw.randint(2, 200)) for _ in range(4)]
        rows += [shared + begun + tokens(draw.randint(2, 9)) for _ in range(2)]
    return rows


@pytest.fixture
def eager() -> Iterator[None]:
    """Run FlexAttention without half a minute of compilation."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
def test_flex_attention_equals_sdpa(make_recipe: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under autocast, where the network's queries and keys are float32, but its values are not."""
    seen = set()

    def noting(module: Any, query: Tensor, key: Tensor, value: Tensor, *inputs: Any, **options: Any) -> Any:
        seen.add((query.dtype, key.dtype, value.dtype))
        return flex_attention_forward(module, query, key, value, *inputs, **options)

    monkeypatch.setattr(attention_module, "flex_attention_forward", noting)
    parts = micro_batches(ragged(), "tree")
    found = {}
    for dtype in ("float32", "bfloat16"):
        recipe = make_recipe()
        recipe.model.dtype = dtype
        policy = load_policy(recipe)
        for attention in KINDS:
            policy.network.set_attn_implementation(attention)
            use_ours(policy.network)
            with torch.no_grad():
                scores = [policy(p.ids, p.sources, p.labels, p.positions, p.ends)[0] for p in parts]
            found[attention, dtype] = torch.cat(scores)
    expected = found["sdpa", "float32"]
    torch.testing.assert_close(found["flex_attention", "float32"], expected, atol=1e-4, rtol=0)
    error = {attention: (found[attention, "bfloat16"] - expected).abs().mean() for attention in KINDS}
    assert seen == {(torch.float32,) * 3, (torch.bfloat16,) * 3}
    # as close to float32 as sdpa
    assert 0.5 * error["sdpa"] < error["flex_attention"] < 1.5 * error["sdpa"]


@pytest.mark.parametrize("batching", ["padded", "packed", "tree"])
def test_blocks_are_those_of_the_dense_mask(batching: Batching) -> None:
    part = micro_batches(ragged(), batching)[0]
    _, _, ends = whole_blocks(part.ids, part.positions, part.ends)
    lines, length = ends.shape
    assert length % BLOCK == 0

    def visible(line: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[line, key])

    given, expected = block_mask(ends), create_block_mask(visible, lines, None, length, length, device="cpu")
    assert given.sparsity() == expected.sparsity()
    for one, other in zip(given.as_tuple(flatten=True), expected.as_tuple(flatten=True), strict=True):
        if isinstance(one, Tensor):
            torch.testing.assert_close(one, other, atol=0, rtol=0)


def test_a_mask_takes_no_memory_of_length_by_length() -> None:
    """1 GiB at 32k tokens, as create_block_mask makes it."""
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            made = function(*args, **(kwargs or {}))
            for tensor in made if isinstance(made, tuple | list) else [made]:
                if isinstance(tensor, Tensor):
                    largest = max(largest, tensor.nbytes)
            return made

    ends = torch.full((1, 2**15), 2**15)
    with Sizes():
        block_mask(ends)
    assert largest < 2**20


def test_runs_of_about_one_length_share_a_call() -> None:
    """160,000 pairs of tokens against 152,100, 10,000 and 9: a further call costs as much as 32,768."""
    members = [(np.arange(0), np.arange(length)) for length in (100, 400, 3, 390)]
    groups = attention_module._groups(members, 0)
    assert [[len(run) for _, run in group] for group in groups] == [[400, 390], [100, 3]]
