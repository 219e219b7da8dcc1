"""What a person must know of a run: said once in the terminal, counted, and said again at the end.

Any module calls `tell`, which is a warning in the log of its process, or `inform` for what is no fault. The rollout
worker forwards its notices to rank 0 of the trainer, and the command that a person started shows them
(`launching.progress.tell_warnings`).
"""

import logging
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Notice:
    """A notice: `topic` is what it counts under, `text` what happened, `see` where to look (a page or a log)."""

    topic: str
    text: str
    see: str = ""
    times: int = 1
    """How often it happened; 0 if the text contains the count so far."""
    level: int = logging.WARNING
    """That of its line in the log; logging.INFO is no fault."""

    def __str__(self) -> str:
        return f"{self.text}; see {self.see}" if self.see else self.text


def tell(logger: logging.Logger, topic: str, text: str, *, see: str = "", times: int = 1) -> None:
    """Tell the person at the terminal. Of the notices on one `topic` the first is shown at once; the last lines repeat
    the last one, with the sum of their `times`."""
    log(logger, Notice(topic, text, see, times))


def inform(logger: logging.Logger, text: str, *, see: str = "") -> None:
    """Tell the person at the terminal what is no fault, such as an address. It is shown at once, and not repeated."""
    log(logger, Notice("", text, see, level=logging.INFO))


def log(logger: logging.Logger, notice: Notice) -> None:
    """Log a notice, and so show it to whoever takes the notices of this process."""
    # an agent's words may contain lone surrogates, which neither a terminal nor a socket takes
    notice = replace(notice, text=notice.text.encode("utf-8", "replace").decode())
    logger.log(notice.level, "%s", notice, extra={"notice": notice})


def notice_of(record: logging.LogRecord) -> Notice | None:
    """Return the notice that `tell` put into this record; None for any other warning."""
    return getattr(record, "notice", None)


class Notices:
    """The notices of a run, by topic."""

    def __init__(self) -> None:
        self._last: dict[str, Notice] = {}

    def take(self, notice: Notice) -> bool:
        """Count a notice. Return whether it is the first on its topic, so that it is to be shown."""
        before = self._last.get(notice.topic)
        self._last[notice.topic] = replace(notice, times=notice.times + (before.times if before else 0))
        return before is None

    def last_lines(self) -> list[str]:
        """Return the last notice of each topic, with the count."""
        return [
            f"{notice} ({notice.times} times)" if notice.times > 1 else f"{notice}" for notice in self._last.values()
        ]
