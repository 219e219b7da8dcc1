"""Loading of a recipe's agent: hooks for a chain's turns, or an agent with its own loop."""

import inspect
from pathlib import Path

from agentfactory.base.errors import SettingError, short
from agentfactory.base.user_code.entry_points import load_named
from agentfactory.base.user_code.loading import load_object
from agentfactory.base.user_code.watch import announced
from agentfactory.rollout.chains.agent_hooks import AgentHooks
from agentfactory.rollout.config import AgentConfig, source_of
from agentfactory.rollout.gateway.client_agents import ClientAgent, FunctionAgent
from agentfactory.rollout.gateway.outside_agent import OutsideAgent
from agentfactory.rollout.gateway.program_agent import ProgramAgent


def load_agent(config: AgentConfig | None, base: Path) -> AgentHooks | ClientAgent:
    """Load the agent of `rollout.agent`: hooks (a class `FILE.py:NAME`; by default plain ones), an async function with
    its own loop, a program, or external programs. Raise SettingError if it is not an agent, a hook has the wrong
    signature, or it cannot be created."""
    if config is None:
        return AgentHooks()
    if config.outside is not None:
        return OutsideAgent(config.outside)
    if (reference := config.name) is None:
        return ProgramAgent(config, base)
    if config.reports:
        return _agent_of_source(reference)
    found = load_object(reference, base)
    if inspect.isasyncgenfunction(found):
        raise SettingError("rollout.agent", f"{reference} yields", "return the agent's answer, or None")
    if inspect.isfunction(found):
        if not inspect.iscoroutinefunction(found):
            problem = f"{reference} is not an async function"
            raise SettingError("rollout.agent", problem, f"write `async def {_name(found)}(client, task):`")
        return FunctionAgent(reference, found)
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


def _agent_of_source(name: str) -> ClientAgent:
    source = source_of(name)
    if source is None or source.agent is None:
        raise SettingError("rollout.agent", f"got {name!r}, a source whose tasks bring no agent", "set it to null")
    found: ClientAgent = load_named(source.agent)()
    return found


_HOOKS = (
    ("generate", 2, True, "async def generate(self, turn)"),
    ("parse", 3, False, "def parse(self, turn, completion)"),
)
"""Hook, number of parameters, whether it is async, and its signature."""


def _name(found: object) -> str:
    return getattr(found, "__name__", type(found).__name__)
