"""The worker's event loop: thousands of answers that arrive together do not delay its clock."""

import asyncio
import gc
import select
import selectors

_EVENTS = 1
"""Sockets that the loop serves before it looks at its timers again. What follows from each takes 1 to 3 ms, and a timer
waits for several rounds: with four sockets a round, timers were three times as late. More rounds take 1 to 12 % more
time."""


class _FewEvents(selectors.EpollSelector):
    """Returns at most `_EVENTS` sockets at a time. The kernel returns the others first the next time.

    asyncio takes all sockets that are ready, and runs everything that follows from them before it looks at a timer:
    with 4,096 chains, a time limit of one second may be noticed five seconds late.
    """

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See BaseSelector."""
        wait = -1.0 if timeout is None else max(timeout, 0.0)
        keys = self.get_map()
        ready = []
        for descriptor, event in self._selector.poll(wait, _EVENTS):  # type: ignore[attr-defined]
            mask = bool(event & ~select.EPOLLIN) * selectors.EVENT_WRITE
            mask |= bool(event & ~select.EPOLLOUT) * selectors.EVENT_READ
            if descriptor in keys:
                key = keys[descriptor]
                ready.append((key, mask & key.events))
        return ready


def event_loop() -> asyncio.AbstractEventLoop:
    """Create an event loop for many chains."""
    return asyncio.SelectorEventLoop(_FewEvents())


def collect_rarely() -> None:
    """Let Python search for old garbage in cycles less often: it reads every token of every chain each time, which took
    a quarter of the time of 256 chains with 16 thousand tokens. Young garbage is still found soon: a tool may leave
    large objects in cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_500, 60, 100)
