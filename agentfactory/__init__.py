"""AgentFactory: reinforcement learning for LLM agents that call tools over many turns.

Public names are loaded on first use (PEP 562): `from agentfactory import tool` does not load torch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentfactory.agent import Agent
    from agentfactory.base.messages import ToolInfrastructureError
    from agentfactory.rollout.chains.agent_hooks import Turn
    from agentfactory.rollout.config import TaskSource
    from agentfactory.rollout.groups.group_files import read_groups
    from agentfactory.rollout.inference.inference_client import Completion
    from agentfactory.rollout.rewards import reward
    from agentfactory.rollout.text.parsers import FormatError, Parser, Reading
    from agentfactory.rollout.text.renderer import Parsed
    from agentfactory.rollout.trajectory import Group, Outcome, Trajectory
    from agentfactory.tools.environments.environment import Environment
    from agentfactory.tools.images.coordinates import ModelView
    from agentfactory.tools.tool import finish, tool

__all__ = [
    "Agent",
    "Completion",
    "Environment",
    "FormatError",
    "Group",
    "ModelView",
    "Outcome",
    "Parsed",
    "Parser",
    "Reading",
    "TaskSource",
    "ToolInfrastructureError",
    "Trajectory",
    "Turn",
    "finish",
    "read_groups",
    "reward",
    "tool",
]

_NAMES = {
    "agentfactory.agent": ("Agent",),
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


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
