"""Loading of a recipe's agent: hooks for a chain's turns, or an agent with its own loop."""

import inspect
from pathlib import Path
from typing import Any

from agentfactory.base.errors import SettingError, short
from agentfactory.base.user_code.entry_points import load_named
from agentfactory.base.user_code.loading import load_object
from agentfactory.base.user_code.watch import announced
from agentfactory.rollout.chains.agent_hooks import AgentHooks
from agentfactory.rollout.config import AgentConfig, RolloutConfig, source_of

_OWN_LOOPS = {
    "function": "agentfactory.rollout.gateway.client_agents:FunctionAgent",
    "outside": "agentfactory.rollout.gateway.outside_agent:OutsideAgent",
    "program": "agentfactory.rollout.gateway.program_agent:ProgramAgent",
}


def load_agent(config: AgentConfig | None, base: Path) -> Any:
    """Load the agent of `rollout.agent`: AgentHooks, by default plain ones, or a ClientAgent: an async function with
    its own loop, a program, or external programs. Raise SettingError if it cannot be used."""
    if config is None:
        return AgentHooks()
    if config.outside is not None:
        return load_named(_OWN_LOOPS["outside"])(config.outside)
    if (reference := config.name) is None:
        return load_named(_OWN_LOOPS["program"])(config, base)
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
        return load_named(_OWN_LOOPS["function"])(reference, found)
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
    for field, value, nothing in (
        ("system_prompt", config.system_prompt, None),
        ("assistant_prefix", config.assistant_prefix, ""),
        ("context.policy", config.context.policy, "keep"),
        ("context.keep_images", config.context.keep_images, None),
    ):
        if value not in (None, nothing):
            shown = "null" if nothing is None else repr(nothing)
            raise SettingError(f"rollout.{field}", f"got {value!r}, {own}", f"set {shown}")
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
