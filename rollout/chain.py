"""One chain: take a turn, run its calls, append what the tools said, and so on until it ends."""

import asyncio
import hashlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace

from rollout.agent import AgentError, AgentHooks, Turn, TurnBudget
from rollout.client import Completion, ContextOverflowError, InferenceClient, InferenceError, ServerUnreachableError
from rollout.concurrency import Places
from rollout.config import RolloutRecipe
from rollout.context import Context, add_text, check_context, is_long
from rollout.data import Task, opening_messages
from rollout.renderer import Parsed, Renderer
from rollout.rewards import Rewards
from rollout.trajectory import Group, Outcome, Row, Span, StopReason, Trajectory
from tools.limits import ChainLimits, Rates, check_limits
from tools.messages import CallError, EnvironmentRewardError, Message, ToolCall, ToolInfrastructureError, ToolResult
from tools.toolset import ToolSession, Toolset

logger = logging.getLogger(__name__)

ENDINGS = frozenset(outcome for outcome in Outcome if not outcome.failed)
"""Outcomes of chains that did not break."""

_OUTCOMES = {
    StopReason.ANSWER: Outcome.COMPLETED,
    StopReason.FINISH: Outcome.COMPLETED,
    StopReason.MAX_TURNS: Outcome.MAX_TURNS,
    StopReason.MAX_TOKENS: Outcome.MAX_TOKENS,
    StopReason.CONTEXT_OVERFLOW: Outcome.CONTEXT_OVERFLOW,
}
"""Of chains that did not break; any other reason is a limit's."""


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


