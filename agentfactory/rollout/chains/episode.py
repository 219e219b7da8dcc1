"""One chain, turn by turn: the sampled turns, their calls, the results, and the token rows."""

import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from agentfactory.rollout.chains.context import Context, count_images, is_long
from agentfactory.rollout.chains.opening import add_text, opening_messages
from agentfactory.rollout.chains.sampling import Sampler, Sampling
from agentfactory.rollout.chains.timeline import Timeline
from agentfactory.rollout.chains.tool_errors import ToolErrors
from agentfactory.rollout.chains.turn import AgentError, AgentHooks, Turn, TurnBudget
from agentfactory.rollout.config import RolloutConfig, RolloutRecipe
from agentfactory.rollout.data import Task
from agentfactory.rollout.inference.connection import ContextOverflowError, InferenceError, ServerUnreachableError
from agentfactory.rollout.inference.inference_client import Completion, EncodedIds
from agentfactory.rollout.text.renderer import Parsed, Renderer
from agentfactory.rollout.trajectory import Activity, ImageSpan, Row, StopReason, Trajectory
from agentfactory.tools.calls.limits import ChainLimits, Rates
from agentfactory.tools.messages import CallError, EnvironmentReward, Message, ToolCall, ToolResult, ToolSpec
from agentfactory.tools.sessions.tool_session import ToolSession

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    """Ids to be added to a row as context, and where images are in them."""

    ids: list[int]
    images: list[ImageSpan] = field(default_factory=list)


@dataclass(frozen=True)
class Setup:
    """The objects and settings that all chains of a recipe share."""

    recipe: RolloutRecipe
    renderer: Renderer
    sampler: Sampler
    specs: list[ToolSpec]
    agent: AgentHooks
    rates: Rates
    tool_errors: ToolErrors = field(default_factory=ToolErrors)

    @property
    def config(self) -> RolloutConfig:
        """The recipe's `rollout:` section."""
        return self.recipe.rollout


