"""Turns of the policy, which the agent's hooks sample after a chain's token rows, shortened by `rollout.context`."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from agentfactory.base.messages import Message
from agentfactory.rollout.chains.agent_hooks import AgentError, AgentHooks, Turn
from agentfactory.rollout.chains.context import Context, is_long
from agentfactory.rollout.chains.episode import Episode
from agentfactory.rollout.chains.opening_prompt import add_text
from agentfactory.rollout.chains.row_rendering import GrowingRows, append_turn, note_roles
from agentfactory.rollout.chains.sampling import Sampler
from agentfactory.rollout.chains.tool_loop import TakenTurn
from agentfactory.rollout.inference.http_transport import InferenceError, ServerUnreachableError
from agentfactory.rollout.inference.inference_client import Completion
from agentfactory.rollout.text.renderer import Parsed, Renderer
from agentfactory.rollout.trajectory import Activity

logger = logging.getLogger(__name__)


class PolicyTurns:
    """The policy's turns of one chain; see Turns."""

    def __init__(self, episode: Episode, renderer: Renderer, sampler: Sampler, agent: AgentHooks) -> None:
        self.episode = episode
        self.renderer = renderer
        self.sampler = sampler
        self.agent = agent
        self.config = episode.setup.config
        self.rows = GrowingRows(episode.trajectory.rows, renderer, episode.setup.specs)
        self.context = Context([])

    def begin(self, opening: list[Message]) -> None:
        self.context = Context(opening)
        self.rows.begin(self.rows.open(opening))

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
        note_roles(self.rows.current, completion, parsed)
        self.episode.trajectory.messages.append(parsed.message)
        self.context.say(parsed.message)
        return TakenTurn(parsed, completion.cut, sum(completion.mask))

    async def go_on(self, answers: list[Message]) -> None:
        fewer = self.context.with_images(self.config.context.keep_images)
        if len(fewer.turns) < len(self.context.turns):
            self.context = fewer
            self.rows.begin(self.rows.open(fewer.messages))
            return
        messages = self.context.messages
        extension, length = self.rows.extend(messages, answers)
        if is_long(length, self.config) and await self._shorten(answers, length):
            return
        self.rows.follow(extension, messages)

    def _turn(self, prefix: str = "") -> Turn:
        episode, number = self.episode, self.episode.trajectory.turns

        async def generate(ids: Sequence[int], most: int, sample: int) -> Completion:
            with episode.timeline.measure(Activity.MODEL, number):
                images, encoded = self.rows.current.images, self.rows.encoded(ids)
                sampling, stops = episode.sampling, self.renderer.stops
                return await self.sampler.sample(ids, sampling, number, most, sample, images, encoded, stops)

        return Turn(
            messages=self.context.messages,
            row=self.rows.current.token_ids,
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
        append_turn(self.rows.current, completion)
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
        """Start a row with the context shortened by `rollout.context`; the current row has `length` tokens. Return
        False if nothing can be left out."""
        policy, keep = self.config.context.policy, self.config.context.options.keep_turns
        if len(self.context.turns) <= keep:
            return False
        summary = None
        if policy == "summarize":
            if self.episode.max_turns - self.episode.trajectory.turns < 2:
                return False  # the summary would be the chain's last turn
            summary = await self._summarize(answers)
        shorter = self.context.last_turns(keep, summary)
        piece = self.rows.open(shorter.messages)
        if policy == "truncate" and len(piece.ids) >= length:
            return False
        self.context = shorter
        self.rows.begin(piece)
        return True

    async def _summarize(self, answers: list[Message]) -> str:
        """Sample a summary in the current row, as a turn. Raise ContextOverflowError if it does not fit."""
        prompt, said = self.config.context.options.prompt, self.episode.trajectory.messages
        question: Message = {"role": "user", "content": prompt}
        said.append(question)
        # many templates require the roles to alternate
        asked = add_text(answers, prompt) if answers[-1]["role"] == "user" else [*answers, question]
        messages = [*self.context.messages[: -len(answers)], *asked]
        extension, _ = self.rows.extend(messages, asked)
        self.rows.follow(extension, messages)
        turn = self._turn()
        completion = await turn.sample()
        self._append(completion)
        parsed = turn.parse(completion)
        note_roles(self.rows.current, completion, parsed)
        message = parsed.message
        # tool calls in the summary are not run
        said.append({key: value for key, value in message.items() if key != "tool_calls"})
        summary: str = message["content"]
        return summary
