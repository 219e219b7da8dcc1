"""Notices to the user of a run, from any module: shown once in the terminal, counted, and repeated at the end. A worker
forwards its notices to rank 0 of the trainer (`launching.progress.tell_warnings`)."""

import logging
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Notice:
    """A notice: `topic` is its counter, `text` the event, `see` the page or log with details."""

    topic: str
    text: str
    see: str = ""
    times: int = 1
    """Number of occurrences; 0 if the text contains the count so far."""
    level: int = logging.WARNING
    """Log level; logging.INFO if there is no fault."""

    def __str__(self) -> str:
        return f"{self.text}; see {self.see}" if self.see else self.text


def notify(logger: logging.Logger, topic: str, text: str, *, see: str = "", times: int = 1) -> None:
    """Warn the user at the terminal. The first notice on a `topic` is shown immediately; the last one is repeated at
    the end, with the sum of their `times`."""
    log(logger, Notice(topic, text, see, times))


def inform(logger: logging.Logger, text: str, *, see: str = "") -> None:
    """Show the user at the terminal information such as an address, immediately and only once."""
    log(logger, Notice("", text, see, level=logging.INFO))


def log(logger: logging.Logger, notice: Notice) -> None:
    """Log a notice, which passes it to the handlers of this process's notices."""
    # an agent's text may contain lone surrogates, which neither a terminal nor a socket accepts
    notice = replace(notice, text=notice.text.encode("utf-8", "replace").decode())
    logger.log(notice.level, "%s", notice, extra={"notice": notice})


def notice_of(record: logging.LogRecord) -> Notice | None:
    """Return the notice that `notify` put into this record; None for any other warning."""
    return getattr(record, "notice", None)


class Notices:
    def __init__(self) -> None:
        self._last: dict[str, Notice] = {}

    def take(self, notice: Notice) -> bool:
        """Count a notice. Return whether it is the first on its topic, which should be shown."""
        before = self._last.get(notice.topic)
        self._last[notice.topic] = replace(notice, times=notice.times + (before.times if before else 0))
        return before is None

    def last_lines(self) -> list[str]:
        """Return the last notice of each topic, with the count."""
        lines = ((notice, f" ({notice.times} times)" if notice.times > 1 else "") for notice in self._last.values())
        return [f"{notice}{times}" for notice, times in lines]
