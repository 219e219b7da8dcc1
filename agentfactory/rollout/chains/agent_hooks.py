"""Sampling and reading a chain's turns: `AgentHooks`, which a user's agent overrides, and the `Turn` passed to it."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from agentfactory.rollout.data import Task
from agentfactory.rollout.inference.http_transport import ContextOverflowError, InferenceError
from agentfactory.rollout.inference.inference_client import Completion
from agentfactory.rollout.text.renderer import Parsed, Renderer
from agentfactory.rollout.token_row import Span
from agentfactory.tools.messages import Message, ToolSpec


class AgentError(InferenceError):
    """A user's agent failed at a turn. The chain ends as inference_error with this message."""


class AgentFailed(Exception):
    """An agent with its own loop failed: it raised, or its program ended with an error. `result` is what it printed."""

    def __init__(self, problem: str, result: str | None = None) -> None:
        super().__init__(problem)
        self.result = result


@dataclass(frozen=True)
class TurnBudget:
    """Token limits: `turn` tokens may be sampled in one turn; `row` is the longest sequence, prompt included."""

    turn: int
    row: int


@dataclass
class Turn:
    """An assistant turn to be sampled.

    `messages` is the conversation that the model sees; `token_ids` are its ids. `number` counts the chain's turns from
    0. `chain` is the chain's id: one agent object serves all chains at once.
    """

    messages: list[Message]
    row: Sequence[int]
    """The chain's row, which grows when the turn has ended. Not a copy: Python's search for garbage would read those of
    all chains."""
    specs: list[ToolSpec]
    number: int
    task: Task
    chain: str
    renderer: Renderer
    first_call: int
    """Number of the chain's calls so far."""
    prefix: str
    """Text that the turn has to begin with: `rollout.assistant_prefix`."""
    budget: TurnBudget
    generate: Callable[[Sequence[int], int, int], Awaitable[Completion]]
    """(ids, max tokens, request number from 0) -> what the server samples."""
    made: list[Completion] = field(default_factory=list)
    """Completions that `sample` has returned so far."""
    requests: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self._length = len(self.row)

    @property
    def token_ids(self) -> list[int]:
        """The ids of the conversation, which end with the generation prompt."""
        return list(self.row[: self._length])

    async def sample(
        self, prefix: str = "", max_tokens: int | None = None, after: Completion | None = None
    ) -> Completion:
        """Sample the turn, or continue `after`, the turn's beginning, and return both together.

        Args:
            prefix: Text placed before the sampled tokens. It is context and is not trained.
            max_tokens: Most tokens to sample, within what rollout.max_tokens leaves to the turn.
            after: A completion that `sample` returned earlier and that was `cut`.

        If no token is left for the continuation, `after` is returned unchanged.

        Raises:
            ValueError: `after` is not of this turn, or the model ended it; `max_tokens` is less than 1.
        """
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens: got {max_tokens}; use at least 1")
        if after is not None and not any(after is made for made in self.made):
            raise ValueError("after: it has to be what turn.sample returned for this turn")
        if after is not None and not after.cut:
            raise ValueError(
                "after: the model ended its turn there, and nothing can follow; go on only where it is cut"
            )
        text = prefix if after is not None else self.prefix + prefix
        context = self.renderer.encode(text) if text else []
        so_far = sum(after.mask) if after else 0
        end = self.budget.turn if max_tokens is None else min(self.budget.turn, so_far + max_tokens)
        whole = await self._sample_up_to(end, after, context)
        while whole.stop is not None and sum(whole.mask) < end:
            # a stop string in the reasoning ends no turn
            longer = await self._sample_up_to(end, whole, [])
            if longer is whole:
                break
            whole = longer
        if whole.stop is not None:
            whole = replace(whole, cut=True, stop=None)
        if whole is not after:
            self.made.append(whole)
        return whole

    async def _sample_up_to(self, end: int, after: Completion | None, context: list[int]) -> Completion:
        """Sample until the turn has `end` sampled tokens, at most, after `after` and `context`; return all of it. Its
        `stop` is set if the server ended it at a stop string that ends no turn. If no token is left, `after` is
        returned unchanged. Raises ContextOverflowError if there is none."""
        more = [*(after.token_ids if after else []), *context]
        ids = [*self.row, *more] if more else self.row
        most = min(end - (sum(after.mask) if after else 0), self.budget.row - len(ids))
        if most < 1:
            if after is not None:
                return after
            raise ContextOverflowError(f"the turn begins with {len(ids)} tokens, of {self.budget.row}")
        try:
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
    """Join a turn's beginning, context, and the tokens sampled after it."""
    start = after or Completion([], [], [], False, [])
    before = len(start.token_ids) + len(context)
    return Completion(
        [*start.token_ids, *context, *sampled.token_ids],
        [*start.logprobs, *[0.0] * len(context), *sampled.logprobs],
        [
            *start.versions,
            *(Span(s.version, before + s.start, before + s.end, s.mixed) for s in sampled.versions),
        ],
        sampled.cut,
        [*start.mask, *[0] * len(context), *sampled.mask],
        sampled.stop,
    )


class AgentHooks:
    """Samples and reads the turns of chains. Override one or both methods; one object serves all chains
    concurrently."""

    async def generate(self, turn: Turn) -> Completion:
        """Sample the turn. Return the result of one of the calls of `turn.sample`: the turn consists of exactly its
        tokens."""
        return await turn.sample()

    def parse(self, turn: Turn, completion: Completion) -> Parsed:
        """Read a turn as a message, with tool calls or an error. A turn with neither calls nor an error is the last."""
        return turn.parse(completion)
