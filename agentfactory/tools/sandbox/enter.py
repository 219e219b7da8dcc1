"""The first program in the sandbox of one that may reach us: it opens the port, hands it out, and becomes the program.

Run as `python enter.py CONTROL PORT COMMAND ...`. A socket belongs to the network in which it was made, so whoever
gets this one answers what connects to the port inside. Standard library only; any Python from 3.8 on can run it.
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
