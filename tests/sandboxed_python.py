"""A Python that sandboxed programs can run: root's sandboxes run as nobody, which cannot read all files."""

from pathlib import Path
from types import ModuleType
from typing import Any

from agentfactory.base.processes.sandbox_limits import sandbox_user
from agentfactory.tools.sandbox.interpreter import find_interpreter


def sandboxed_python(library: ModuleType, *arguments: str) -> dict[str, Any]:
    """Fields of `rollout.agent` that run Python with `arguments`; it can import `library` and the packages installed
    next to it."""
    packages = str(Path(library.__file__).parents[1])
    python = str(find_interpreter(sandbox_user()).executable)
    return {"command": [python, *arguments], "options": {"readable": [packages], "env": {"PYTHONPATH": packages}}}
