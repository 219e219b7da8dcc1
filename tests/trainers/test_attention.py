"""Attention by runs, and FlexAttention's masks and precision compared with sdpa. FlexAttention has no backward pass on
a CPU: tests/gpu tests its gradients."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations import flex_attention
from transformers.integrations.flex_attention import flex_attention_forward

from agentfactory.trainers.batches.batch import Batching, MicroBatch, TrainingRow, make_batches
from agentfactory.trainers.networks import attention as attention_module
from agentfactory.trainers.networks.attention import BLOCK, Runs, attention_by_runs, block_mask, use_ours, whole_blocks
from agentfactory.trainers.networks.policy import load_policy
from tests.trainers.conftest import Make
from tests.trainers.float64 import assert_equal

pytestmark = pytest.mark.numbers

KINDS = ("sdpa", "flex_attention")


def micro_batches(rows: list[list[int]], batching: Batching) -> list[MicroBatch]:
    training = [TrainingRow(ids, list(range(1, len(ids))), {"weight": [1.0] * (len(ids) - 1)}) for ids in rows]
    return make_batches(training, batching, 16384)[0].micro_batches


def ragged(seed: int = 0, prompt: int = 150, answers: int = 4, longest: int = 200) -> list[list[int]]:
    draw = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(64) for _ in range(count)]

    rows = []
    for _ in range(2):
        shared, begun = tokens(prompt), tokens(longest // 2)
        rows += [shared + tokens(draw.randint(2, longest)) for _ in range(answers)]
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


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_keys_are_kept_once_per_group_of_heads(groups: int) -> None:
    """Values and gradients are those of keys that are repeated for each head."""
    generator = torch.Generator().manual_seed(0)
    (part,) = micro_batches(ragged(prompt=300), "tree")
    length, heads, width = part.ids.shape[1], 8, 16
    runs = Runs(part.positions, part.ends, torch.float64)
    inputs = [
        torch.randn(1, count, length, width, dtype=torch.float64, generator=generator, requires_grad=True)
        for count in (heads, groups, groups)
    ]
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    module = nn.Module()
    module.num_key_value_groups = heads // groups
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        given, _ = attention_by_runs(module, *inputs, None, runs=runs, scaling=0.3)
    place = torch.arange(length)
    sees = (place <= place[:, None]) & (place[:, None] < part.ends[0])
    query, *others = inputs
    key, value = (tensor.repeat_interleave(heads // groups, dim=1) for tensor in others)
    scores = (query @ key.mT * 0.3).masked_fill(~sees, float("-inf"))
    expected = (scores.softmax(-1) @ value).transpose(1, 2)
    assert_equal(given, expected)
    assert_equal(torch.autograd.grad(given.sum(), inputs), torch.autograd.grad(expected.sum(), inputs))
    # queries, results and masks; and, once per group, the keys and values that each run attends to
    seen = sum(sum(runs.pieces[piece] for piece in run.seen) for run in runs.all)
    masks = sum(run.mask.nbytes for run in runs.all if run.mask is not None)
    assert sum(kept.values()) < masks + 8 * width * (3 * heads * length + 2 * groups * (seen + length)) + 2**16


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


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.usefixtures("clean_dynamo")
def test_ragged_lines_are_compiled_once(make_recipe: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounter()
    monkeypatch.setattr(flex_attention.WrappedFlexAttention, "_is_flex_compiled", False)
    monkeypatch.setattr(flex_attention.WrappedFlexAttention, "_instance", None)
    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile_with(function, backend=counter))
    policy = load_policy(make_recipe())
    policy.network.set_attn_implementation("flex_attention")
    use_ours(policy.network)
    counts = []
    with torch.no_grad():
        for seed in range(8):
            (part,) = micro_batches(ragged(seed, prompt=20 + 90 * seed), "tree")
            policy(part.ids, part.sources, part.labels, part.positions, part.ends)
            counts.append(counter.frame_count)
    # the second length makes torch compile for any
    assert counts == [1] + [2] * 7


@pytest.fixture
def clean_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
