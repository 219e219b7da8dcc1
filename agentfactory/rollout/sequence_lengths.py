"""Sequence lengths at which a model's computation changes, read from its configuration's fields (config.json)."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

LONGEST = 512
"""Largest threshold that a proof at the start exceeds. Longer rows would delay the start."""
_THRESHOLDS = ("window", "chunk", "topk", "budget", "block_size", "original_max_position")
"""Parts of the names of fields that hold a length beyond which a model computes differently."""
logger = logging.getLogger(__name__)


class PositionLimit(NamedTuple):
    """A type of rotary embeddings, and the length beyond which a sequence changes its factors."""

    kind: str
    length: int

    def problem(self, length: int) -> str:
        """Describe the fault of sequences of `length` tokens."""
        return (
            f"got {length}: with {self.kind} positions, a sequence of more than {self.length} tokens changes the "
            "positions of all others in its pass, and a server those of every sequence"
        )


def position_limit(config: Mapping[str, Any]) -> PositionLimit | None:
    """Return the limit beyond which rotary factors depend on the longest sequence of a pass, as in transformers'
    `dynamic_rope_update`; None if they never do."""
    limits = [limit for part in config.values() if isinstance(part, Mapping) and (limit := position_limit(part))]
    shared = config.get("rope_parameters") or config.get("rope_scaling") or {}
    whole, original = config.get("max_position_embeddings"), config.get("original_max_position_embeddings")
    # some models have factors for each type of layer
    for rope in (shared, *(part for part in shared.values() if isinstance(part, Mapping))):
        kind = rope.get("rope_type") or rope.get("type") or ""
        # "su" is its older name
        if kind in ("longrope", "su"):
            limits.append(PositionLimit(kind, original or rope.get("original_max_position_embeddings") or whole))
        elif "dynamic" in kind:
            limits.append(PositionLimit(kind, whole))
    return min(limits, key=lambda limit: limit.length, default=None)


def proof_length(config: Mapping[str, Any], longest: int) -> int:
    """Return the length that a proof's row must exceed: the largest threshold below `longest`. Thresholds above LONGEST
    are left out and logged."""
    reached = {name: length for name, length in _thresholds(config) if length < longest}
    if beyond := [f"{name}={length}" for name, length in reached.items() if length > LONGEST]:
        logger.info("the proof at the start is shorter than %s", ", ".join(beyond))
    return max((length for length in reached.values() if length <= LONGEST), default=0)


def _thresholds(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _thresholds(value)
        elif type(value) is int and any(part in name for part in _THRESHOLDS):
            yield name, value
