"""The runner of chains whose agents have their own loop."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from agentfactory.base.messages import own_copy
from agentfactory.rollout.chains.agent_hooks import AgentFailed, check_own_loop
from agentfactory.rollout.chains.chain_runner import ChainRunner
from agentfactory.rollout.chains.episode import Episode
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.data import Task
from agentfactory.rollout.gateway.client_agents import ChainTools, ClientAgent, Visit
from agentfactory.rollout.gateway.gateway_server import Asking, Gateway
from agentfactory.rollout.gateway.request_options import Refusal, Reply, TurnRequest, foreign_key
from agentfactory.rollout.gateway.sampled_turns import RequestedTurns, unavailable
from agentfactory.rollout.gateway.turn_tree import Plan
from agentfactory.rollout.inference.http_transport import InferenceError, ServerUnreachableError
from agentfactory.rollout.inference.inference_client import InferenceClient
from agentfactory.rollout.rewards import Rewards
from agentfactory.rollout.text.renderer import Renderer
from agentfactory.rollout.trajectory import Activity, StopReason
from agentfactory.tools.sessions.tool_session import ToolSession
from agentfactory.tools.sessions.toolset import Toolset

_UNREACHED = re.compile(r"connect|resolution|name or service|api[ _-]?key|\b401\b", re.IGNORECASE)
"""Words in the errors of clients that request turns from another address."""


class GatewayChain(Asking):
    """A chain driven by an agent with its own client, whose requests it answers; see Player and Asking. `judged`: the
    recipe scores the chain without the agent's own report."""

    def __init__(
        self, episode: Episode, turns: RequestedTurns, gateway: Gateway, agent: ClientAgent, judged: bool
    ) -> None:
        super().__init__(episode.sampling.temperature, turns.most_bytes, turns.overflow)
        self.episode = episode
        self.turns = turns
        self.gateway = gateway
        self.agent = agent
        self.judged = judged
        self._ended: asyncio.Future[StopReason] = asyncio.get_running_loop().create_future()
        self._over: StopReason | None = None
        """Stop reason of a chain that has no turns left but still waits for its agent."""
        self._taken = 0
        """Number of turns that were sampled or are being sampled."""
        self._requests: set[asyncio.Task[Any]] = set()
        """Requests whose turns are being sampled."""
        self._closed = False
        """True once the chain is over, after which its rows no longer change."""
        episode.own_metrics = self._metrics

    # ---- the agent

    async def play(self, session: ToolSession) -> StopReason:
        """Run the agent until it ends or has no turns left, and return the reason. Raise AgentFailed if it fails."""
        trajectory, task, images = self.episode.trajectory, self.episode.task, self.episode.setup.images
        try:
            with self.gateway.serving(self) as endpoint:
                visit = Visit(
                    endpoint,
                    own_copy(await images.without_files(task) if self.agent.elsewhere else task),
                    trajectory.id,
                    ChainTools(self.episode, session, self._end),
                    self.episode.workspace,
                    partial(setattr, self.episode, "reported"),
                    self.judged,
                    self.episode.max_turns,
                    partial(self.gateway.listening, endpoint.key),
                )
                agent = asyncio.create_task(self.agent.run(visit), name=f"agent of {visit.chain}")
                try:
                    running: list[asyncio.Future[Any]] = [agent, self._ended]
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    if self._ended.done():
                        return self._ended.result()
                    trajectory.result = agent.result()
                except AgentFailed as failure:
                    trajectory.result = failure.result
                    if self.turns.last is StopReason.CONTEXT_OVERFLOW:
                        return self.turns.last  # the agent got that error and gave up
                    if self._is_idle and not self.refused and _UNREACHED.search(str(failure)):
                        problem = f"{failure}; it has not requested a turn of the model"
                        raise AgentFailed(f"{problem}; fix: {self.agent.address_fix}", failure.result) from failure
                    raise
                finally:
                    agent.cancel()
                    await asyncio.wait([agent])
                    self._closed = True
                    for request in self._requests:
                        request.cancel()
                    await visit.tools.close()
                self._check_requested()
                return self._over or self.turns.last
        finally:
            if self._ended.done():
                self._ended.exception()  # mark it as retrieved: nothing else may have read it
            # turns are numbered in the order of the rows
            in_rows = sorted(self.turns.tree.nodes, key=lambda node: (node.row, node.end))
            place = {node.number: number for number, node in enumerate(in_rows)}
            trajectory.malformed_turns = sorted(place[number] for number in trajectory.malformed_turns)
            for stretch in trajectory.timeline:
                if stretch.turn is not None:
                    stretch.turn = place.get(stretch.turn)

    def _check_requested(self) -> None:
        """Raise AgentFailed if an agent of this machine ended without a turn of the model, which is not meant: a
        program may report its errors only in its output."""
        if not self._is_idle:
            return
        result = self.episode.trajectory.result
        said = f"; its output ends with: {result[-300:]}" if result else ""
        if self.refused:
            problem = f"the agent ended without a turn; its last request was refused: {self.refused}{said}"
        else:
            problem = f"the agent ended without requesting a turn of the model{said}; fix: {self.agent.address_fix}"
        raise AgentFailed(problem, result)

    @property
    def _is_idle(self) -> bool:
        idle = not (self._taken or self.agent.elsewhere or self.episode.reported)
        return idle and self.turns.last is StopReason.ANSWER and self._over is None

    def _end(self, reason: StopReason | Exception) -> None:
        """End the chain, by a reason or an error. An external agent cannot be stopped, and may still report a reward: a
        reason only refuses it further turns."""
        if isinstance(reason, StopReason) and self.agent.elsewhere:
            self._over = self._over or reason
            self._taken = self.episode.max_turns
        elif not self._ended.done():
            if isinstance(reason, StopReason):
                self._ended.set_result(reason)
            else:
                self._ended.set_exception(reason)

    def _metrics(self) -> dict[str, float]:
        names = ("gateway/unmatched_turns", "gateway/spliced_turns", "gateway/unmet_parameters")
        # an agent runs calls with its own tools, or with the recipe's; it may also call these without the model
        calls = max(self.turns.calls, self.episode.counts["tool_calls"])
        return {**{name: self.turns.counts[name] for name in names}, "tool_calls": calls}

    # ---- the agent's requests

    async def admit(self, turn_request: TurnRequest) -> Awaitable[list[Reply]]:
        self.turns.check(turn_request)
        left = self.episode.max_turns - self._taken
        if self._ended.done() or left < turn_request.choices:
            self._end(StopReason.MAX_TURNS)
            raise Refusal(400, "max_turns", f"the chain has rollout.max_turns={self.episode.max_turns} turns")
        plan = await self.turns.plan(turn_request)
        room = self.turns.room(plan)
        self._taken += turn_request.choices
        longest = self.episode.setup.config.max_tokens
        turn_request = replace(turn_request, messages=[])  # its images need not stay in memory for the turn
        return self._sample(turn_request, plan, min(room, longest, turn_request.max_tokens or longest))

    async def count(self, turn_request: TurnRequest) -> int:
        return len((await self.turns.plan(turn_request)).ids)

    async def _sample(self, turn_request: TurnRequest, plan: Plan, most: int) -> list[Reply]:
        if self._closed:  # the chain ended after the request was admitted
            raise foreign_key()
        request = asyncio.current_task()
        assert request is not None
        self._requests.add(request)
        try:
            async with self.episode.turn(plan.ids):
                start = time.monotonic()
                turns = await self.turns.sample(turn_request, plan, self.episode.sampling, most)
        except (Refusal, asyncio.CancelledError):
            self._taken -= turn_request.choices
            raise
        except (InferenceError, ServerUnreachableError) as error:
            self._end(error)
            raise unavailable(error) from error
        finally:
            self._requests.discard(request)
        episode = self.episode
        episode.trajectory.messages += plan.given
        for turn in turns:
            number = turn.node.number
            episode.timeline.note(Activity.MODEL, start, time.monotonic(), number)
            episode.note_turn(sum(turn.completion.mask))
            episode.trajectory.messages.append(turn.parsed.message)
            episode.counts["truncated_turns"] += turn.completion.cut
            if turn.parsed.error is not None:
                episode.note_malformed(number, turn.parsed.error)
        return [turn.reply for turn in turns]


