"""Programs of ours that read text of others: a second wall around their parsers, where bubblewrap works."""

import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from agentfactory.base.processes import parent_watch
from agentfactory.base.run_notices import notify
from agentfactory.tools.sandbox.bubblewrap import find_bwrap, reading_command, refusal
from agentfactory.tools.sandbox.limits import SandboxUnavailable
from agentfactory.tools.sandbox.process import starter

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).resolve().parents[2]


def start_confined(command: list[str], env: Mapping[str, str], **options: Any) -> "subprocess.Popen[bytes]":
    """Start `command`, of this Python, like subprocess.Popen. It sees its libraries, and no network, home, temporary
    files or processes of this machine. If bubblewrap does not work here, it starts without that, with a notice.

    It ends with this process."""
    try:
        prefix = _prefix()
    except SandboxUnavailable as error:
        notify(logger, "confinement", f"programs that read a model's answers have only their own parsers: {error}")
        return subprocess.Popen(command, env=env, **options)
    # the process that it would follow has another number inside
    env = {name: value for name, value in env.items() if name != parent_watch.VARIABLE} | {
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
    }

    def start() -> "subprocess.Popen[bytes]":
        return subprocess.Popen([*prefix, *command], env=env, **options)

    return starter.submit(start).result()


@cache
def _prefix() -> list[str]:
    """Return the arguments before a command, which were tried. Raises SandboxUnavailable."""
    path = map(Path, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    further = [folder for folder in path if folder.is_dir() and not Path.home().is_relative_to(folder)]
    readable = [Path(sys.prefix), Path(sys.base_prefix), _PACKAGE, *further]
    prefix = reading_command(find_bwrap(None), readable)
    tried = subprocess.run([*prefix, sys.executable, "-I", "-S", "-c", ""], capture_output=True, text=True, check=False)
    if tried.returncode:
        raise refusal(tried.stderr)
    return prefix
