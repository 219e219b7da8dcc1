"""Descriptions of how a process with user code ended."""

import signal
import traceback

from agentfactory.base.user_code.places import described, is_ours, place_of_line

_FIX = (
    "correct the tool, environment, reward or agent that did it, or start the tool as a process of its own by "
    "mcp_servers.NAME.command"
)

HOLDS_LOCK = (
    "end it sooner, such as by a simpler regular expression, or start the tool as a process of its own by "
    "mcp_servers.NAME.command, which limits can end"
)
"""Fix for user code that holds Python's lock."""


class Signalled(KeyboardInterrupt):
    """A signal that ends this process with `status`. User code that it interrupts is not to blame for it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


def exited_by(error: SystemExit) -> str | None:
    """Describe the user code that has called sys.exit; None if our own has."""
    stack = [place_of_line(*each) for each in traceback.walk_tb(error.__traceback__)]
    where = described(stack)
    # a library may call it for the user
    if where is None or is_ours(stack[-1].file):
        return None
    return f"user code called sys.exit({error.code!r}) ({where}); fix: raise an exception instead"


def ended_by(status: int, doing: str = "") -> str:
    """Describe the unexpected end of a process that runs user code, with a fix. `status` is its exit status, or minus
    the signal that ended it; `doing` is the user code that it executed, if it is known."""
    during = f" while {doing}" if doing else ""
    if status >= 0:
        return f"ended with status {status}{during}, as by os._exit in user code; fix: {_FIX}"
    name = signal.Signals(-status).name if -status in {*signal.Signals} else "unknown"
    cause, fix = "a crash in user code", _FIX
    if -status == signal.SIGKILL:
        cause, fix = "the kernel when memory runs out", f"free memory, or {_FIX}"
    return f"was killed by signal {-status} ({name}){during}, as by {cause}; fix: {fix}"
