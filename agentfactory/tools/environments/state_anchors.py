"""Anchors: texts that identify the state that an environment is in, so that turns in equal states can be compared."""

import json
from hashlib import blake2b
from typing import Any

ANCHOR_KEY = "agentfactory/anchor"
"""Key in a result's `_meta`: the anchor of the state after the call, any JSON; false if it has none (null would not
reach the other side). A result without the key leaves the anchor as it was."""

_LONGEST = 80
"""Characters of an anchor that trajectories keep; a longer one becomes a digest."""


def anchor_text(anchor: Any) -> str | None:
    """Return an anchor as text: a text stays as it is, anything else becomes its JSON; a long text becomes a digest.
    None stays None. Equal anchors give equal texts.

    Raises TypeError or ValueError if JSON cannot hold it, such as a set, whose order is not fixed.
    """
    if anchor is None:
        return None
    text = anchor if isinstance(anchor, str) else json.dumps(anchor, sort_keys=True, ensure_ascii=False, default=_plain)
    if len(text) <= _LONGEST:
        # as a file in UTF-8 can hold it
        return text.encode("utf-8", "replace").decode()
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    """Convert arrays and scalars of numpy and torch to Python's own types."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"JSON cannot hold a {type(value).__name__}")
