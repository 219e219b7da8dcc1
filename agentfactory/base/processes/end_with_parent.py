"""A launcher that kills all descendants of a program when it ends, or when this process's stdin closes: `python -I -S
end_with_parent.py COMMAND ...`. It exits with the command's status, and needs only the standard library."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

_PR_SET_CHILD_SUBREAPER = 36
_TRIES, _PAUSE_SECONDS = 200, 0.01


def main() -> None:
    """Run the command, and exit with its status; 128 + N if signal N ended it."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        # its stdin is empty, because the end of ours is the signal to end it
        child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"{sys.argv[1]} cannot be started: {error.strerror}", file=sys.stderr)
        sys.exit(127)
    closed = threading.Event()

    def end_with_stdin() -> None:
        while os.read(0, 4096):
            pass
        closed.set()
        end_descendants()
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=end_with_stdin, daemon=True).start()
    status = child.wait()
    if closed.is_set():  # the other thread may have reaped the child, and with it the status
        status = -signal.SIGTERM
    end_descendants()
    sys.stdout.flush()
    os._exit(status if status >= 0 else 128 - status)


def end_descendants() -> None:
    """Kill every descendant of this process, until none is left: one may start another meanwhile."""
    for _ in range(_TRIES):
        found = _descendants(os.getpid())
        if not found:
            return
        for pid in found:
            with suppress(OSError):  # the process has ended, or belongs to another user
                os.kill(pid, signal.SIGKILL)
        # orphans become our children, and stay zombies until they are waited for
        for pid in found:
            with suppress(OSError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_PAUSE_SECONDS)


def _descendants(root: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # the name of the program, in brackets, may contain any character
                state, parent, *_ = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if state != b"Z":
            parents.setdefault(int(parent), []).append(int(name))
    found, waiting = [], [root]
    while waiting:
        below = parents.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


if __name__ == "__main__":
    main()
