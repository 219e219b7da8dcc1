"""A reaper that kills a process's leftover sandboxes when that process is gone.

It finds them by its argument, a token in their command lines. Its stdin closes with the process.

bwrap's --die-with-parent has a gap: if bwrap is killed between its fork and the child's first step, the child waits
forever. This runs as the sandboxes' own user and is passed to Python as text, so it imports nothing of ours.
"""

import os
import sys
import time

_SWEEPS, _PAUSE_SECONDS = 20, 0.1  # a sandbox that was being started appears a little later


def main() -> None:
    """Wait, then sweep for two seconds."""
    token = sys.argv[1].encode()
    while os.read(0, 4096):
        pass
    for _ in range(_SWEEPS):
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid():
                _end(int(name), token)
        time.sleep(_PAUSE_SECONDS)


def _end(pid: int, token: bytes) -> None:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if token in file.read().split(b"\0"):
                os.kill(pid, 9)
    except OSError:  # the process has ended, or belongs to another user
        return


if __name__ == "__main__":
    main()
