"""Processes that end when their starter is gone, even after kill -9, and even if a launcher stands between the two."""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from typing import Any

import psutil

from agentfactory.base.user_code.import_path import own_python

VARIABLE = "AGENTFACTORY_PARENT"
_POLL_SECONDS = 0.5
_GRACE_SECONDS = 4.0


def environment() -> dict[str, str]:
    """Return environment variables that make processes started from this one follow it; add them to the child's own."""
    return {VARIABLE: f"{os.getpid()}:{psutil.Process().create_time()}"}


def answer_of(module: str, said: str = "", env: Mapping[str, str] | None = None) -> Any:
    """Run a module of ours, which may import torch; return the JSON that it prints last. Raises RuntimeError."""
    env = {**os.environ, **environment(), **(env or {})}
    done = subprocess.run(own_python("-m", module), input=said, capture_output=True, text=True, check=False, env=env)
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise RuntimeError(lines[-1] if lines else f"exit status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def follow_parent() -> None:
    """End this process when its starter, named in the environment, is gone: SIGTERM, and after 4 s an exit."""
    if (value := os.environ.get(VARIABLE)) is not None:
        pid, create_time = value.split(":")
        follow(int(pid), float(create_time))


def follow(pid: int, create_time: float) -> threading.Event:
    """End this process when the process `pid` is gone; stop when the returned event is set."""
    enough = threading.Event()
    threading.Thread(target=_follow, args=(pid, create_time, enough), name="lifeline", daemon=True).start()
    return enough


def is_alive(pid: int, create_time: float) -> bool:
    """Return whether the process `pid` still runs; a process that reuses its number, or a zombie, does not count."""
    try:
        process = psutil.Process(pid)
        # clock adjustments shift the computed start by some hundredths of a second
        return abs(process.create_time() - create_time) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _follow(pid: int, create_time: float, enough: threading.Event) -> None:
    while is_alive(pid, create_time):
        if enough.wait(_POLL_SECONDS):
            return
    # on stdout, which for a trainer is the terminal; its reader may be gone too
    with contextlib.suppress(OSError, ValueError):
        print(f"process {pid}, which this one follows, is gone: ending", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)
    os._exit(1)
