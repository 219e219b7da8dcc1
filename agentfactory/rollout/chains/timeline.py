"""Recording of a chain's activities over time."""

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from agentfactory.base.messages import ToolCall, ToolResult
from agentfactory.rollout.trajectory import Activity, Stretch

_LEAST_WAIT = 0.001
"""Seconds below which a wait of a call is not recorded."""

Call = Callable[[ToolCall, float | None], Awaitable[ToolResult]]
"""(call, time limit in seconds) -> the result."""


class Timeline:
    """A recorder that appends to a trajectory's `timeline`, whose clock starts at 0 when this object is created."""

    def __init__(self, stretches: list[Stretch]) -> None:
        self._stretches = stretches
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """The seconds since the start."""
        return time.monotonic() - self._began

    def seconds_until(self, moment: float) -> float:
        """Return the seconds from the start to this time of `time.monotonic()`."""
        return moment - self._began

    def note(self, activity: Activity, start: float, end: float, turn: int | None = None, name: str = "") -> None:
        """Append an interval between two times of `time.monotonic()`."""
        since, until = (round(moment - self._began, 4) for moment in (start, end))
        self._stretches.append(Stretch(activity, since, until, turn, name))

    def note_setup(self, waits: Sequence[tuple[str, float, float]]) -> None:
        """Append the time until now as the chain's setup; `waits` are (server, start, end) of each wait in it."""
        for server, start, end in waits:
            self.note(Activity.WAIT, start, end, name=server)
        self.note(Activity.SETUP, self._began, time.monotonic())

    @contextmanager
    def measure(self, activity: Activity, turn: int | None = None, name: str = "") -> Iterator[None]:
        """Append the time of the `with` block, even if it raises or is cancelled."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.note(activity, start, time.monotonic(), turn, name)

    def running_at(self, moment: float) -> Stretch | None:
        """Return the recorded activity that ran the longest at this time of `time.monotonic()`; None if none did."""
        at = self.seconds_until(moment)
        running = [stretch for stretch in self._stretches if stretch.start <= at <= stretch.end + _LEAST_WAIT]
        return min(running, key=lambda stretch: stretch.start, default=None)

    def calls(self, make: Call, turn: int | None) -> Call:
        """Wrap `make`, which runs one call, to record its times. A call's wait lasts from now until `make` starts."""
        asked = time.monotonic()

        async def measured(call: ToolCall, seconds: float | None) -> ToolResult:
            if (began := time.monotonic()) - asked >= _LEAST_WAIT:
                self.note(Activity.WAIT, asked, began, turn, call.name)
            with self.measure(Activity.TOOL, turn, call.name):
                return await make(call, seconds)

        return measured
