"""The agent that plays tasks of `data.verifiers`: verifiers, whose requests to the model are the chain's turns."""

import asyncio
import json
import logging
from collections.abc import Sequence

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import EnvironmentReward
from agentfactory.rollout.chains.agent_hooks import AgentFailed
from agentfactory.rollout.data import Task
from agentfactory.rollout.gateway.client_agents import ClientAgent, Visit
from agentfactory.worlds.verifiers.verifiers_process import VerifiersProcess

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
        """See ClientAgent."""
        for number, task in enumerate(tasks, 1):
            if "verifiers" not in task:
                problem = f"row {number} of {section} is not one of data.verifiers"
                raise SettingError("rollout.agent", f"got 'verifiers', but {problem}", "set it to null")

    async def run(self, visit: Visit) -> str | None:
        """See ClientAgent."""
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
