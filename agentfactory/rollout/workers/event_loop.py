"""The worker's event loop, whose timers stay punctual when thousands of responses arrive together."""

import asyncio
import gc
import select
import selectors

_EVENTS = 1
"""Number of sockets served between two checks of timers: four make timers thrice as late; one costs 1 to 12 % time."""


class _FewEvents(selectors.EpollSelector):
    """A selector that returns at most `_EVENTS` sockets per call. asyncio runs the callbacks of all ready sockets
    before it checks a timer: with 4,096 chains, a timeout of one second may fire five seconds late."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
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
    return asyncio.SelectorEventLoop(_FewEvents())


def collect_rarely() -> None:
    """Make Python's full garbage collections rarer: each visits every token of every chain, which took a quarter of the
    time of 256 chains with 16,000 tokens. Young garbage, which may hold large objects, is still collected soon."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(1_500, 60, 100)
