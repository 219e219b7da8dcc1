"""One chain: sample a turn, run its calls, append what the tools said, and so on until it ends."""

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from rollout.client import Completion, ContextOverflowError, InferenceClient, InferenceError
from rollout.concurrency import Places
from rollout.config import RolloutRecipe
from rollout.data import Task, opening_messages
from rollout.renderer import Renderer
from rollout.rewards import Rewards
from rollout.trajectory import Outcome, Row, Span, Trajectory
from tools.messages import CallError, EnvironmentRewardError, Message, ToolCall, ToolInfrastructureError
from tools.toolset import ToolSession, Toolset

logger = logging.getLogger(__name__)

ENDINGS = frozenset(outcome for outcome in Outcome if not outcome.failed)
"""Outcomes of chains that did not break."""


@dataclass(frozen=True)
class Sampling:
    """With what a chain is sampled: the weights by the server's name for them, and how.

    A function as `model` is asked for the name at each turn, and a turn keeps the weights that it began with unless
    the server updates them in place. `seed` is any text: with the recipe's seed it makes the chain reproducible on a
    server that takes seeds. `cache_salt` keeps a server that does not drop old caches (`rollout.inflight: keep`) from
    using those of other weights than the version that the salt names; what it samples with later ones is mixed.
    """

    model: str | Callable[[], str]
    temperature: float
    seed: str
    cache_salt: str | None = None


