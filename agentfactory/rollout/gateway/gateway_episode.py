"""One chain whose agent keeps its own loop and history, and samples its turns through the gateway."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from agentfactory.rollout.chains.episode import Setup
from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.chains.turn import AgentFailed
from agentfactory.rollout.data import Task
from agentfactory.rollout.gateway.client_agents import ChainTools, ClientAgent, Visit
from agentfactory.rollout.gateway.gateway_server import Gateway
from agentfactory.rollout.gateway.gateway_turns import AskedTurns
from agentfactory.rollout.trajectory import StopReason, Trajectory
from agentfactory.tools.messages import EnvironmentReward, ToolCall, ToolResult
from agentfactory.tools.sessions.tool_session import ToolSession

logger = logging.getLogger(__name__)

_PAGE = "docs/own-agents.md"


class GatewayEpisode(AskedTurns):
    """One chain of an agent with its own client."""

    def __init__(
        self,
        setup: Setup,
        trajectory: Trajectory,
        task: Task,
        sampling: Sampling,
        gateway: Gateway,
        agent: ClientAgent,
        judged: bool,
    ) -> None:
        super().__init__(setup, trajectory, task, sampling)
        self.gateway = gateway
        self.agent = agent
        self.judged = judged
        self._over: StopReason | None = None
        """Why the agent may take no more turns, though it is still waited for."""

    @asynccontextmanager
    async def begun(self) -> AsyncIterator[None]:
        """See Episode."""
        chain = self.trajectory
        folder = self.agent.folder(chain.id, chain.workspaces)
        async with self.agent.begun(chain.id), folder as self.workspace:
            yield

    async def play(self, session: ToolSession) -> StopReason:
        """Let the agent run until it ends or may take no more turns, and return the reason. Raises AgentFailed."""
        try:
            with self.gateway.serving(self) as endpoint:
                visit = Visit(
                    endpoint,
                    await self._shown_task(),
                    self.trajectory.id,
                    self._tools(session),
                    self.workspace,
                    self._report,
                    self.judged,
                    partial(self.gateway.listening, endpoint.key),
                )
                agent = asyncio.create_task(self.agent.run(visit), name=f"agent of {visit.chain}")
                try:
                    running: list[asyncio.Future[Any]] = [agent, self._ended]
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    if self._ended.done():
                        return self._ended.result()
                    self.trajectory.result = agent.result()
                    return self._over or self._last
                except AgentFailed as failure:
                    self.trajectory.result = failure.result
                    if self._last is StopReason.CONTEXT_OVERFLOW:
                        return self._last  # it was told so, and could not go on
                    raise
                finally:
                    agent.cancel()
                    await asyncio.wait([agent])
                    self._close()
                    await visit.tools.close()
        finally:
            if self._ended.done():
                self._ended.exception()  # it may be one that nothing else reads
            self._number_turns()

    def _tools(self, session: ToolSession) -> ChainTools:
        def note(call: ToolCall, result: ToolResult) -> None:
            self._count([call], [result])
            if (reason := self._ending([result])) is not None:
                self._end(reason)

        return ChainTools(self.specs, session, self.limits, self.timeline, note, self._fail)

    async def _shown_task(self) -> Task:
        """Return the row as the agent gets it: with its images, if the agent cannot read the files."""
        sight = self.renderer.sight
        if not self.agent.elsewhere or sight is None or "images" not in self.task:
            return self.task
        rest = {name: value for name, value in self.task.items() if name != "images"}
        return {**rest, "messages": await sight.with_data(self.task["messages"])}

    def _report(self, reward: EnvironmentReward) -> None:
        self.reported = reward

    def _end(self, reason: StopReason) -> None:
        """See AskedTurns. An agent that lives elsewhere cannot be ended, and may still say what the chain is worth."""
        if self.agent.elsewhere:
            self._over = self._over or reason
            self._taken = self.config.max_turns
        else:
            super()._end(reason)

    def _number_turns(self) -> None:
        """Number the chain's turns in the order of its rows, as everything after the rollout does."""
        place = {node.number: number for number, node in enumerate(self.tree.in_rows())}
        self.trajectory.malformed_turns = sorted(place[number] for number in self.trajectory.malformed_turns)
        for stretch in self.trajectory.timeline:
            if stretch.turn is not None:
                stretch.turn = place.get(stretch.turn)

    def metrics(self) -> dict[str, float]:
        """See Episode."""
        names = ("gateway/unmatched_turns", "gateway/spliced_turns", "gateway/unmet_parameters")
        return super().metrics() | {name: self.counts[name] for name in names}
