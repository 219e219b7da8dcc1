"""Fast, device-independent digests of weights, by which servers and trainer compare their weights.

The module also runs in vLLM's processes, so it imports only modules without further dependencies."""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ON_CPU, ON_GPU = "sglang_cpu", "sglang_gpu"
"""Prefixes of SGLang's checksums, which it computes differently on a CPU and on a GPU."""
UNKNOWN = "unknown"
"""Prefix of a server's report for a weight that its kernels have reordered, which cannot be compared."""

_LANES = ((2**17, 0x2C1B3C6D), (2**12, 0x297A2D39))
"""Per round: the number of columns, and the odd multiplier of the polynomial."""
_ROWS_AT_ONCE = 128
"""Rows per kernel on a GPU, where each launch costs as much as reading a megabyte."""
_MOST_THREADS = 4
_WORDS_FOR_THREADS = 2**20
"""Size, in words, from which `fold` uses threads."""
_BLOCK = 2**22
_BLOCKS_FOR_THREADS = 4
"""Number of blocks from which `xxh3` uses threads."""
_TAIL = 2**16
"""Bytes at the end that are compared with zero per step."""

Bytes = npt.NDArray[np.uint8]


def weight_digest(weight: Tensor, function: str | None = None) -> str:
    """Return "FUNCTION:DTYPE:SHAPE:HEX", such as "xxh3:bfloat16:4096x1024:<32 hex digits>". The digits depend only on
    the bytes in row-major order, without zeros at the end, on every device. `function` is "xxh3" or "fold"; by default
    the faster one for the weight's device. Both detect accidents, but no attack."""
    function = function or ("xxh3" if weight.device.type == "cpu" else "fold")
    data = weight.detach().contiguous().view(-1).view(torch.uint8)
    dtype, shape = str(weight.dtype).removeprefix("torch."), "x".join(map(str, weight.shape))
    return f"{function}:{dtype}:{shape}:{FUNCTIONS[function](data)}"


def _xxh3(data: Tensor) -> str:
    """Return the XXH3 (128 bits) of the XXH3s of blocks of 4 MiB, which takes as long as reading the memory."""
    # vLLM's environment may lack it
    import xxhash

    content = _without_zeros(data.cpu().numpy()).data
    blocks = [content[start : start + _BLOCK] for start in range(0, len(content), _BLOCK)]
    if len(blocks) < _BLOCKS_FOR_THREADS:
        digests = list(map(xxhash.xxh3_128_digest, blocks))
    else:
        with ThreadPoolExecutor(memory_threads(), "digest") as pool:
            digests = list(pool.map(xxhash.xxh3_128_digest, blocks))
    return xxhash.xxh3_128_hexdigest(b"".join(digests))


def _without_zeros(content: Bytes) -> Bytes:
    end = len(content)
    while end > 0 and not content[max(end - _TAIL, 0) : end].any():
        end -= _TAIL
    end = max(end, 0)
    tail = content[max(end - _TAIL, 0) : end].tobytes()
    return content[: end - len(tail) + len(tail.rstrip(b"\0"))]


def _folded(data: Tensor) -> str:
    """Return a digest computed by integer arithmetic on the weight's own device, with the same result on each.

    The bytes are read as 32-bit words w[0], w[1], ... in rows of 131,072. Each column is folded into the polynomial
    sum(m(w[row]) * M**row) modulo 2**32, where m(w) = w + (w >> 16) brings the sign into the middle of the word. The
    columns are folded once more into 4096 words, whose sha256 is cut to 128 bits.

    It always finds the change of a single word (except for one pair of words, a denormal number and a NaN). It misses a
    change of two words of one column with a probability of 2**-16 or less, and one of many columns practically never.
    """
    words = _words(data)
    fold = _fold_in_cache if words.device.type == "cpu" else _fold
    for lanes, multiplier in _LANES:
        words = fold(words, lanes, multiplier)
    words = torch.nn.functional.pad(words, (0, lanes - len(words)))
    return hashlib.sha256(words.cpu().numpy().tobytes()).hexdigest()[:32]


FUNCTIONS: dict[str, Callable[[Tensor], str]] = {"xxh3": _xxh3, "fold": _folded}
"""Digest functions of bytes, by name."""


def _words(data: Tensor) -> Tensor:
    if len(data) % 4:
        data = torch.nn.functional.pad(data, (0, -len(data) % 4))
    # a slice of a larger buffer may begin between two words
    return (data.clone() if data.storage_offset() % 4 else data).view(torch.int32)


