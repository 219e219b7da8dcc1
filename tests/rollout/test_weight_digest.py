"""The digest of a weight: it finds what goes wrong with weights, and is equal on every device."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from agentfactory.rollout.weight_digest import _fold, _fold_in_cache, weight_digest

ROWS, COLUMNS = 300, 1000
"""More than two rows of the fold."""


def random_weight(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).to(dtype)


def fold(weight: Tensor) -> str:
    return weight_digest(weight).rpartition(":")[2]


def exchanged(weight: Tensor, first: int, second: int) -> Tensor:
    changed = weight.clone().view(-1)
    changed[[first, second]] = changed[[second, first]]
    return changed


def changed_at(weight: Tensor, *places: int) -> Tensor:
    changed = weight.clone().view(-1)
    for place in places:
        changed[place] = -changed[place]
    return changed


def test_names_dtype_and_shape() -> None:
    assert weight_digest(torch.ones(3, 4, dtype=torch.bfloat16)).startswith("fold:bfloat16:3x4:")
    assert weight_digest(torch.tensor(2.0)).startswith("fold:float32::")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize(
    "change",
    [
        lambda w: -w,
        lambda w: w.flip(0),
        lambda w: w.roll(1, 0),
        lambda w: w.roll(1, 1),
        lambda w: w[torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))],
        lambda w: w.T.contiguous(),
        lambda w: torch.cat([w[: ROWS // 2], w[: ROWS // 2]]),
        lambda w: w + 1,
        torch.zeros_like,
        lambda w: exchanged(w, 7, 8),
        lambda w: exchanged(w, 7, 7 + 2**17),
        lambda w: changed_at(w, 7),
        # the same column of the fold: signs must not cancel
        lambda w: changed_at(w, 7, 7 + 2**17),
        lambda w: changed_at(w, 7, 7 + 2**12),
        lambda w: changed_at(w, 0, ROWS * COLUMNS - 1),
    ],
)
def test_finds_changes(change: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    weight = random_weight(dtype) if dtype != torch.int8 else (random_weight() * 20).to(dtype)
    assert fold(change(weight)) != fold(weight)


def test_finds_rounding() -> None:
    weight = random_weight()
    assert fold(weight.bfloat16().float()) != fold(weight)


def test_finds_every_change_of_one_number() -> None:
    weight = torch.randn(3000, dtype=torch.float32)
    digests = {fold(changed_at(weight, place)) for place in range(3000)}
    assert len(digests) == 3000


def test_zeros_at_the_end_change_nothing() -> None:
    """A server fills its vocabulary; also across a row of the fold."""
    weight = torch.randn(2**17 // 128 - 1, 128)
    filled = torch.cat([weight, torch.zeros(64, 128)])
    assert fold(filled) == fold(weight)
    assert fold(torch.cat([torch.zeros(64, 128), weight])) != fold(weight)


@pytest.mark.parametrize("rest", [0, 5, 40, 63])
@pytest.mark.parametrize("rows", [0, 1, 127, 128, 129, 300])
def test_each_way_gives_the_polynomials(rows: int, rest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a GPU, and on a CPU with one thread and with several."""
    words = torch.randint(-(2**31), 2**31, (64 * rows + rest,), dtype=torch.int64).to(torch.int32)
    mixed = (words + (words >> 16)).tolist()
    exact = [
        sum(w * 0x2C1B3C6D**n for n, w in enumerate(mixed[column::64])) % 2**32 for column in range(min(64, len(words)))
    ]
    folded = [_fold(words, 64, 0x2C1B3C6D), _fold_in_cache(words, 64, 0x2C1B3C6D)]
    monkeypatch.setattr("agentfactory.rollout.weight_digest._WORDS_FOR_THREADS", 1)
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        folded.append(_fold_in_cache(words, 64, 0x2C1B3C6D))
    for polynomials in folded:
        assert [value % 2**32 for value in polynomials.tolist()] == exact


def test_the_digest_is_always_the_same() -> None:
    """Trainer and server may have different releases."""
    weight = torch.arange(2**21 + 77, dtype=torch.int32).view(torch.float32)
    assert weight_digest(weight) == "fold:float32:2097229:1e11a5e54e42a45449b1a45850688839"
    assert weight_digest(weight[:3]) == "fold:float32:3:9602ced1199400e2498700bcdb79cf4c"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_a_slice_of_a_buffer_is_read_from_its_place(dtype: torch.dtype) -> None:
    buffer = torch.arange(101).to(dtype)
    for start in range(4):
        assert weight_digest(buffer[start:50]) == weight_digest(buffer[start:50].clone())