def turn_seed(recipe_seed: int, chain_seed: str, turn: int, sample: int = 0) -> int:
    """A 31-bit seed for one sample of one turn, independent of the order in which chains run."""
    place = f"{turn}.{sample}" if sample else f"{turn}"
    digest = hashlib.blake2b(f"{recipe_seed}/{chain_seed}/{place}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1


def begin(chain_id: str) -> Trajectory:
    """A chain that has nothing yet; unless it is played to an end it counts as cancelled."""
    return Trajectory(id=chain_id, messages=[], rows=[], outcome=Outcome.CANCELLED)


class ChainRunner:
    """Runs chains of one recipe; at most `rollout.concurrency` of them are alive at a time."""

    def __init__(
        self,
        recipe: RolloutRecipe,
        renderer: Renderer,
        client: InferenceClient,
        toolset: Toolset,
        rewards: Rewards,
        agent: AgentHooks | None = None,
    ):
        """Raises ValueError where limits, context policy or assistant prefix cannot work with these tools and this
        template."""
        self.recipe = recipe
        self.config = recipe.rollout
        self.renderer = renderer
        self.client = client
        self.toolset = toolset
        self.rewards = rewards
        self.agent = agent or AgentHooks()
        check_limits(recipe.limits, [spec.name for spec in toolset.specs])
        check_context(self.config)
        renderer.encode(self.config.assistant_prefix)  # a prefix that does not fit the template is refused at once
        self.rates = Rates(recipe.limits.calls_per_second)
        limit = recipe.rollout.concurrency
        self.places = Places(recipe.server.max_num_seqs if limit == "auto" else limit)

    def with_max_turns(self, max_turns: int) -> "ChainRunner":
        """The same runner, places and rates included, for chains of at most so many turns."""
        runner = copy(self)
        runner.config = self.config.model_copy(update={"max_turns": max_turns})
        return runner

    async def run(
        self, chain_id: str, task: Task, sampling: Sampling, scored: frozenset[Outcome] = ENDINGS
    ) -> Trajectory:
        """Run one chain to its end; see `play`."""
        trajectory = begin(chain_id)
        await self.play(trajectory, task, sampling, scored)
        return trajectory

    async def run_group(self, group_id: str, task: Task, chains: Sequence[Awaitable[Trajectory]]) -> Group:
        """Run `chains` on one task side by side, and add the rewards that compare them."""
        trajectories = list(await asyncio.gather(*chains))
        await self.rewards.score_group(trajectories, task)
        return Group(group_id, task, trajectories)

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
            chain = _Chain(self, trajectory, task, sampling)
            try:
                async with asyncio.timeout(self.config.timeout_seconds) as limit:
                    await self._play_and_score(chain, scored, limit)
            except (TimeoutError, ToolInfrastructureError) as error:
                self._fail(trajectory, error)
            trajectory.seconds = time.monotonic() - started
            trajectory.metrics = {**chain.metrics(), **trajectory.metrics}

    async def _play_and_score(self, chain: "_Chain", scored: frozenset[Outcome], limit: asyncio.Timeout) -> None:
        trajectory = chain.trajectory
        async with self.toolset.chain(trajectory.id, chain.task) as session:
            # a chain that runs out of time may have to be scored: only its turns end there, not the session
            deadline = limit.when()
            limit.reschedule(None)
            try:
                async with asyncio.timeout_at(deadline):
                    trajectory.stop_reason = await chain.play(session)
                    trajectory.outcome = _OUTCOMES.get(trajectory.stop_reason, Outcome.TOOL_LIMIT)
            except (TimeoutError, InferenceError, ToolInfrastructureError) as error:
                self._fail(trajectory, error)
            limit.reschedule(asyncio.get_running_loop().time() + self.config.timeout_seconds)
            if trajectory.outcome not in scored:
                return
            environment = await session.reward()
            # a user's reward may raise anything, and that is no verdict on the policy
            try:
                verdict = await self.rewards.score(trajectory, chain.task, environment)
            except Exception as error:
                logger.exception("the reward of chain %s raised", trajectory.id)
                trajectory.outcome, trajectory.error = Outcome.REWARD_ERROR, f"{type(error).__name__}: {error}"
                return
            trajectory.reward, trajectory.turn_rewards = verdict.reward - chain.penalty, verdict.turn_rewards
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

    async def generate(
        self, ids: list[int], sampling: Sampling, turn: int, max_tokens: int, sample: int = 0
    ) -> Completion:
        """Sample the `sample`-th attempt at a turn after `ids`."""
        parameters = {
            "temperature": sampling.temperature,
            "max_tokens": max_tokens,
            "stop_token_ids": self.renderer.stop_token_ids,
        }
        # vLLM's CPU engine dies of per-request seeds, so only our own engine gets them
        if self.recipe.server.engine == "embedded":
            parameters["seed"] = turn_seed(self.recipe.seed, sampling.seed, turn, sample)
        model = sampling.model if isinstance(sampling.model, str) else sampling.model()
        completion = await self.client.generate(ids, model, parameters, sampling.cache_salt, chain=sampling.seed)
        if self.recipe.model.lora is not None:
            # vLLM gives the version of the base weights here; what matters is the adapter, and a turn keeps it
            count = len(completion.token_ids)
            return replace(completion, versions=[Span(model, 0, count)] if count else [])
        if sampling.cache_salt is not None:
            mixed = [replace(span, mixed=span.version != sampling.cache_salt) for span in completion.versions]
            return replace(completion, versions=mixed)
        return completion


class _Chain:
    """The state of one chain while it is played: its trajectory, what the model sees of it, limits and counts."""

    def __init__(self, runner: ChainRunner, trajectory: Trajectory, task: Task, sampling: Sampling) -> None:
        self.runner = runner
        self.config = runner.config
        self.renderer = runner.renderer
        self.specs = runner.toolset.specs
        self.trajectory = trajectory
        self.task = task
        self.sampling = sampling
        self.limits = ChainLimits(runner.recipe.limits, runner.rates, runner.renderer.cut)
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, float] = defaultdict(float)
        """Tool -> seconds that its calls took."""
        opening = opening_messages(task, self.config.system_prompt)
        trajectory.messages += self.renderer.instruct(opening, self.specs)
        self.context = Context([])

    @property
    def row(self) -> Row:
        """The row that the chain goes on with."""
        return self.trajectory.rows[-1]

    @property
    def penalty(self) -> float:
        """What is taken off the reward."""
        return self.limits.penalty + self.config.outcome_penalty.get(self.trajectory.outcome, 0.0)

    async def play(self, session: ToolSession) -> StopReason:
        """Take turns until the chain ends, and say why it did."""
        trajectory = self.trajectory
        if session.opening:
            trajectory.messages.append({"role": "user", "content": session.opening})
        self.context = Context(list(trajectory.messages))
        self._begin_row(self.renderer.open(self.context.messages, self.specs))
        while True:
            try:
                completion, parsed = await self._take_turn()
            except ContextOverflowError:
                return StopReason.CONTEXT_OVERFLOW
            if parsed.error is None and not parsed.calls:
                return StopReason.MAX_TOKENS if completion.cut else StopReason.ANSWER
            if parsed.error is not None:
                self.counts[CallError.MALFORMED_CALL] += 1
                answers, ending = self.renderer.complaint(_explain(parsed.error, completion)), None
            else:
                results = await self.limits.run(parsed.calls, session.call)
                self._count(parsed.calls, results)
                answers, ending = self.renderer.answers(parsed.calls, results), self._ending(results)
            trajectory.messages += answers
            self.context.hear(answers)
            if ending is not None:
                return ending
            if trajectory.turns == self.config.max_turns:
                return StopReason.MAX_TURNS
            try:
                await self._go_on(answers)
            except ContextOverflowError:
                return StopReason.CONTEXT_OVERFLOW

    async def _take_turn(self) -> tuple[Completion, Parsed]:
        """One turn as the agent has it. Raises ContextOverflowError where no token is left for it."""
        turn, agent = self._turn(self.config.assistant_prefix), self.runner.agent
        try:
            completion = await agent.generate(turn)
            if not any(completion is made for made in turn.made):
                raise TypeError(f"it returned {completion!r:.200}, and not what turn.sample returned")
        except (InferenceError, ServerUnreachableError):
            raise
        except Exception as error:
            self._blame_agent("generate", error)
            raise
        self._append(completion)
        # what was sampled stays in the trajectory, whatever becomes of it
        try:
            parsed = agent.parse(turn, completion)
            if not isinstance(parsed, Parsed):
                raise TypeError(f"it returned {parsed!r:.200}, and not a Parsed")
        except Exception as error:
            self._blame_agent("parse", error)
            raise
        self.trajectory.messages.append(parsed.message)
        self.context.say(parsed.message)
        self.counts["truncated_turns"] += completion.cut
        return completion, parsed

    def _turn(self, prefix: str = "") -> Turn:
        number = self.trajectory.turns

        async def generate(ids: list[int], most: int, sample: int) -> Completion:
            return await self.runner.generate(ids, self.sampling, number, most, sample)

        return Turn(
            messages=self.context.messages,
            token_ids=list(self.row.token_ids),
            specs=self.specs,
            number=number,
            task=self.task,
            chain=self.trajectory.id,
            renderer=self.renderer,
            first_call=self.counts["tool_calls"],
            prefix=prefix,
            budget=TurnBudget(self.config.max_tokens, self.config.max_total_tokens),
            generate=generate,
        )

    def _append(self, completion: Completion) -> None:
        self.row.append_sampled(completion.token_ids, completion.logprobs, completion.versions, completion.mask)
        self.trajectory.turns += 1

    def _blame_agent(self, hook: str, error: Exception) -> None:
        """Raise AgentError where the hooks are a user's: what goes wrong in our own is a bug."""
        agent = type(self.runner.agent)
        if agent is not AgentHooks:
            logger.error("the agent failed at chain %s", self.trajectory.id, exc_info=error)
            raise AgentError(f"{agent.__name__}.{hook}: {type(error).__name__}: {error}") from error

    def _count(self, calls: list[ToolCall], results: list[ToolResult]) -> None:
        self.counts["tool_calls"] += len(calls)
        for call, result in zip(calls, results, strict=True):
            self.counts[f"tool/{call.name}/calls"] += 1
            self.seconds[call.name] += result.seconds
            if result.error is not None:
                self.counts[result.error] += 1
                self.counts[f"tool/{call.name}/errors"] += 1

    def _ending(self, results: list[ToolResult]) -> StopReason | None:
        """Why the chain ends with these results, if it does."""
        if any(result.finish for result in results):
            return StopReason.FINISH
        return None if self.limits.stopped is None else StopReason(self.limits.stopped)

    # ---- rows

    def _begin_row(self, ids: list[int]) -> None:
        row = Row()
        row.append_context(ids)
        self.trajectory.rows.append(row)

    async def _go_on(self, answers: list[Message]) -> None:
        """Bring `answers`, the last messages of the context, into the rows, so that the next turn can be taken."""
        extension, length = self._following(self.context.messages, answers)
        if is_long(length, self.config) and await self._shorten(answers, length):
            return
        self._follow(extension, self.context.messages)

    def _following(self, messages: list[Message], new: list[Message]) -> tuple[list[int] | None, int]:
        """The ids that lead the present row on to the end of `messages`, and the length that the row will have.

        None where the template rewrites what was said before: what follows is sampled in a row of its own.
        """
        extension = self.renderer.extend(self.row.token_ids, messages, new, self.specs)
        if extension is None:
            return None, len(self.renderer.open(messages, self.specs))
        return extension, len(self.row.token_ids) + len(extension)

    def _follow(self, extension: list[int] | None, messages: list[Message]) -> None:
        if extension is None:
            self._begin_row(self.renderer.open(messages, self.specs))
        else:
            self.row.append_context(extension)

    async def _shorten(self, answers: list[Message], length: int) -> bool:
        """Begin a row with less context, as `rollout.context` says; False where that would leave nothing out."""
        policy = self.config.context
        if len(self.context.turns) <= policy.keep_turns:
            return False
        if policy.policy == "truncate":
            shorter = self.context.last_turns(policy.keep_turns)
            ids = self.renderer.open(shorter.messages, self.specs)
            if len(ids) >= length:
                return False
        elif self.config.max_turns - self.trajectory.turns < 2:
            return False  # the summary would be the chain's last turn
        else:
            shorter = self.context.last_turns(policy.keep_turns, await self._summarize(answers))
            ids = self.renderer.open(shorter.messages, self.specs)
        self.context = shorter
        self._begin_row(ids)
        return True

    async def _summarize(self, answers: list[Message]) -> str:
        """Ask the model for a summary, in the present row; that is a turn. Raises ContextOverflowError."""
        prompt = self.config.context.prompt
        question: Message = {"role": "user", "content": prompt}
        self.trajectory.messages.append(question)
        # many templates want the roles to alternate
        asked = add_text(answers, prompt) if answers[-1]["role"] == "user" else [*answers, question]
        messages = [*self.context.messages[: -len(answers)], *asked]
        extension, _ = self._following(messages, asked)
        self._follow(extension, messages)
        turn = self._turn()
        completion = await turn.sample()
        self._append(completion)
        content = turn.parse(completion).message["content"] or ""
        self.trajectory.messages.append({"role": "assistant", "content": content})
        return content

    def metrics(self) -> dict[str, float]:
        """Every figure by its metric's name, zeros too, so that means over chains are right."""
        counts, rows = self.counts, self.trajectory.rows
        tools: dict[str, float] = {}
        for name in (spec.name for spec in self.specs):
            tools[f"tool/{name}/calls"] = counts[f"tool/{name}/calls"]
            tools[f"tool/{name}/errors"] = counts[f"tool/{name}/errors"]
            tools[f"tool/{name}/seconds"] = self.seconds[name]
        return {
            "tool_calls": counts["tool_calls"],
            "truncated_turns": counts["truncated_turns"],
            "sampled_tokens": sum(sum(row.mask) for row in rows),
            "rows": len(rows),
            "penalty": self.penalty,
            **{f"tool_errors/{kind}": counts[kind] for kind in CallError},
            **{f"stop/{reason}": float(self.trajectory.stop_reason is reason) for reason in StopReason},
            **self.limits.metrics(),
            **tools,
        }


def _explain(error: str, completion: Completion) -> str:
    """What a malformed turn is told."""
    if completion.cut:
        return f"{error} The message was cut at {sum(completion.mask)} tokens: write a shorter one."
    return error
