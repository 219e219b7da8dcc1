"""A fast digest of a weight, equal on every device: servers and trainer compare their weights by it.

Imports nothing of AgentFactory: it also runs in vLLM's processes.
"""

import hashlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

UNKNOWN = "unknown"
"""Begins what a server reports for a weight that its kernels have reordered: nobody can compare it."""

_LANES = ((2**17, 0x2C1B3C6D), (2**12, 0x297A2D39))
"""Per round: the number of columns, and the odd multiplier of its polynomial."""
_ROWS_AT_ONCE = 128
"""Rows per kernel on a GPU, where each launch costs as much as reading a megabyte."""
_THREADS = 4
"""Most threads for a weight on a CPU: its memory is not faster for more."""
_WORDS_FOR_THREADS = 2**20
"""Size of a weight that is worth starting them."""


def weight_digest(weight: Tensor) -> str:
    """Returns "fold:DTYPE:SHAPE:HEX", such as "fold:bfloat16:4096x1024:<32 hex digits>". The hex digits depend only on
    the bytes in row-major order, without zeros at the end.

    The bytes are read as 32-bit words w[0], w[1], ... in rows of 131,072. Each column is folded into the polynomial
    sum(m(w[row]) * M**row) modulo 2**32, where m(w) = w + (w >> 16) brings the sign into the middle of the word. The
    columns are folded once more into 4096 words, whose sha256 is cut to 128 bits. All is integer arithmetic on the
    weight's own device, and exact on each; on a CPU it takes about twice as long as a copy.

    It finds what goes wrong by accident: older weights, torn or exchanged parts, another order, rounding, signs. It
    always finds the change of a single word (except for one pair of words, a denormal number and a NaN). It misses a
    change of two words of one column with a probability of 2**-16 or less, and one of many columns practically never.
    It does not resist someone who constructs weights for a given digest.
    """
    words = _words(weight.detach())
    fold = _fold_in_cache if words.device.type == "cpu" else _fold
    for lanes, multiplier in _LANES:
        words = fold(words, lanes, multiplier)
    words = torch.nn.functional.pad(words, (0, lanes - len(words)))
    hexadecimal = hashlib.sha256(words.cpu().numpy().tobytes()).hexdigest()[:32]
    dtype, shape = str(weight.dtype).removeprefix("torch."), "x".join(map(str, weight.shape))
    return f"fold:{dtype}:{shape}:{hexadecimal}"


def _words(weight: Tensor) -> Tensor:
    """Returns the bytes as 32-bit words, filled with zeros at the end."""
    data = weight.contiguous().view(-1).view(torch.uint8)
    if len(data) % 4:
        data = torch.nn.functional.pad(data, (0, -len(data) % 4))
    # a slice of a larger buffer may begin between two words
    return (data.clone() if data.storage_offset() % 4 else data).view(torch.int32)


def _fold(words: Tensor, lanes: int, multiplier: int) -> Tensor:
    """Returns the polynomials of the columns, at most `lanes` words. Zeros after the last word change none."""
    whole = len(words) // lanes
    rest = words[whole * lanes :]
    folded = torch.zeros(lanes if whole else len(rest), dtype=torch.int32, device=words.device)
    folded[: len(rest)] = rest + (rest >> 16)
    rows = words[: whole * lanes].view(whole, lanes)
    for start in reversed(range(0, whole, _ROWS_AT_ONCE)):
        block = rows[start : start + _ROWS_AT_ONCE]
        powers = [_int32(pow(multiplier, number, 2**32)) for number in range(len(block) + 1)]
        weighted = (block + (block >> 16)) * torch.tensor(powers[:-1], dtype=torch.int32, device=words.device)[:, None]
        folded = weighted.sum(0, dtype=torch.int32).add_(folded, alpha=powers[-1])
    return folded


def _fold_in_cache(words: Tensor, lanes: int, multiplier: int) -> Tensor:
    """Returns the same as `_fold`, from a CPU: everything but the row stays in its cache. By numpy and our own threads,
    since torch would start its threads for every row, which takes longer than the row."""
    numbers = words.numpy()
    folded = np.zeros(min(lanes, len(numbers)), np.int32)

    def fold(columns: slice) -> None:
        part = folded[columns]
        buffer = np.empty_like(part)
        for start in reversed(range(columns.start, len(numbers), lanes)):
            row = numbers[start : start + len(part)]
            mixed = np.right_shift(row, 16, out=buffer[: len(row)])
            mixed += row
            part *= multiplier
            part[: len(row)] += mixed

    if len(numbers) < _WORDS_FOR_THREADS:
        fold(slice(0, lanes))
    else:
        threads = min(torch.get_num_threads(), _THREADS)
        width = -(-lanes // threads)
        with ThreadPoolExecutor(threads, "digest") as pool:
            list(pool.map(fold, (slice(start, start + width) for start in range(0, lanes, width))))
    return torch.from_numpy(folded)


def _int32(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value