class Episode:
    """One chain: its trajectory, the context that the model sees, limits and counts."""

    def __init__(self, setup: Setup, trajectory: Trajectory, task: Task, sampling: Sampling) -> None:
        self.setup = setup
        self.config = setup.config
        self.renderer = setup.renderer
        self.specs = setup.specs
        self.trajectory = trajectory
        self.task = task
        self.sampling = sampling
        self.limits = ChainLimits(setup.recipe.limits, setup.rates, setup.renderer.cut)
        self.timeline = Timeline(trajectory.timeline)
        self.anchor: str | None = None
        """That of the state in which the current turn is taken."""
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, float] = defaultdict(float)
        """Tool -> seconds spent in its calls."""
        self.context = Context([])
        self.workspace: Path | None = None
        """The chain's folder, if it has one."""
        self.reported: EnvironmentReward | None = None
        """What the agent itself says that the chain is worth."""
        self._encoded = EncodedIds()

    @property
    def row(self) -> Row:
        """The chain's current row."""
        return self.trajectory.rows[-1]

    @property
    def penalty(self) -> float:
        """The amount subtracted from the reward."""
        return self.limits.penalty + self.config.outcome_penalty.get(self.trajectory.outcome, 0.0)

    @asynccontextmanager
    async def begun(self) -> AsyncIterator[None]:
        """Wait until the chain may begin; its time limit counts from then on. Until it has been judged, keep what it
        has beside its tools."""
        yield

    async def play(self, session: ToolSession) -> StopReason:
        """Take turns until the chain ends, and return the reason."""
        trajectory = self.trajectory
        opening = [self._limited(message) for message in opening_messages(self.task, self.config.system_prompt)]
        trajectory.messages += self.renderer.instruct(opening, self.specs)
        for server, left_out in session.left_out.items():
            self.setup.tool_errors.note_cut(f"{server} (reset)", left_out)
        if session.opening:
            trajectory.messages += await self._seen([self._limited({"role": "user", "content": session.opening})])
        self.context = Context(list(trajectory.messages))
        self._begin_row(self._opened(self.context.messages))
        return await self.act(session)

    async def act(self, session: ToolSession) -> StopReason:
        """Take turns, starting from the last messages, until the chain ends, and return the reason."""
        trajectory = self.trajectory
        while True:
            try:
                self.anchor = session.anchor
                completion, parsed = await self._take_turn()
            except ContextOverflowError:
                return StopReason.CONTEXT_OVERFLOW
            if parsed.error is None and not parsed.calls:
                return StopReason.MAX_TOKENS if completion.cut else StopReason.ANSWER
            if parsed.error is not None:
                self.counts[CallError.MALFORMED_CALL] += 1
                trajectory.malformed_turns.append(trajectory.turns - 1)
                answers, ending = self.renderer.complaint(_explain(parsed.error, completion)), None
            else:
                calls = self.timeline.calls(session.call, trajectory.turns - 1)
                results = await self.limits.run(parsed.calls, calls)
                results = await session.number_images(parsed.calls, results)
                self._count(parsed.calls, results)
                answers = await self._seen(self.renderer.answers(parsed.calls, results))
                ending = self._ending(results)
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
        """Take one turn with the agent. Raises ContextOverflowError if no token is left for it."""
        turn, agent = self._turn(self.config.assistant_prefix), self.setup.agent
        try:
            completion = await agent.generate(turn)
            if not any(completion is made for made in turn.made):
                raise TypeError(f"it returned {completion!r:.200}, and not what turn.sample returned")
        except (InferenceError, ServerUnreachableError):
            raise
        except Exception as error:
            self._blame_agent("generate", error)
            raise
        self._append(completion, self.anchor)
        # keep what was sampled in the trajectory, even if the agent fails
        try:
            parsed = agent.parse(turn, completion)
            if not isinstance(parsed, Parsed):
                raise TypeError(f"it returned {parsed!r:.200}, and not a Parsed")
        except Exception as error:
            self._blame_agent("parse", error)
            raise
        self._note_roles(parsed, completion)
        self.trajectory.messages.append(parsed.message)
        self.context.say(parsed.message)
        self.counts["truncated_turns"] += completion.cut
        return completion, parsed

    def _turn(self, prefix: str = "") -> Turn:
        number, stops = self.trajectory.turns, self.renderer.stops

        async def generate(ids: Sequence[int], most: int, sample: int) -> Completion:
            with self.timeline.measure(Activity.MODEL, number):
                row = self.row
                encoded = self._encoded if ids is row.token_ids else None
                return await self.setup.sampler.sample(
                    ids, self.sampling, number, most, sample, row.images, encoded, stops
                )

        return Turn(
            messages=self.context.messages,
            row=self.row.token_ids,
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

    def _append(self, completion: Completion, anchor: str | None = None) -> None:
        self.row.append_sampled(completion.token_ids, completion.logprobs, completion.versions, completion.mask)
        self.trajectory.note_turn(anchor)

    def _note_roles(self, parsed: Parsed, completion: Completion) -> None:
        # a user's agent may have parsed something other than the turn
        if len(parsed.roles) == len(completion.token_ids):
            self.row.note_roles(parsed.roles)

    def _blame_agent(self, hook: str, error: Exception) -> None:
        """Raise AgentError if the hooks are a user's: an error in our own hooks is a bug."""
        agent = type(self.setup.agent)
        if agent is not AgentHooks:
            logger.error("the agent failed at chain %s", self.trajectory.id, exc_info=error)
            raise AgentError(f"{agent.__name__}.{hook}: {type(error).__name__}: {error}") from error

    def _count(self, calls: list[ToolCall], results: list[ToolResult]) -> None:
        self.counts["tool_calls"] += len(calls)
        for call, result in zip(calls, results, strict=True):
            self.counts[f"tool/{call.name}/calls"] += 1
            self.seconds[call.name] += result.seconds
            self.setup.tool_errors.note(call.name, result)
            if result.error is not None:
                self.counts[result.error] += 1
                self.counts[f"tool/{call.name}/errors"] += 1

    def _ending(self, results: list[ToolResult]) -> StopReason | None:
        """Return why the chain ends with these results; None if it does not."""
        if any(result.finish for result in results):
            return StopReason.FINISH
        return None if self.limits.stopped is None else StopReason(self.limits.stopped)

    # ---- images

    def _limited(self, message: Message) -> Message:
        """Count the images of a message that no call returned."""
        content = message.get("content")
        return {**message, "content": self.limits.settle_images(content)} if isinstance(content, list) else message

    async def _seen(self, messages: list[Message]) -> list[Message]:
        """Return messages with the images that a model that sees gets."""
        sight = self.renderer.sight
        return messages if sight is None else await sight.take_messages(messages)

    # ---- rows

    def _opened(self, messages: list[Message]) -> Piece:
        return self._expanded(self.renderer.open(messages, self.specs), messages)

    def _expanded(self, ids: list[int], messages: list[Message]) -> Piece:
        """Return ids of `messages` with as many tokens for each image as it takes."""
        sight = self.renderer.sight
        return Piece(ids) if sight is None else Piece(*sight.expand(ids, messages))

    def _begin_row(self, piece: Piece) -> None:
        self.trajectory.rows.append(Row())
        self._encoded = EncodedIds()
        self.row.append_context(piece.ids, piece.images)

    async def _go_on(self, answers: list[Message]) -> None:
        """Add `answers`, the last messages of the context, to the rows, so that the next turn can be taken."""
        most = self.config.context.keep_images
        if most is not None and count_images(self.context.messages) > most:
            fewer = self.context.with_images(most)
            if len(fewer.turns) < len(self.context.turns):
                self.context = fewer
                self._begin_row(self._opened(fewer.messages))
                return
        messages = self.context.messages
        extension, length = self._following(messages, answers)
        if is_long(length, self.config) and await self._shorten(answers, length):
            return
        self._follow(extension, messages)

    def _following(self, messages: list[Message], new: list[Message]) -> tuple[Piece | None, int]:
        """Return what extends the current row to the end of `messages`, and the length that the row will have.

        It is None if the template rewrites earlier messages: what follows is then sampled in a new row.
        """
        row, sight = self.row, self.renderer.sight
        ids = row.token_ids if sight is None else sight.collapse(row)
        extension = self.renderer.extend(ids, messages, new, self.specs)
        if extension is None:
            return None, len(self._opened(messages).ids)
        piece = self._expanded(extension, new)
        return piece, len(row.token_ids) + len(piece.ids)

    def _follow(self, extension: Piece | None, messages: list[Message]) -> None:
        if extension is None:
            self._begin_row(self._opened(messages))
        else:
            self.row.append_context(extension.ids, extension.images)

    async def _shorten(self, answers: list[Message], length: int) -> bool:
        """Begin a row with less context, as `rollout.context` says. Return False if that would leave nothing out."""
        policy = self.config.context
        if len(self.context.turns) <= policy.options.keep_turns:
            return False
        if policy.policy == "truncate":
            shorter = self.context.last_turns(policy.options.keep_turns)
            piece = self._opened(shorter.messages)
            if len(piece.ids) >= length:
                return False
        elif self.config.max_turns - self.trajectory.turns < 2:
            return False  # the summary would be the chain's last turn
        else:
            shorter = self.context.last_turns(policy.options.keep_turns, await self._summarize(answers))
            piece = self._opened(shorter.messages)
        self.context = shorter
        self._begin_row(piece)
        return True

    async def _summarize(self, answers: list[Message]) -> str:
        """Ask the model for a summary in the current row; this is a turn. Raises ContextOverflowError."""
        prompt = self.config.context.options.prompt
        question: Message = {"role": "user", "content": prompt}
        self.trajectory.messages.append(question)
        # many templates require the roles to alternate
        asked = add_text(answers, prompt) if answers[-1]["role"] == "user" else [*answers, question]
        messages = [*self.context.messages[: -len(answers)], *asked]
        extension, _ = self._following(messages, asked)
        self._follow(extension, messages)
        turn = self._turn()
        completion = await turn.sample()
        self._append(completion)
        parsed = turn.parse(completion)
        self._note_roles(parsed, completion)
        message = parsed.message
        # calls in the summary are not answered
        self.trajectory.messages.append({key: value for key, value in message.items() if key != "tool_calls"})
        return message["content"]

    def metrics(self) -> dict[str, float]:
        """Return all metrics of the chain by name, including zeros, so that means over chains are right."""
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
            "row_tokens": sum(len(row.token_ids) for row in rows),
            "penalty": self.penalty,
            **{f"tool_errors/{kind}": counts[kind] for kind in CallError},
            **{f"stop/{reason}": float(self.trajectory.stop_reason is reason) for reason in StopReason},
            **self.limits.metrics(),
            **tools,
        }


def _explain(error: str, completion: Completion) -> str:
    """Return the message to the model about a malformed turn."""
    if completion.cut:
        return f"{error} The message was cut at {sum(completion.mask)} tokens: write a shorter one."
    return error
