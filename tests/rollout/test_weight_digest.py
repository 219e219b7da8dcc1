"""Weight digests: they detect corrupted weights, and are equal on every device."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from agentfactory.rollout.inference.weight_digest import _BLOCK, _TAIL, FUNCTIONS, _fold, _fold_in_cache, weight_digest

FUNCTION = pytest.mark.parametrize("function", FUNCTIONS)
ROWS, COLUMNS = 300, 1000
"""More than two rows of the fold."""


def random_weight(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).to(dtype)


def digits(weight: Tensor, function: str) -> str:
    return weight_digest(weight, function).rpartition(":")[2]


def exchanged(weight: Tensor, first: int, second: int) -> Tensor:
    changed = weight.clone().view(-1)
    changed[[first, second]] = changed[[second, first]]
    return changed


def changed_at(weight: Tensor, *places: int) -> Tensor:
    changed = weight.clone().view(-1)
    for place in places:
        changed[place] = -changed[place]
    return changed


def test_names_function_dtype_and_shape() -> None:
    for function in FUNCTIONS:
        assert weight_digest(torch.ones(3, 4, dtype=torch.bfloat16), function).startswith(f"{function}:bfloat16:3x4:")
        assert weight_digest(torch.tensor(2.0), function).startswith(f"{function}:float32::")
    assert weight_digest(torch.ones(3)).startswith("xxh3:"), "the faster one where the weight lies"


@FUNCTION
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
def test_finds_changes(change: Callable[[Tensor], Tensor], dtype: torch.dtype, function: str) -> None:
    weight = random_weight(dtype) if dtype != torch.int8 else (random_weight() * 20).to(dtype)
    assert digits(change(weight), function) != digits(weight, function)


@FUNCTION
def test_finds_rounding(function: str) -> None:
    weight = random_weight()
    assert digits(weight.bfloat16().float(), function) != digits(weight, function)


@FUNCTION
def test_finds_every_change_of_one_number(function: str) -> None:
    weight = torch.randn(3000, dtype=torch.float32)
    digests = {digits(changed_at(weight, place), function) for place in range(3000)}
    assert len(digests) == 3000


@FUNCTION
@pytest.mark.parametrize("size", [2**17 - 128, _TAIL // 4, _BLOCK // 4 - 1, _BLOCK // 4, 3])
@pytest.mark.parametrize("zeros", [1, 2**13, _TAIL // 2, _BLOCK // 4])
def test_zeros_at_the_end_change_nothing(size: int, zeros: int, function: str) -> None:
    """A server pads its vocabulary, possibly across a row of the fold or a block."""
    weight = torch.rand(size) + 1
    assert digits(torch.cat([weight, torch.zeros(zeros)]), function) == digits(weight, function)
    assert digits(torch.cat([torch.zeros(zeros), weight]), function) != digits(weight, function)


@FUNCTION
@pytest.mark.parametrize("size", [0, 1, _TAIL, _BLOCK // 4 + 1])
def test_zeros_alone_are_as_good_as_nothing(size: int, function: str) -> None:
    assert digits(torch.zeros(size), function) == digits(torch.zeros(1), function)


def test_blocks_are_hashed_by_threads_as_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Swapped blocks are also detected."""
    weight = torch.randn(9 * _BLOCK // 8)
    found = digits(weight, "xxh3")
    first, second, *rest = weight.split(_BLOCK // 4)
    swapped = torch.cat([second, first, *rest])
    assert digits(swapped, "xxh3") != found
    assert digits(changed_at(weight, _BLOCK), "xxh3") != found
    monkeypatch.setattr("agentfactory.rollout.inference.weight_digest._BLOCKS_FOR_THREADS", 100)
    assert digits(weight, "xxh3") == found


@pytest.mark.parametrize("rest", [0, 5, 40, 63])
@pytest.mark.parametrize("rows", [0, 1, 127, 128, 129, 300])
def test_each_way_gives_the_polynomials(rows: int, rest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's way, and the CPU's with one and with several threads."""
    words = torch.randint(-(2**31), 2**31, (64 * rows + rest,), dtype=torch.int64).to(torch.int32)
    mixed = (words + (words >> 16)).tolist()
    columns = (mixed[column::64] for column in range(min(64, len(words))))
    exact = [sum(word * 0x2C1B3C6D**n for n, word in enumerate(column)) % 2**32 for column in columns]
    folded = [_fold(words, 64, 0x2C1B3C6D), _fold_in_cache(words, 64, 0x2C1B3C6D)]
    monkeypatch.setattr("agentfactory.rollout.inference.weight_digest._WORDS_FOR_THREADS", 1)
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        folded.append(_fold_in_cache(words, 64, 0x2C1B3C6D))
    for polynomials in folded:
        assert [value % 2**32 for value in polynomials.tolist()] == exact


def test_the_digest_is_always_the_same() -> None:
    """Trainer and server may run different releases."""
    weight = torch.arange(2**21 + 77, dtype=torch.int32).view(torch.float32)
    assert weight_digest(weight, "fold") == "fold:float32:2097229:1e11a5e54e42a45449b1a45850688839"
    assert weight_digest(weight[:3], "fold") == "fold:float32:3:9602ced1199400e2498700bcdb79cf4c"
    assert weight_digest(weight, "xxh3") == "xxh3:float32:2097229:e9f861ef60598219265c8dcb9b097b70"
    assert weight_digest(weight[:3], "xxh3") == "xxh3:float32:3:8b4ab45291c29454c2c374afc12c7560"


@FUNCTION
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_a_slice_of_a_buffer_is_read_from_its_place(dtype: torch.dtype, function: str) -> None:
    buffer = torch.arange(101).to(dtype)
    for start in range(4):
        assert weight_digest(buffer[start:50], function) == weight_digest(buffer[start:50].clone(), function)