def _fold(words: Tensor, lanes: int, multiplier: int) -> Tensor:
    """Return the polynomials of the columns, at most `lanes` words. Trailing zeros change none."""
    whole = len(words) // lanes
    rest = words[whole * lanes :]
    folded = torch.zeros(lanes if whole else len(rest), dtype=torch.int32, device=words.device)
    folded[: len(rest)] = rest + (rest >> 16)
    rows = words[: whole * lanes].view(whole, lanes)
    for start in reversed(range(0, whole, _ROWS_AT_ONCE)):
        block = rows[start : start + _ROWS_AT_ONCE]
        # as int32
        powers = [(pow(multiplier, number, 2**32) + 2**31) % 2**32 - 2**31 for number in range(len(block) + 1)]
        weighted = (block + (block >> 16)) * torch.tensor(powers[:-1], dtype=torch.int32, device=words.device)[:, None]
        folded = weighted.sum(0, dtype=torch.int32).add_(folded, alpha=powers[-1])
    return folded


def _fold_in_cache(words: Tensor, lanes: int, multiplier: int) -> Tensor:
    """Return the same as `_fold`, on a CPU. Everything but the row stays in the CPU's cache. It uses numpy and its own
    threads: torch would start threads for every row, which takes longer than the row."""
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
        threads = memory_threads()
        width = -(-lanes // threads)
        with ThreadPoolExecutor(threads, "digest") as pool:
            list(pool.map(fold, (slice(start, start + width) for start in range(0, lanes, width))))
    return torch.from_numpy(folded)


def memory_threads() -> int:
    """Return the number of threads that should read memory in parallel; more than a few are no faster."""
    return min(torch.get_num_threads(), _MOST_THREADS)


_WORD = 2**32 - 1
_TILE = 8192
_TILES_AT_ONCE = 512
"""Tiles hashed together: 16 MiB of a weight."""
_SEEDS = (0x243F6A88, ((0x243F6A88 * 0x9E3779B1) ^ 0xDEADBEEF) & _WORD)
_PLACES = ((0x27D4EB2D, 15), (0x165667B1, 13))
"""Per half of the hash: the factor of a word's place, and the rotation of the place."""


def sglang_hash(weight: Tensor, function: str) -> str:
    """Return the 16 hex digits of a weight's bytes in row-major order: `tensor_hash` of SGLang 0.5.23
    (sglang/srt/managers/mm_utils.py). `function` is ON_CPU or ON_GPU; both can be computed on any device."""
    data = weight.detach().contiguous().view(-1).view(torch.uint8)
    if function == ON_CPU:
        return hashlib.sha256(data.cpu().numpy().data).hexdigest()[:16]
    return f"{_gpu_hash(data):016x}"


def _gpu_hash(data: Tensor) -> int:
    """Return `gpu_tensor_hash` (sglang/kernels/ops/memory/gpu_tensor_hash.py), a Triton kernel there: two 32-bit hashes
    per tile of 8192 words, summed modulo 2**64."""
    words, total = _words(data), 0
    for start in range(0, len(words), _TILE * _TILES_AT_ONCE):
        part = words[start : start + _TILE * _TILES_AT_ONCE].long() & _WORD
        places = torch.arange(start, start + len(part), device=part.device) & _WORD
        halves = []
        for seed, (factor, turn) in zip(_SEEDS, _PLACES, strict=True):
            rotated = ((places << turn) | (places >> (32 - turn))) & _WORD
            mixed = _mix(part ^ ((places * factor + seed) & _WORD) ^ rotated)
            tiles = torch.nn.functional.pad(mixed, (0, -len(mixed) % _TILE)).view(-1, _TILE).sum(1) & _WORD
            halves.append(_mix(tiles ^ (4 * len(words) & _WORD)))
        # int64 wraps, as uint64 does
        total += int(((halves[0] << 32) | halves[1]).sum())
    # splitmix64's finalizer, with one shift of its own
    total %= 2**64
    total = (total ^ (total >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    total = (total ^ (total >> 27)) * 0x94D049BB133111EB % 2**64
    return total ^ (total >> 31) if len(words) else 0


def _mix(words: Tensor) -> Tensor:
    """Return MurmurHash3's fmix32 of 32-bit words in int64; products wrap, and only their low words are kept."""
    words = ((words ^ (words >> 16)) * 0x85EBCA6B) & _WORD
    words = ((words ^ (words >> 13)) * 0xC2B2AE35) & _WORD
    return words ^ (words >> 16)
