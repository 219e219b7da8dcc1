"""AgentFactory: reinforcement learning for LLM agents that call tools over many turns.

Public names are loaded on first use (PEP 562): `from agentfactory import tool` does not load torch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentfactory.base.messages import ToolInfrastructureError as ToolInfrastructureError
    from agentfactory.launching.agent import Agent as Agent
    from agentfactory.rollout.chains.agent_hooks import Turn as Turn
    from agentfactory.rollout.config import TaskSource as TaskSource
    from agentfactory.rollout.groups.group_files import read_groups as read_groups
    from agentfactory.rollout.inference.inference_client import Completion as Completion
    from agentfactory.rollout.rewards import reward as reward
    from agentfactory.rollout.text.parsers import FormatError as FormatError
    from agentfactory.rollout.text.parsers import Parser as Parser
    from agentfactory.rollout.text.parsers import Reading as Reading
    from agentfactory.rollout.text.renderer import Parsed as Parsed
    from agentfactory.rollout.trajectory import Group as Group
    from agentfactory.rollout.trajectory import Outcome as Outcome
    from agentfactory.rollout.trajectory import Trajectory as Trajectory
    from agentfactory.tools.environments.environment import Environment as Environment
    from agentfactory.tools.images.coordinates import ModelView as ModelView
    from agentfactory.tools.tool import finish as finish
    from agentfactory.tools.tool import tool as tool

_NAMES = {
    "agentfactory.launching.agent": ("Agent",),
    "agentfactory.base.messages": ("ToolInfrastructureError",),
    "agentfactory.rollout.chains.agent_hooks": ("Turn",),
    "agentfactory.rollout.config": ("TaskSource",),
    "agentfactory.rollout.groups.group_files": ("read_groups",),
    "agentfactory.rollout.inference.inference_client": ("Completion",),
    "agentfactory.rollout.rewards": ("reward",),
    "agentfactory.rollout.text.parsers": ("FormatError", "Parser", "Reading"),
    "agentfactory.rollout.text.renderer": ("Parsed",),
    "agentfactory.rollout.trajectory": ("Group", "Outcome", "Trajectory"),
    "agentfactory.tools.environments.environment": ("Environment",),
    "agentfactory.tools.images.coordinates": ("ModelView",),
    "agentfactory.tools.tool": ("finish", "tool"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
