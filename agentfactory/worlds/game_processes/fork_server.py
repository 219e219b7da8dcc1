"""The process that forks one process per game. It has imported the game's package, so that a fork takes milliseconds.

Run as `python -m agentfactory.worlds.game_processes.fork_server MODULE:NAME SECONDS FD`. For each socket received over
the socket FD, a fork creates `NAME()` and answers calls of its methods, until the socket is closed.
"""

import os
import signal
import socket
import sys
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from agentfactory.worlds.game_processes.refused import Refused


def main() -> None:
    """Fork games until the socket is closed."""
    place, seconds, descriptor = sys.argv[1:]
    os.dup2(2, 1)  # games that print would mix their output with the command's
    module, _, name = place.partition(":")
    make = getattr(import_module(module), name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks
    control = socket.socket(fileno=int(descriptor))
    control.send(b"!")
    while True:
        _, received, _, _ = socket.recv_fds(control, 1, 1)
        if not received:
            return
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _serve(make, float(seconds), Connection(received[0]))
            os._exit(0)
        os.close(received[0])


def _serve(make: Any, seconds: float, connection: Connection) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # kills the process, whatever it does
    game = None
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            game = make() if game is None else game
            answer: tuple[str, Any] = ("done", getattr(game, method)(*arguments))
        except Refused as refusal:
            answer = ("refused", refusal.args)
        except (Exception, SystemExit) as error:  # boundary: a game's package may raise anything
            answer = ("failed", f"{type(error).__name__}: {error}")
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            connection.send(answer)
        except BrokenPipeError:
            return


if __name__ == "__main__":
    main()
