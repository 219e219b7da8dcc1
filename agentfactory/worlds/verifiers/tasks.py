"""`data.verifiers`: tasks of an environment of verifiers, as data rows."""

import asyncio
import json
import logging
import os
import shutil
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from agentfactory.base.config import Options, PositiveInt
from agentfactory.base.errors import SettingError
from agentfactory.base.messages import EnvironmentReward
from agentfactory.base.user_code.watch import announced
from agentfactory.rollout.chains.agent_hooks import AgentFailed
from agentfactory.rollout.config import TaskSource
from agentfactory.rollout.data import Task
from agentfactory.rollout.gateway.client_agents import ClientAgent, Visit
from agentfactory.worlds.verifiers.verifiers_process import VerifiersProcess, load_rows

logger = logging.getLogger(__name__)


class VerifiersAgent(ClientAgent):
    """Runs of verifiers' environments. One process plays all chains of an environment."""

    address_fix = "remove the client of the policy's seat from data.verifiers.env"

    def __init__(self) -> None:
        self._processes: dict[str, VerifiersProcess] = {}
        self._starting = asyncio.Lock()

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes.values():
            await process.close()

    def check_rows(self, tasks: Sequence[Task], section: str) -> None:
        for number, task in enumerate(tasks, 1):
            if "verifiers" not in task:
                problem = f"row {number} of {section} is not one of data.verifiers"
                raise SettingError("rollout.agent", f"got 'verifiers', but {problem}", "set it to null")

    async def run(self, visit: Visit) -> str | None:
        task = visit.task["verifiers"]
        process = await self._process({**task["settings"], "max_turns": visit.max_turns})
        endpoint = visit.endpoint
        found = await process.play(task["data"], endpoint.url, endpoint.key, endpoint.model)
        try:
            reward = EnvironmentReward.parse({**found["metrics"], "reward": found["reward"]}, "the environment")
        except TypeError as error:
            raise AgentFailed(str(error), found["answer"]) from error
        visit.report(reward)
        answer: str = found["answer"]
        return answer or None

    async def _process(self, settings: dict[str, object]) -> VerifiersProcess:
        key = json.dumps(settings, sort_keys=True)
        async with self._starting:
            process = self._processes.get(key)
            if process is None or process.ended:
                if process is not None:
                    logger.warning("the process of verifiers' %s ended; a new one is started", settings["id"])
                    await process.close()
                process = self._processes[key] = await VerifiersProcess(settings).start()
            return process


class VerifiersSource(TaskSource):
    """Tasks of an environment of verifiers (docs/verifiers.md)."""

    agent = "agentfactory.worlds.verifiers.tasks:VerifiersAgent"
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
