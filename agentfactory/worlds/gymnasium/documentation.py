"""The words that gymnasium's environments have about themselves, in the Markdown of their docstrings."""

import inspect
import re
from collections.abc import Sequence

_LONGEST_TEXT = 4000
_NO_ENVIRONMENTS = ("gymnasium.core", "typing", "builtins")
"""Modules of the bases of all environments."""
_MARKUP = (
    (re.compile(r"```.*?```", re.DOTALL), ""),  # citations
    (re.compile(r"!\[[^\]]*\]\([^)]*\)"), ""),
    (re.compile(r"\[<a href[^\]]*</a>\]|<a href[^>]*>|</a>|</?su[bp]>"), ""),
    (re.compile(r"\[([^\]]+)\]\(https?:[^)]*\)"), r"\1"),
    (re.compile(r"\n{3,}"), "\n\n"),
)
_ITEM = re.compile(r"^(?:-\s*(\d+):\s*(.+?)|\|\s*(\d+)\s*\|\s*([^|]+?)\s*\|.*)\s*$", re.MULTILINE)
"""A line of a list (`- 0: Move left`) or of a table (`| 0 | Cart Position | ...`)."""


def sections_of(environment: type) -> dict[str, str]:
    """Return heading -> text of the docstring of a class or its nearest base, other than gymnasium's; "" for the text
    above the first heading."""
    own = [kind for kind in environment.__mro__ if kind.__module__ not in _NO_ENVIRONMENTS]
    text = inspect.cleandoc(next(filter(None, (kind.__doc__ for kind in own)), ""))
    found: dict[str, str] = {}
    parts = re.split(r"^[ ]*##\s+(.+?)\s*$", text, flags=re.MULTILINE)
    for heading, body in zip(["", *parts[1::2]], parts[::2], strict=True):
        lines = [line.strip() for line in body.strip().splitlines()]
        found[heading] = "\n".join(lines)
    return found


def question_of(sections: dict[str, str], observations: bool) -> str:
    """Return the task in the environment's own words, if wished with its `observations`; empty if it has none."""
    shown = ("Description", *(["Observation Space"] if observations else []), "Rewards", "Episode End")
    texts = [sections.get(heading, "") for heading in shown]
    if not texts[0]:
        texts[0] = sections[""]
    for pattern, replacement in _MARKUP:
        texts = [pattern.sub(replacement, text).strip() for text in texts]
    return "\n\n".join(filter(None, texts))[:_LONGEST_TEXT]


def names_in(section: str, numbers: Sequence[int]) -> list[str]:
    """Return the names that a section gives to `numbers`; empty unless it has exactly one for each."""
    found = [(int(a or c), re.sub(r"[`*]", "", b or d)) for a, b, c, d in _ITEM.findall(section)]
    return [name for _, name in found] if [number for number, _ in found] == [*numbers] else []
