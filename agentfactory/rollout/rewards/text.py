"""Patterns on what models write, with a time limit: there are texts on which a harmless pattern takes for ever."""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import regex
from pydantic import AfterValidator, ConfigDict

SECONDS = 1.0
"""For one match."""

OPTIONS = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
"""How prebuilt rewards check their options."""


def _compiles(pattern: str) -> str:
    try:
        regex.compile(pattern)
    except regex.error as error:
        raise ValueError(f"not a regular expression ({error})") from None
    return pattern


Pattern = Annotated[str, AfterValidator(_compiles)]
"""A regular expression, in which `.` matches line ends too."""


def last_match(pattern: str, text: str) -> str | None:
    """What the last match of `pattern` has in its first group, or as a whole where it has no group.

    Raises TimeoutError where the search takes too long. Other threads go on meanwhile, which `re` would not let them.
    """
    found = deque(regex.finditer(pattern, text, regex.DOTALL, timeout=SECONDS, concurrent=True), maxlen=1)
    if not found:
        return None
    return found[0][1] if found[0].re.groups else found[0][0]


def matches(pattern: str, text: str) -> bool:
    """Whether `pattern` matches all of `text`, space around it aside. Raises TimeoutError as above."""
    found = regex.fullmatch(pattern, text.strip(), regex.DOTALL, timeout=SECONDS, concurrent=True)
    return found is not None


def extracted(pattern: str | None, prediction: str) -> str:
    """What of a prediction counts: all of it, or what `last_match` finds, which may be nothing."""
    return prediction if pattern is None else last_match(pattern, prediction) or ""


def field_of(row: Mapping[str, Any], name: str) -> Any:
    """The row's field. Raises ValueError, which says what there is, where it is missing."""
    if name not in row:
        raise ValueError(f"wants the field {name!r}, which the data does not have ({', '.join(row)})")
    return row[name]


def accepted_answers(row: Mapping[str, Any], name: str, pattern: str | None = None) -> list[str]:
    """The answers that a row's field accepts: one text or number, or a list of them; of each what `last_match` finds.

    Raises ValueError where there is none.
    """
    answer = field_of(row, name)
    answers = list(answer) if isinstance(answer, Iterable) and not isinstance(answer, (str, dict)) else [answer]
    if not answers or not all(isinstance(one, (str, int, float)) for one in answers):
        raise ValueError(f"wants answers in the field {name!r}: a text, a number, or a list of these, not {answer!r}")
    found = [str(one) if pattern is None else last_match(pattern, str(one)) or None for one in answers]
    if None in found:
        raise ValueError(f"finds nothing that matches {pattern!r} in the field {name!r}, which is {answer!r}")
    return [one for one in found if one is not None]
