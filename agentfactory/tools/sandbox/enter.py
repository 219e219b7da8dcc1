"""The first program in a sandbox that may reach us: it opens the port, sends us its socket, and becomes the program.

Run as `python enter.py CONTROL PORT COMMAND ...`. A socket belongs to the network namespace that created it, so the
receiver of this one answers connections to the port inside. Standard library only; any Python from 3.8 on can run it.
"""

import array
import os
import socket
import sys


def main() -> None:
    """Send the listening socket on the descriptor CONTROL, and execute COMMAND."""
    control = socket.socket(fileno=int(sys.argv[1]))
    listener = socket.create_server(("127.0.0.1", int(sys.argv[2])), backlog=1024)
    descriptors = array.array("i", [listener.fileno()])
    control.sendmsg([b"listening"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
    control.close()
    os.execv(sys.argv[3], sys.argv[3:])


if __name__ == "__main__":
    main()
