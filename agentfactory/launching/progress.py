"""Progress display: a live table and bar on a terminal, and plain lines elsewhere."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import fmean
from typing import Any, Literal

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentfactory.base.run_notices import Notices, current, heard, notice_of

_ROWS = 10
_COLUMNS = {
    "grpo": {"reward": "{:.3f}", "success": "{:.2f}", "turns": "{:.1f}", "entropy": "{:.2f}"},
    "sft": {"loss": "{:.4f}", "grad_norm": "{:.2f}"},
}


class Progress:
    """A display of a run of `total` training steps. Feed it the lines of metrics.jsonl, and close it."""

    def __init__(self, total: int, kind: Literal["grpo", "sft"], console: Console | None = None):
        self.total = total
        self.columns = _COLUMNS[kind]
        self.console = console or Console(highlight=False)
        self._rows: deque[list[str]] = deque(maxlen=_ROWS)
        self._started = time.monotonic()
        self._step = 0
        # the last steps predict best how long the next ones take
        self._seconds: deque[float] = deque(maxlen=20)
        self._plain_at = 0.0
        self._stack = ExitStack()
        self._live: Live | None = None
        self._say: Callable[[str], None] = self._print
        if self.console.is_terminal:
            self._live = Live(console=self.console, get_renderable=self._render, refresh_per_second=4)
            self._stack.enter_context(self._live)
        else:
            self._say = self._stack.enter_context(heard(self._print))

    def update(self, metrics: dict[str, Any]) -> None:
        """Show one line of metrics. A line without a step's metrics is an evaluation and is shown as a note."""
        shown = {name: form.format(metrics[name]) for name, form in self.columns.items() if name in metrics}
        if not shown:
            found = {name.removeprefix("eval/"): value for name, value in metrics.items() if name.startswith("eval/")}
            if found:
                # success if the tasks have one, else the reward
                kinds = ([name for name in found if name.endswith(end)] for end in ("/success", "/reward"))
                wanted = next(filter(None, kinds), found)
                text = ", ".join(f"{name.replace('/', ' ')} {found[name]:.3f}" for name in wanted)
                self.note(f"held-out tasks after step {metrics.get('step', 0)}: {text}")
            return
        self._step = metrics["step"]
        if "seconds/step" in metrics:
            self._seconds.append(metrics["seconds/step"])
        speed = f"{metrics['tokens_per_second']:,.0f}" if "tokens_per_second" in metrics else ""
        if self._live:
            self._rows.append([str(self._step), *(shown.get(name, "") for name in self.columns), speed])
            return
        # many short steps, as in SFT, print at most one line per second, and one for the last step
        now = time.monotonic()
        if now - self._plain_at >= 1.0 or self._step == self.total:
            self._plain_at = now
            figures = "  ".join(f"{name} {text}" for name, text in shown.items())
            self.note(f"step {self._step}/{self.total}  {figures}  {speed} tokens/s  {self._eta()}")

    def close(self) -> None:
        """Restore the terminal; lines already shown stay."""
        self._stack.close()
        self._live = None

    def note(self, text: str) -> None:
        """Print a separate line that stays on the terminal."""
        self._say(text)

    def _print(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def _eta(self) -> str:
        spent = _clock(time.monotonic() - self._started)
        left = f", {_clock(fmean(self._seconds) * (self.total - self._step))} left" if self._seconds else ""
        return f"{spent} spent{left}"

    def _render(self) -> Group:
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
        for name in ("step", *self.columns, "tokens/s"):
            table.add_column(name, justify="right", header_style="bold")
        for row in self._rows:
            table.add_row(*row)
        bar = Table.grid(padding=(0, 2, 0, 0))
        done = f"{self._step}/{self.total}"
        bar.add_row(ProgressBar(total=self.total, completed=self._step, width=40), done, self._eta())
        now = Text(current(), no_wrap=True, overflow="ellipsis")
        return Group(table, bar, now) if self._rows else Group(bar, now)


@contextmanager
def tell_warnings(say: Callable[[str], None]) -> Iterator[Notices]:
    """Pass warnings, the first notice on each topic and information of our loggers to `say`, and at the end, even by an
    error, all notices of faults again, with their counts."""
    notices = Notices()
    try:
        with handled_by(_Said(say, notices)):
            yield notices
    finally:
        if lines := notices.last_lines():
            say("\n  ".join(["warnings of this run:", *lines]))


@contextmanager
def tell_information(say: Callable[[str], None], notices: Notices | None = None) -> Iterator[None]:
    """Pass information (`inform`) of our loggers, and with `notices` warnings, to `say` while the context is open."""
    with handled_by(_Said(say, notices)):
        yield


@contextmanager
def handled_by(handler: logging.Handler) -> Iterator[None]:
    """Pass records of our loggers, from information on, to `handler` while the context is open."""
    logger = logging.getLogger("agentfactory")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _Said(logging.Handler):
    """Passes notices of information to `say`; with `notices`, also warnings and the first notice on each topic."""

    def __init__(self, say: Callable[[str], None], notices: Notices | None = None):
        super().__init__(logging.INFO)
        self._say = say
        self._notices = notices

    def emit(self, record: logging.LogRecord) -> None:
        notice = notice_of(record)
        if record.levelno < logging.WARNING:
            if notice is not None:
                self._say(str(notice))
        elif self._notices is not None and (notice is None or self._notices.take(notice)):
            self._say(f"{record.levelname.lower()}: {record.getMessage()}")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