class GatewayRunner(ChainRunner):
    own_loop = True

    def __init__(
        self,
        recipe: RolloutRecipe,
        renderer: Renderer,
        client: InferenceClient,
        toolset: Toolset,
        rewards: Rewards,
        agent: ClientAgent,
        gateway: Gateway,
    ):
        check_own_loop(recipe.rollout, renderer.parser.native)
        super().__init__(recipe, renderer, client, toolset, rewards)
        self.client_agent = agent
        self.gateway = gateway

    async def check(self, tasks: Sequence[Task], section: str = "data") -> None:
        self.client_agent.check_rows(tasks, section)
        await super().check(tasks, section)

    def check_prompts(self, tasks: Sequence[Task], section: str) -> None:
        """Check nothing: the agent writes its prompts itself."""

    @asynccontextmanager
    async def begun(self, episode: Episode) -> AsyncIterator[None]:
        async with self.client_agent.begun(episode.trajectory.id), self.client_agent.folder() as episode.workspace:
            yield

    def player(self, episode: Episode) -> GatewayChain:
        longest = self.setup.config.max_total_tokens
        turns = RequestedTurns(episode.trajectory.rows, self.renderer, self.sampler, longest)
        judged = bool(self.setup.recipe.rewards) or self.toolset.judges
        return GatewayChain(episode, turns, self.gateway, self.client_agent, judged)
