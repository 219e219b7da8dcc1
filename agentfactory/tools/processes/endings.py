"""Descriptions of how a process with user code ended."""

import signal

_FIX = (
    "correct the tool, environment, reward or agent that did it, or start the tool as a process of its own by "
    "mcp_servers.NAME.command"
)


def ended_by(status: int) -> str:
    """Describe the unexpected end of a process that runs user code, with a fix. `status` is its exit status, or minus
    the signal that ended it."""
    if status >= 0:
        return f"ended with status {status}, as by os._exit in user code; fix: {_FIX}"
    name = signal.Signals(-status).name if -status in {*signal.Signals} else "unknown"
    if -status == signal.SIGKILL:
        return f"was killed by signal 9 ({name}), as by the kernel when memory runs out; fix: free memory, or {_FIX}"
    return f"was killed by signal {-status} ({name}), as by a crash in user code; fix: {_FIX}"
