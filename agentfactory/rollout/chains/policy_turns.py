"""Turns of the policy, which the agent's hooks sample after a chain's token rows, shortened by `rollout.context`."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from agentfactory.base.messages import Message
from agentfactory.rollout.chains.agent_hooks import AgentError, AgentHooks, Turn
from agentfactory.rollout.chains.context import Context, is_long
from agentfactory.rollout.chains.episode import Episode
from agentfactory.rollout.chains.opening_prompt import add_text
from agentfactory.rollout.chains.row_rendering import Piece, RowRenderer, append_turn, note_roles
from agentfactory.rollout.chains.sampling import Sampler
from agentfactory.rollout.chains.tool_loop import TakenTurn
from agentfactory.rollout.inference.http_transport import InferenceError, ServerUnreachableError
from agentfactory.rollout.inference.inference_client import Completion, EncodedIds
from agentfactory.rollout.text.renderer import Parsed, Renderer
from agentfactory.rollout.token_row import Row
from agentfactory.rollout.trajectory import Activity

logger = logging.getLogger(__name__)


class PolicyTurns:
    def __init__(self, episode: Episode, renderer: Renderer, sampler: Sampler, agent: AgentHooks) -> None:
        self.episode = episode
        self.renderer = renderer
        self.sampler = sampler
        self.agent = agent
        self.config = episode.setup.config
        self.context = Context([])
        self._rows = RowRenderer(renderer)
        self._specs = episode.setup.specs
        self._encoded = EncodedIds()
        """The encoding of the current row that earlier requests have cached."""

    @property
    def row(self) -> Row:
        """The chain's last row, which alone grows."""
        return self.episode.trajectory.rows[-1]

    def begin(self, opening: list[Message]) -> None:
        self.context = Context(opening)
        self._begin_row(self._rows.open(opening, self._specs))

    def _begin_row(self, piece: Piece) -> None:
        self.episode.trajectory.rows.append(Row())
        self._encoded = EncodedIds()
        self.row.append_context(*piece)

    def _follow(self, piece: Piece | None, messages: list[Message]) -> None:
        if piece is None:
            self._begin_row(self._rows.open(messages, self._specs))
        else:
            self.row.append_context(*piece)

    async def take(self, anchor: str | None) -> TakenTurn:
        turn = self._turn(self.config.assistant_prefix)
        with self._blaming_agent("generate"):
            completion = await self.agent.generate(turn)
            if not any(completion is made for made in turn.made):
                raise TypeError(f"it returned {completion!r:.200}, not a result of turn.sample")
        self._append(completion, anchor)
        # the sampled tokens stay in the trajectory even if the agent fails
        with self._blaming_agent("parse"):
            parsed = self.agent.parse(turn, completion)
            if not isinstance(parsed, Parsed):
                raise TypeError(f"it returned {parsed!r:.200}, not a Parsed")
        note_roles(self.row, completion, parsed)
        self.episode.trajectory.messages.append(parsed.message)
        self.context.say(parsed.message)
        return TakenTurn(parsed, completion.cut, sum(completion.mask))

    async def go_on(self, answers: list[Message]) -> None:
        fewer = self.context.with_images(self.config.context.keep_images)
        if len(fewer.turns) < len(self.context.turns):
            self.context = fewer
            self._begin_row(self._rows.open(fewer.messages, self._specs))
            return
        messages = self.context.messages
        extension = self._rows.extend(self.row, messages, answers, self._specs)
        if extension is None:
            length = len(self._rows.open(messages, self._specs).ids)
        else:
            length = len(self.row.token_ids) + len(extension.ids)
        if not is_long(length, self.config) or not await self._shorten(answers, length):
            self._follow(extension, messages)

    def _turn(self, prefix: str = "") -> Turn:
        episode, number = self.episode, self.episode.trajectory.turns

        async def generate(ids: Sequence[int], most: int, sample: int) -> Completion:
            images, encoded = self.row.images, self._encoded if ids is self.row.token_ids else None
            sampling, stops = episode.sampling, self.renderer.stops
            async with episode.turn(ids):
                with episode.timeline.measure(Activity.MODEL, number):
                    return await self.sampler.sample(ids, sampling, number, most, sample, images, encoded, stops)

        return Turn(
            messages=self.context.messages,
            row=self.row.token_ids,
            specs=episode.setup.specs,
            number=number,
            task=episode.task,
            chain=episode.trajectory.id,
            renderer=self.renderer,
            first_call=episode.counts["tool_calls"],
            prefix=prefix,
            budget=episode.budget,
            generate=generate,
        )

    def _append(self, completion: Completion, anchor: str | None = None) -> None:
        append_turn(self.row, completion)
        self.episode.note_turn(sum(completion.mask), anchor)

    @contextmanager
    def _blaming_agent(self, hook: str) -> Iterator[None]:
        """Log an error of a user's hook and raise AgentError; an error in our own hooks is a bug."""
        try:
            yield
        except (InferenceError, ServerUnreachableError):
            raise
        except Exception as error:
            agent = type(self.agent)
            if agent is AgentHooks:
                raise
            logger.error("the agent failed in chain %s", self.episode.trajectory.id, exc_info=error)
            raise AgentError(f"{agent.__name__}.{hook}: {type(error).__name__}: {error}") from error

    async def _shorten(self, answers: list[Message], length: int) -> bool:
        """Start a row with the context shortened by `rollout.context`; return False if nothing can be left out."""
        policy, keep = self.config.context.policy, self.config.context.keep_turns
        if len(self.context.turns) <= keep:
            return False
        summary = None
        if policy == "summarize":
            if self.episode.max_turns - self.episode.trajectory.turns < 2:
                return False  # the summary would be the chain's last turn
            summary = await self._summarize(answers)
        shorter = Context(self.context.opening, self.context.turns[len(self.context.turns) - keep :], summary)
        piece = self._rows.open(shorter.messages, self._specs)
        if policy == "truncate" and len(piece.ids) >= length:
            return False
        self.context = shorter
        self._begin_row(piece)
        return True

    async def _summarize(self, answers: list[Message]) -> str:
        """Sample a summary in the current row, as a turn. Raise ContextOverflowError if it does not fit."""
        prompt, said = self.config.context.prompt, self.episode.trajectory.messages
        question: Message = {"role": "user", "content": prompt}
        said.append(question)
        # many templates require the roles to alternate
        asked = add_text(answers, prompt) if answers[-1]["role"] == "user" else [*answers, question]
        messages = [*self.context.messages[: -len(answers)], *asked]
        self._follow(self._rows.extend(self.row, messages, asked, self._specs), messages)
        turn = self._turn()
        completion = await turn.sample()
        self._append(completion)
        parsed = turn.parse(completion)
        note_roles(self.row, completion, parsed)
        message = parsed.message
        # tool calls in the summary are not run
        said.append({key: value for key, value in message.items() if key != "tool_calls"})
        summary: str = message["content"]
        return summary
