"""Stop strings, which end a turn. They come from a tool-call format or a client's request."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache

Decode = Callable[[list[int]], str]


def find_stop(text: str, stops: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """Return the position and the text of the first stop string in `text` from `start` on; None if there is none."""
    found = [(at, stop) for stop in stops if (at := text.find(stop, start)) >= 0]
    return min(found, key=lambda place: place[0] + len(place[1]), default=None)


def tokens_of(length: int, ids: list[int], decode: Decode) -> int:
    """Return the smallest number of leading tokens that contain the first `length` characters of the text."""
    text = decode(ids)[:length]
    return bisect_left(range(len(ids)), True, key=lambda count: decode(ids[:count]).startswith(text))


class StopWatch:
    """A detector of stop strings after each sampled token, which decodes only the last tokens."""

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops = stops
        self._decode = decode
        # a token stands for at least one byte, and a window may begin in the middle of a character
        self._window = max(len(stop.encode()) for stop in stops) + 4
        ends = {stop[-1] for stop in stops}
        # a decoder may drop a leading space, and does not show parts of a character
        shown = all(end.isascii() and end != " " for end in ends)
        # most tokens do not contain the last character of a stop string, which saves decoding
        self._may_complete = cache(lambda token: not shown or not ends.isdisjoint(decode([token])))

    def completed(self, tokens: list[int]) -> str | None:
        """Return the stop string that the last of `tokens` completes; None if there is none."""
        if not self._may_complete(tokens[-1]):
            return None
        found = find_stop(self._decode(tokens[-self._window :]), self._stops)
        return None if found is None else found[1]