def turn_seed(recipe_seed: int, chain_seed: str, turn: int) -> int:
    """A 31-bit seed for one turn, independent of the order in which chains run."""
    digest = hashlib.blake2b(f"{recipe_seed}/{chain_seed}/{turn}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1


def begin(chain_id: str) -> Trajectory:
    """A chain that has nothing yet; unless it is played to an end it counts as cancelled."""
    return Trajectory(id=chain_id, messages=[], rows=[], outcome=Outcome.CANCELLED)


class ChainRunner:
    """Runs chains of one recipe; at most `rollout.concurrency` of them are alive at a time."""

    def __init__(
        self, recipe: RolloutRecipe, renderer: Renderer, client: InferenceClient, toolset: Toolset, rewards: Rewards
    ):
        self.recipe = recipe
        self.config = recipe.rollout
        self.renderer = renderer
        self.client = client
        self.toolset = toolset
        self.rewards = rewards
        limit = recipe.rollout.concurrency
        self.places = Places(recipe.server.max_num_seqs if limit == "auto" else limit)

    async def run(
        self, chain_id: str, task: Task, sampling: Sampling, scored: frozenset[Outcome] = ENDINGS
    ) -> Trajectory:
        """Run one chain to its end; see `play`."""
        trajectory = begin(chain_id)
        await self.play(trajectory, task, sampling, scored)
        return trajectory

    async def play(
        self, trajectory: Trajectory, task: Task, sampling: Sampling, scored: frozenset[Outcome] = ENDINGS
    ) -> None:
        """Run a chain that was just begun to its end. Failures are outcomes; only ServerUnreachableError and
        programming errors raise.

        A chain whose outcome is in `scored` gets a reward, unless its environment is gone or fails to give one.
        `trajectory` holds at any time what the chain has gathered: who cancels the call has it still.
        """
        async with self.places:
            started = time.monotonic()
            counts: Counter[str] = Counter()
            trajectory.messages += opening_messages(task, self.config.system_prompt)
            try:
                async with asyncio.timeout(self.config.timeout_seconds) as limit:
                    await self._play_and_score(trajectory, counts, task, sampling, scored, limit)
            except (TimeoutError, ToolInfrastructureError) as error:
                self._fail(trajectory, error)
            trajectory.seconds = time.monotonic() - started
            trajectory.metrics = {**_count_metrics(trajectory, counts), **trajectory.metrics}

    async def _play_and_score(
        self,
        trajectory: Trajectory,
        counts: Counter[str],
        task: Task,
        sampling: Sampling,
        scored: frozenset[Outcome],
        limit: asyncio.Timeout,
    ) -> None:
        async with self.toolset.chain(trajectory.id, task) as session:
            if session.opening:
                trajectory.messages.append({"role": "user", "content": session.opening})
            # a chain that runs out of time may have to be scored: only its turns end there, not the session
            deadline = limit.when()
            limit.reschedule(None)
            try:
                async with asyncio.timeout_at(deadline):
                    trajectory.outcome = await self._play(trajectory, counts, session, sampling)
            except (TimeoutError, InferenceError, ToolInfrastructureError) as error:
                self._fail(trajectory, error)
            limit.reschedule(asyncio.get_running_loop().time() + self.config.timeout_seconds)
            if trajectory.outcome not in scored:
                return
            environment = await session.reward()
            # a user's reward may raise anything, and that is no verdict on the policy
            try:
                verdict = await self.rewards.score(trajectory, task, environment)
            except Exception as error:
                logger.exception("the reward of chain %s raised", trajectory.id)
                trajectory.outcome, trajectory.error = Outcome.REWARD_ERROR, f"{type(error).__name__}: {error}"
                return
            trajectory.reward, trajectory.turn_rewards = verdict.reward, verdict.turn_rewards
            trajectory.metrics = dict(verdict.metrics)

    def _fail(self, trajectory: Trajectory, error: Exception) -> None:
        trajectory.error = str(error)
        match error:
            case TimeoutError():
                trajectory.outcome = Outcome.TIMEOUT
                trajectory.error = f"the chain took longer than rollout.timeout_seconds={self.config.timeout_seconds}"
            case InferenceError():
                trajectory.outcome = Outcome.INFERENCE_ERROR
            case EnvironmentRewardError():
                trajectory.outcome = Outcome.REWARD_ERROR
            case _:
                trajectory.outcome = Outcome.TOOL_INFRASTRUCTURE

    async def _play(
        self, trajectory: Trajectory, counts: Counter[str], session: ToolSession, sampling: Sampling
    ) -> Outcome:
        specs = self.toolset.specs
        row = Row()
        row.append_context(self.renderer.open(trajectory.messages, specs))
        trajectory.rows.append(row)
        while trajectory.turns < self.config.max_turns:
            room = self.config.max_total_tokens - len(row.token_ids)
            if room <= 0:
                return Outcome.CONTEXT_OVERFLOW
            try:
                completion = await self._sample(row, sampling, trajectory.turns, min(self.config.max_tokens, room))
            except ContextOverflowError:
                return Outcome.CONTEXT_OVERFLOW
            row.append_sampled(completion.token_ids, completion.logprobs, completion.versions)
            parsed = self.renderer.parse(completion.token_ids, counts["tool_calls"])
            trajectory.messages.append(parsed.message)
            trajectory.turns += 1
            counts["truncated_turns"] += completion.cut
            if parsed.error is None and not parsed.calls:
                return Outcome.MAX_TOKENS if completion.cut else Outcome.COMPLETED
            if parsed.error is not None:
                counts[CallError.MALFORMED_CALL] += 1
                answers: list[Message] = [{"role": "tool", "content": _explain(parsed.error, completion)}]
            else:
                answers = await _answer(parsed.calls, session, counts)
            trajectory.messages += answers
            if trajectory.turns == self.config.max_turns:
                break
            extension = self.renderer.extend(row.token_ids, trajectory.messages, answers, specs)
            if extension is None:
                # the template rewrites what was said before: what follows is sampled in a row of its own
                row = Row()
                row.append_context(self.renderer.open(trajectory.messages, specs))
                trajectory.rows.append(row)
            else:
                row.append_context(extension)
        return Outcome.MAX_TURNS

    async def _sample(self, row: Row, sampling: Sampling, turn: int, max_tokens: int) -> Completion:
        parameters = {
            "temperature": sampling.temperature,
            "max_tokens": max_tokens,
            "stop_token_ids": self.renderer.stop_token_ids,
        }
        # vLLM's CPU engine dies of per-request seeds, so only our own engine gets them
        if self.recipe.server.engine == "embedded":
            parameters["seed"] = turn_seed(self.recipe.seed, sampling.seed, turn)
        model = sampling.model if isinstance(sampling.model, str) else sampling.model()
        completion = await self.client.generate(
            row.token_ids, model, parameters, sampling.cache_salt, chain=sampling.seed
        )
        if self.recipe.model.lora is not None:
            # vLLM gives the version of the base weights here; what matters is the adapter, and a turn keeps it
            count = len(completion.token_ids)
            return replace(completion, versions=[Span(model, 0, count)] if count else [])
        if sampling.cache_salt is not None:
            mixed = [replace(span, mixed=span.version != sampling.cache_salt) for span in completion.versions]
            return replace(completion, versions=mixed)
        return completion


def _explain(error: str, completion: Completion) -> str:
    """What a malformed turn is told."""
    if completion.cut:
        return f"{error} The message was cut at {len(completion.token_ids)} tokens: write a shorter one."
    return error


async def _answer(calls: list[ToolCall], session: ToolSession, counts: Counter[str]) -> list[Message]:
    """Run the calls of one turn side by side; their answers stand in the order of the calls."""
    results = await asyncio.gather(*(session.call(call) for call in calls))
    counts["tool_calls"] += len(calls)
    for result in results:
        if result.error is not None:
            counts[result.error] += 1
    return [result.to_message(call) for call, result in zip(calls, results, strict=True)]


def _count_metrics(trajectory: Trajectory, counts: Counter[str]) -> dict[str, float]:
    """Every count by its metric's name, zeros too, so that means over chains are right."""
    return {
        "tool_calls": counts["tool_calls"],
        "truncated_turns": counts["truncated_turns"],
        "sampled_tokens": sum(sum(row.mask) for row in trajectory.rows),
        "rows": len(trajectory.rows),
        **{f"tool_errors/{kind}": counts[kind] for kind in CallError},
    }
