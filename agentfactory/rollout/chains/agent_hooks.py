"""Hooks to sample and parse a chain's turns: `AgentHooks`, which a user's agent overrides; and loading of agents."""

import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from agentfactory.base.errors import SettingError, short
from agentfactory.base.messages import Message, ToolSpec
from agentfactory.base.user_code.entry_points import load_named
from agentfactory.base.user_code.loading import load_object
from agentfactory.base.user_code.watch import announced
from agentfactory.rollout.chains.row_rendering import append_turn
from agentfactory.rollout.chains.sampling import TurnBudget
from agentfactory.rollout.config import AgentConfig, RolloutConfig, source_of
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
        turn = Row()
        if after is not None:
            append_turn(turn, after)
        turn.append_context(context)
        append_turn(turn, sampled)
        whole = Completion(turn.token_ids, turn.logprobs, turn.versions, sampled.cut, turn.mask, sampled.stop)
        count = self.renderer.stopped(whole.token_ids)
        return whole if count is None else whole.beginning(count)

    def parse(self, completion: Completion) -> Parsed:
        """Parse a turn with `rollout.parser`."""
        return self.renderer.parse(completion.token_ids, self.first_call, specs=self.specs)


class AgentHooks:
    """Hooks that sample and parse the turns of all chains concurrently. Override one or both methods."""

    async def generate(self, turn: Turn) -> Completion:
        """Sample the turn. Return the result of one of the calls of `turn.sample`: its tokens become the turn."""
        return await turn.sample()

    def parse(self, turn: Turn, completion: Completion) -> Parsed:
        """Parse a turn into a message, with tool calls or an error. A turn with neither ends the chain."""
        return turn.parse(completion)


def load_agent(config: AgentConfig | None, base: Path) -> Any:
    """Load the agent of `rollout.agent`: AgentHooks, by default plain ones, or a ClientAgent: an async function with
    its own loop, a program, or external programs. Raise SettingError if it cannot be used."""
    if config is None:
        return AgentHooks()
    if config.outside is not None:
        return load_named("agentfactory.rollout.gateway.outside_agent:OutsideAgent")(config.outside)
    if (reference := config.name) is None:
        return load_named("agentfactory.rollout.gateway.program_agent:ProgramAgent")(config, base)
    if config.reports:
        source = source_of(reference)
        if source is None or source.agent is None:
            problem = f"got {reference!r}, a source whose tasks bring no agent"
            raise SettingError("rollout.agent", problem, "set it to null")
        return load_named(source.agent)()
    found = load_object(reference, base)
    if inspect.isasyncgenfunction(found):
        raise SettingError("rollout.agent", f"{reference} yields", "return the agent's answer, or None")
    if inspect.isfunction(found):
        if not inspect.iscoroutinefunction(found):
            problem = f"{reference} is not an async function"
            raise SettingError("rollout.agent", problem, f"write `async def {_name(found)}(client, task):`")
        return load_named("agentfactory.rollout.gateway.client_agents:FunctionAgent")(reference, found)
    if not (isinstance(found, type) and issubclass(found, AgentHooks)):
        problem, fix = f"{reference} is not an agent", f"write `class {_name(found)}(Agent):`"
        if not isinstance(found, type):
            problem, fix = f"{problem} but {short(found)}", "name an async function or a subclass of Agent"
        raise SettingError("rollout.agent", problem, fix)
    for name, parameters, is_async, form in _HOOKS:
        hook = getattr(found, name)
        if inspect.iscoroutinefunction(hook) != is_async or len(inspect.signature(hook).parameters) != parameters:
            raise SettingError("rollout.agent", f"{reference}: {name} has a wrong signature", f"write `{form}:`")
    try:
        with announced(f"creating {reference}"):
            return found()
    except TypeError as error:
        problem = f"{reference} cannot be created without arguments: {error}"
        raise SettingError("rollout.agent", problem, "give its parameters defaults") from error


def has_own_loop(agent: object) -> bool:
    """Return whether an agent that `load_agent` loaded requests its turns itself."""
    return not isinstance(agent, AgentHooks)


def check_own_loop(config: RolloutConfig, native: bool) -> None:
    """Raise SettingError for settings without effect on an agent with its own loop. `native`: see check_native."""
    own = "but an agent with its own loop writes its messages itself"
    for name, value, nothing in (
        ("system_prompt", config.system_prompt, None),
        ("user", config.user and config.user.name, None),
        ("assistant_prefix", config.assistant_prefix, ""),
        ("context.policy", config.context.policy, "keep"),
        ("context.keep_images", config.context.keep_images, None),
    ):
        if value not in (None, nothing):
            shown = "null" if nothing is None else repr(nothing)
            raise SettingError(f"rollout.{name}", f"got {value!r}, {own}", f"set {shown}")
    check_native(config, native)


def check_native(config: RolloutConfig, native: bool) -> None:
    """Raise SettingError if the tool-call format is not one of chat templates."""
    if not native:
        problem = f"got {config.parser!r}, a text format, but the agent's client expects structured tool calls"
        raise SettingError("rollout.parser", problem, "name the format of the model's chat template, such as hermes")


_HOOKS = (
    ("generate", 2, True, "async def generate(self, turn)"),
    ("parse", 3, False, "def parse(self, turn, completion)"),
)
"""Hook, number of parameters, whether it is async, and its signature."""


def _name(found: object) -> str:
    return getattr(found, "__name__", type(found).__name__)
