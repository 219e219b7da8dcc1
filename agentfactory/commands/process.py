"""The process of the `agentfactory` command, which Ctrl-C ends at any moment with one line and status 130."""

import os
import signal
import sys
from typing import NoReturn


def run() -> NoReturn:
    # a process in the background of a script ignores SIGINT
    hears = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if hears:
        signal.signal(signal.SIGINT, lambda *_: _end())
    from agentfactory.commands.main import INTERRUPTED, main

    if hears:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        status = main()
    except KeyboardInterrupt:
        _end()
    if status == INTERRUPTED:
        # unloading torch takes a second, and Python ends by a signal if it came during an `exec`
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _end() -> NoReturn:
    os.write(2, b"agentfactory: interrupted by Ctrl-C\n")
    os._exit(130)
