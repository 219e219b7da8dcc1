"""Regular expressions on model output, with a time limit, since even harmless patterns can backtrack forever."""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import regex
from pydantic import AfterValidator, ConfigDict

SECONDS = 1.0

OPTIONS = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
"""Pydantic settings for the options of prebuilt rewards."""


def _compiles(pattern: str) -> str:
    try:
        regex.compile(pattern)
    except regex.error as error:
        raise ValueError(f"not a regular expression ({error})") from None
    return pattern


Pattern = Annotated[str, AfterValidator(_compiles)]
"""A regular expression, in which `.` also matches newlines."""


def last_match(pattern: str, text: str) -> str | None:
    """Return the first group of the last match of `pattern`, or the whole match if it has no group. Raise TimeoutError
    if the search takes too long. Other threads keep running meanwhile, unlike with `re`."""
    found = deque(regex.finditer(pattern, text, regex.DOTALL, timeout=SECONDS, concurrent=True), maxlen=1)
    if not found:
        return None
    return found[0][1] if found[0].re.groups else found[0][0]


def matches(pattern: str, text: str) -> bool:
    """Return whether `pattern` matches all of `text`, stripped. Raise TimeoutError if the match takes too long."""
    return regex.fullmatch(pattern, text.strip(), regex.DOTALL, timeout=SECONDS, concurrent=True) is not None


def field_of(row: Mapping[str, Any], name: str) -> Any:
    """Return the row's field. Raise ValueError with the available fields if it is missing."""
    if name not in row:
        raise ValueError(f"needs the field {name!r}, which the data does not have ({', '.join(row)})")
    return row[name]


def accepted_answers(row: Mapping[str, Any], name: str, pattern: str | None = None) -> list[str]:
    """Return the accepted answers in a row's field: one text or number, or a list of them, each reduced to
    `last_match` of `pattern`. Raise ValueError if there is none."""
    answer = field_of(row, name)
    answers = list(answer) if isinstance(answer, Iterable) and not isinstance(answer, (str, dict)) else [answer]
    if not answers or not all(isinstance(one, (str, int, float)) for one in answers):
        raise ValueError(f"needs answers in the field {name!r}: a text, a number, or a list of these, not {answer!r}")
    found = [str(one) if pattern is None else last_match(pattern, str(one)) or None for one in answers]
    if None in found:
        raise ValueError(f"finds no match of {pattern!r} in the field {name!r}, which is {answer!r}")
    return [one for one in found if one is not None]
