"""`data.verifiers`: tasks of an environment of verifiers, as data rows."""

import os
import shutil
from typing import Any, ClassVar

from pydantic import Field

from agentfactory.base.config import Options, PositiveInt
from agentfactory.base.errors import SettingError
from agentfactory.base.user_code.watch import announced
from agentfactory.rollout.config import TaskSource
from agentfactory.worlds.verifiers.verifiers_process import load_rows


class VerifiersSource(TaskSource):
    """Tasks of an environment of verifiers (docs/verifiers.md)."""

    agent = "agentfactory.worlds.verifiers.verifiers_agent:VerifiersAgent"
    paths: ClassVar[tuple[str, ...]] = ("folder",)

    python: str
    """Full path of the Python in which verifiers 0.4 and the environment are installed, or its name on PATH."""
    id: str
    """Taskset: the name of its package, as in `vf-eval ID`."""
    folder: str | None = None
    """Folder with the taskset's module, if it is not installed."""
    options: Options = {}
    """Fields of the taskset, as in `vf-eval --env.taskset.NAME`."""
    env: Options = {}
    """Other fields of verifiers' environment, as in `vf-eval --env.NAME`: `id`, seats such as `agent`, `timeout`. Seats
    have the harness `null` and the runtime `subprocess` unless they, or the taskset, name others."""
    first_task: int = Field(default=0, ge=0)
    """Number of the first task. Ranges of training and evaluation must not overlap."""
    tasks: PositiveInt | None = None
    """Number of tasks. Null: all."""

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per task, after loading the environment once. See TaskSource."""
        # not one of `paths`: these follow links, as which virtual environments have their Python
        python = shutil.which(os.path.expanduser(self.python))
        if python is None or not os.path.isabs(python):
            fix = "give the full path of the Python in which verifiers is installed"
            raise SettingError("verifiers.python", f"got {self.python!r}, which is no program", fix)
        settings = {**self.model_dump(mode="json"), "python": python}
        with announced(f"loading {self.id}"):
            found = load_rows({**settings, "max_turns": None})
        shared = {name: settings[name] for name in ("python", "id", "folder", "options", "env")}
        return [{"question": row["question"], "verifiers": {"settings": shared, "data": row["data"]}} for row in found]
