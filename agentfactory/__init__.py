"""AgentFactory: reinforcement learning for LLM agents that call tools over many turns.

Public names are loaded on first use (PEP 562): `from agentfactory import tool` does not load torch.
"""

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
    "agent": ("Agent",),
    "base.messages": ("ToolInfrastructureError",),
    "rollout.chains.agent_hooks": ("Turn",),
    "rollout.config": ("TaskSource",),
    "rollout.groups.group_files": ("read_groups",),
    "rollout.inference.inference_client": ("Completion",),
    "rollout.rewards": ("reward",),
    "rollout.text.parsers": ("FormatError", "Parser", "Reading"),
    "rollout.text.renderer": ("Parsed",),
    "rollout.trajectory": ("Group", "Outcome", "Trajectory"),
    "tools.environments.environment": ("Environment",),
    "tools.images.coordinates": ("ModelView",),
    "tools.tool": ("finish", "tool"),
}
_HOME = {name: f"agentfactory.{module}" for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
