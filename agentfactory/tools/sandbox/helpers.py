"""Two programs that are passed to Python as text: standard library only; any Python from 3.8 on can run them.

`enter CONTROL PORT COMMAND ...` is the first program in a sandbox that may reach us: it opens the port, sends us its
socket, and becomes COMMAND. A socket belongs to the network namespace that created it, so the receiver of this one
answers connections to the port inside.

`reap TOKEN` kills a process's leftover sandboxes when that process is gone: its stdin closes then. It finds them by the
token in their command lines, and runs as their own user. bwrap's --die-with-parent has a gap: if bwrap is killed
between its fork and the child's first step, the child waits forever."""

import array
import os
import socket
import sys
import time

_SWEEPS, _PAUSE_SECONDS = 20, 0.1  # a sandbox that was being started appears a little later


def enter(descriptor: str, port: str, *command: str) -> None:
    control = socket.socket(fileno=int(descriptor))
    listener = socket.create_server(("127.0.0.1", int(port)), backlog=1024)
    descriptors = array.array("i", [listener.fileno()])
    control.sendmsg([b"listening"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
    control.close()
    os.execv(command[0], command)


def reap(token: str) -> None:
    """Wait, then sweep for two seconds."""
    while os.read(0, 4096):
        pass
    for _ in range(_SWEEPS):
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) == os.getpid():
                continue
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    if token.encode() in file.read().split(b"\0"):
                        os.kill(int(name), 9)
            except OSError:  # the process has ended, or belongs to another user
                continue
        time.sleep(_PAUSE_SECONDS)


if __name__ == "__main__":
    if sys.argv[1] == "enter":
        enter(*sys.argv[2:])
    else:
        reap(sys.argv[2])
