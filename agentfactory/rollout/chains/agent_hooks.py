"""Hooks to sample and parse a chain's turns: `AgentHooks`, which a user's agent overrides, and their `Turn`."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from agentfactory.base.messages import Message, ToolSpec
from agentfactory.rollout.chains.row_rendering import append_turn
from agentfactory.rollout.chains.sampling import TurnBudget
from agentfactory.rollout.data import Task
from agentfactory.rollout.inference.http_transport import ContextOverflowError, InferenceError
from agentfactory.rollout.inference.inference_client import Completion
from agentfactory.rollout.text.renderer import Parsed, Renderer
from agentfactory.rollout.token_row import Row


class AgentError(InferenceError):
    """A failure of a user's agent at a turn. The chain ends as inference_error with this message."""


class AgentFailed(Exception):
    """A failure of an agent with its own loop: an exception, or a program's error status. `result` is its output."""

    def __init__(self, problem: str, result: str | None = None) -> None:
        super().__init__(problem)
        self.result = result


@dataclass
class Turn:
    """An assistant turn to be sampled, number `number` of the chain from 0. `messages` is the conversation in the
    prompt, `token_ids` are its ids. One agent object serves all chains concurrently; `chain` is the id of this one."""

    messages: list[Message]
    row: Sequence[int]
    """The chain's row, which grows when the turn has ended; not a copy, which the garbage collector would traverse."""
    specs: list[ToolSpec]
    number: int
    task: Task
    chain: str
    renderer: Renderer
    first_call: int
    prefix: str
    """Text with which the turn must begin: `rollout.assistant_prefix`."""
    budget: TurnBudget
    generate: Callable[[Sequence[int], int, int], Awaitable[Completion]]
    """(ids, max tokens, request number from 0) -> the server's completion."""
    made: list[Completion] = field(default_factory=list)
    requests: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self._length = len(self.row)

    @property
    def token_ids(self) -> list[int]:
        """The ids of the prompt, which end with the generation prompt."""
        return list(self.row[: self._length])

    async def sample(
        self, prefix: str = "", max_tokens: int | None = None, after: Completion | None = None
    ) -> Completion:
        """Sample the turn, or continue `after`, a completion of this turn that was `cut`, and return both joined; if no
        token is left, return `after`. `prefix` is put before the sampled tokens, as context. All samples together stay
        within rollout.max_tokens. Raise ValueError unless `after` can go on and `max_tokens` is at least 1."""
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens: got {max_tokens}; use at least 1")
        if after is not None and not any(after is made for made in self.made):
            raise ValueError("after: it must be a completion that turn.sample returned for this turn")
        if after is not None and not after.cut:
            raise ValueError("after: the model ended its turn there; continue only a completion whose cut is True")
        text = prefix if after is not None else self.prefix + prefix
        context = self.renderer.encode(text) if text else []
        budget = self.budget
        if max_tokens is not None:
            so_far = sum(after.mask) if after else 0
            budget = replace(budget, turn=min(budget.turn, so_far + max_tokens))
        whole = await self._sample_within(budget, after, context)
        while whole.stop is not None and sum(whole.mask) < budget.turn:
            # a stop string within the reasoning does not end the turn
            longer = await self._sample_within(budget, whole, [])
            if longer is whole:
                break
            whole = longer
        if whole.stop is not None:
            whole = replace(whole, cut=True, stop=None)
        if whole is not after:
            self.made.append(whole)
        return whole

    async def _sample_within(self, budget: TurnBudget, after: Completion | None, context: list[int]) -> Completion:
        """Return `after`, `context` and the tokens sampled after them within `budget`, as one turn. Its `stop` is set
        if the server stopped at a stop string that does not end the turn."""
        more = [*(after.token_ids if after else []), *context]
        ids = [*self.row, *more] if more else self.row
        try:
            most = budget.left(len(ids), sum(after.mask) if after else 0)
            sampled = await self.generate(ids, most, next(self.requests))
        except ContextOverflowError:
            if after is None:
                raise
            return after
        whole = _join(after, context, sampled)
        count = self.renderer.stopped(whole.token_ids)
        return whole if count is None else whole.beginning(count)

    def parse(self, completion: Completion) -> Parsed:
        """Parse a turn with `rollout.parser`."""
        return self.renderer.parse(completion.token_ids, self.first_call, specs=self.specs)


def _join(after: Completion | None, context: list[int], sampled: Completion) -> Completion:
    turn = Row()
    if after is not None:
        append_turn(turn, after)
    turn.append_context(context)
    append_turn(turn, sampled)
    return Completion(turn.token_ids, turn.logprobs, turn.versions, sampled.cut, turn.mask, sampled.stop)


class AgentHooks:
    """Hooks that sample and parse the turns of all chains concurrently. Override one or both methods."""

    async def generate(self, turn: Turn) -> Completion:
        """Sample the turn. Return the result of one of the calls of `turn.sample`: its tokens become the turn."""
        return await turn.sample()

    def parse(self, turn: Turn, completion: Completion) -> Parsed:
        """Parse a turn into a message, with tool calls or an error. A turn with neither ends the chain."""
        return turn.parse(completion)
