"""Retry timing of failed requests: a pure state machine, without I/O."""

import random
import time
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

FIRST_DELAY, LONGEST_DELAY = 0.1, 5.0
"""Seconds between tries: the first delay doubles up to the longest."""


@dataclass
class Retries:
    """The retries of one request: exponential backoff with jitter, until it has failed for `limit` seconds."""

    limit: float
    failing_since: float | None = None
    _attempts: int = 0

    def delay(self, now: float, draw: float | None = None, asked: float = 0.0) -> float | None:
        """Return the seconds to wait after a failure at `now`; None when the limit is reached. `draw` in [0, 1) is the
        jitter; `asked` is the delay that the server requested."""
        if self.failing_since is None:
            self.failing_since = now
        left = self.failing_since + self.limit - now
        if left <= 0:
            return None
        self._attempts += 1
        return min(left, asked + self.pause(self._attempts, draw))

    @staticmethod
    def pause(attempt: int, draw: float | None = None) -> float:
        """Return the seconds before try `attempt` + 1: between half and all of the doubled delay."""
        longest = min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(attempt - 1, 30))
        return longest * (0.5 + 0.5 * (random.random() if draw is None else draw))


def seconds_asked(retry_after: str) -> float:
    """Parse a Retry-After header (RFC 9110, 10.2.3) to seconds; 0 if it has none."""
    with suppress(ValueError):
        return max(0.0, float(retry_after))
    with suppress(ValueError):
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    return 0.0
