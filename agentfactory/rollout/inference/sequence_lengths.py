"""Sequence lengths at which a model's computation changes, read from its configuration's fields (config.json)."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from agentfactory.base.errors import SettingError

LONGEST = 512
"""Largest threshold that a proof at the start exceeds. Longer rows would delay the start."""
_THRESHOLDS = ("window", "chunk", "topk", "budget", "block_size", "original_max_position")
"""Parts of the names of fields that hold a length beyond which a model computes differently."""
logger = logging.getLogger(__name__)


class PositionLimit(NamedTuple):
    """A type of rotary embeddings, and the length beyond which a sequence changes its factors."""

    kind: str
    length: int

    @property
    def reason(self) -> str:
        """The reason why longer sequences are refused."""
        return (
            f"with {self.kind} positions, a sequence of more than {self.length} tokens changes the positions of all "
            "others in its pass"
        )


def position_limit(config: Mapping[str, Any]) -> PositionLimit | None:
    """Return the limit beyond which rotary factors depend on the longest sequence of a pass; None if they never do."""
    limits = [limit for part in config.values() if isinstance(part, Mapping) and (limit := position_limit(part))]
    given = config.get("rope_parameters") or config.get("rope_scaling")
    shared: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    whole, original = config.get("max_position_embeddings"), config.get("original_max_position_embeddings")
    # some models have factors for each type of layer
    for rope in (shared, *(part for part in shared.values() if isinstance(part, Mapping))):
        kind = str(rope.get("rope_type") or rope.get("type") or "")
        # "su" is its older name
        is_long = kind in ("longrope", "su")
        length = (original or rope.get("original_max_position_embeddings") or whole) if is_long else whole
        # a file may leave it to the class, whose configuration is checked when it is loaded
        if (is_long or "dynamic" in kind) and type(length) is int:
            limits.append(PositionLimit(kind, length))
    return min(limits, key=lambda limit: limit.length, default=None)


def check_lengths(config: Mapping[str, Any], lengths: Mapping[str, int]) -> None:
    """Raise SettingError if fields, with their values, allow sequences beyond the limit of `config`."""
    limit = position_limit(config)
    longer = [name for name, length in lengths.items() if limit is not None and length > limit.length]
    if limit is not None and longer:
        fix = f"use {' and '.join(f'{name}={limit.length}' for name in longer)}"
        raise SettingError(longer[0], f"got {lengths[longer[0]]}: {limit.reason}", fix)


def proof_length(config: Mapping[str, Any], longest: int) -> int:
    """Return the length that a proof's row must exceed: the largest threshold below `longest` and LONGEST."""
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
