"""The tool loop: sample a turn, run its tool calls, append their results, until the chain ends."""

from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from typing import Protocol

from agentfactory.base.messages import Message, text_of
from agentfactory.rollout.chains.context import Context
from agentfactory.rollout.chains.episode import Episode
from agentfactory.rollout.chains.opening_prompt import opening_messages
from agentfactory.rollout.chains.simulated_user import BeginUser, User
from agentfactory.rollout.inference.http_transport import ContextOverflowError
from agentfactory.rollout.text.renderer import Parsed
from agentfactory.rollout.trajectory import StopReason
from agentfactory.tools.sessions.tool_session import ToolSession


@dataclass(frozen=True)
class TakenTurn:
    """A parsed turn and its number of tokens. `cut`: it ended at a token limit."""

    parsed: Parsed
    cut: bool
    tokens: int


class Turns(Protocol):
    """The source of a chain's turns. `context` is the conversation in the model's prompt."""

    context: Context

    def begin(self, opening: list[Message]) -> None:
        """Start the conversation."""

    async def take(self, anchor: str | None) -> TakenTurn:
        """Take the next turn and add it to the context and the trajectory; `anchor` identifies the environment's state.
        Raise ContextOverflowError if no token is left for the turn."""

    async def go_on(self, answers: list[Message]) -> None:
        """Prepare the next turn after `answers`. Raise ContextOverflowError if they do not fit."""


class ToolLoop:
    """A player that runs the chain's tool calls itself. `begin_user` returns the chain's simulated user, who answers
    turns without calls; None: they end the chain."""

    def __init__(self, episode: Episode, turns: Turns, begin_user: BeginUser | None = None) -> None:
        self.episode = episode
        self.turns = turns
        self._begin_user = begin_user
        self.user: User | None = None

    async def play(self, session: ToolSession) -> StopReason:
        """Take turns until the chain ends, and return the reason."""
        episode, setup = self.episode, self.episode.setup
        messages = episode.trajectory.messages
        opening = map(episode.limits.settle_message, opening_messages(episode.task, setup.config.system_prompt))
        messages += setup.dialogue.instruct(list(opening), setup.specs)
        for server, left_out in session.left_out.items():
            setup.tool_errors.note_cut(f"{server} (reset)", left_out)
        if session.opening:
            first = episode.limits.settle_message({"role": "user", "content": session.opening})
            messages += await setup.images.take_messages([first])
        self.user = None if self._begin_user is None else self._begin_user(session)
        async with nullcontext() if self.user is None else aclosing(self.user):
            messages += [] if self.user is None else (await self.user.speak(None))[0]
            self.turns.begin(list(messages))
            return await self.act(session)

    async def act(self, session: ToolSession) -> StopReason:
        """Take turns, starting from the last messages, until the chain ends, and return the reason."""
        episode, setup = self.episode, self.episode.setup
        trajectory = episode.trajectory
        while True:
            try:
                turn = await self.turns.take(session.anchor)
            except ContextOverflowError:
                return StopReason.CONTEXT_OVERFLOW
            parsed, ending = turn.parsed, None
            episode.counts["truncated_turns"] += turn.cut
            if parsed.error is None and not parsed.calls:
                if turn.cut or self.user is None:
                    return StopReason.MAX_TOKENS if turn.cut else StopReason.ANSWER
                answers, over = await self.user.speak(text_of(parsed.message.get("content") or ""))
                ending = StopReason.USER_DONE if over else None
            elif parsed.error is not None:
                error = parsed.error
                if turn.cut:
                    error += f" The message was cut at {turn.tokens} tokens: write a shorter one."
                episode.note_malformed(trajectory.turns - 1, error)
                answers = setup.dialogue.complaint(error)
            else:
                calls = episode.timeline.calls(session.call, trajectory.turns - 1)
                results = await episode.limits.run(parsed.calls, calls)
                results = await session.number_images(parsed.calls, results)
                ending = episode.note_results(parsed.calls, results)
                answers = await setup.images.take_messages(setup.dialogue.answers(parsed.calls, results))
            trajectory.messages += answers
            self.turns.context.hear(answers)
            if ending is not None:
                return ending
            if trajectory.turns == episode.max_turns:
                return StopReason.MAX_TURNS
            try:
                await self.turns.go_on(answers)
            except ContextOverflowError:
                return StopReason.CONTEXT_OVERFLOW
