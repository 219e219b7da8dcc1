"""docs/database.md as a reader follows it: its files are written, its commands run."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY

_BLOCK = re.compile(r'^```(?P<kind>bash|python|yaml)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$', re.M | re.S)
_ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
PAGE = (REPOSITORY / "docs" / "database.md").read_text(encoding="utf-8")


def follow(folder: Path, more: str = "") -> Path:
    """Do what the page says, in `folder`, except for the viewer; `more` is added to the command that trains. Return the
    task's folder."""
    shop = folder / "shop"
    for block in _BLOCK.finditer(PAGE):
        if block["title"]:
            (shop / block["title"]).write_text(block["text"], encoding="utf-8")
        elif block["kind"] == "bash":
            lines = [line for line in block["text"].splitlines() if not line.startswith("agentfactory view")]
            script = "\n".join(f"{line} {more}" if line.startswith("agentfactory train") else line for line in lines)
            bash(script, shop if shop.exists() else folder)
    return shop


def bash(script: str, folder: Path) -> str:
    """Run commands, of which none may fail; return what they print."""
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=folder, env=_ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout
