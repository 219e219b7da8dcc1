"""SGLang's checksums of weights, computed by the trainer. Only the trainer imports this module: it needs torch."""

import hashlib

import torch
from torch import Tensor

from agentfactory.rollout.inference.sglang.weight_translation import ON_CPU

_WORD = 2**32 - 1
_TILE = 8192
_TILES_AT_ONCE = 512
"""Tiles hashed together: 16 MiB of a weight."""
_SEEDS = (0x243F6A88, ((0x243F6A88 * 0x9E3779B1) ^ 0xDEADBEEF) & _WORD)
_PLACES = ((0x27D4EB2D, 15), (0x165667B1, 13))
"""Per half of the hash: the factor of a word's place, and the rotation of the place."""


def sglang_hash(weight: Tensor, function: str) -> str:
    """Return the 16 hex digits of a weight's bytes in row-major order: `tensor_hash` of SGLang 0.5.23
    (sglang/srt/managers/mm_utils.py). `function` is ON_CPU or ON_GPU; both can be computed on any
    device."""
    data = weight.detach().contiguous().view(-1).view(torch.uint8)
    if function == ON_CPU:
        return hashlib.sha256(data.cpu().numpy().data).hexdigest()[:16]
    return f"{_gpu_hash(data):016x}"


def _gpu_hash(data: Tensor) -> int:
    """Return `gpu_tensor_hash` (sglang/kernels/ops/memory/gpu_tensor_hash.py), a Triton kernel there: two 32-bit hashes
    per tile of 8192 words, summed modulo 2**64."""
    if len(data) % 4:
        data = torch.nn.functional.pad(data, (0, -len(data) % 4))
    words = (data.clone() if data.storage_offset() % 4 else data).view(torch.int32)
    total = 0
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
    return _finish(total % 2**64) if len(words) else 0


def _mix(words: Tensor) -> Tensor:
    """Return MurmurHash3's fmix32 of 32-bit words in int64; products wrap, and only their low words are kept."""
    words = words ^ (words >> 16)
    words = (words * 0x85EBCA6B) & _WORD
    words = words ^ (words >> 13)
    words = (words * 0xC2B2AE35) & _WORD
    return words ^ (words >> 16)


def _finish(number: int) -> int:
    """Return splitmix64's finalizer of a number, with one shift of its own."""
    number ^= number >> 30
    number = number * 0xBF58476D1CE4E5B9 % 2**64
    number ^= number >> 27
    number = number * 0x94D049BB133111EB % 2**64
    return number ^ (number >> 31)
