"""AgentFactory: reinforcement learning for LLM agents that call tools over many turns.

Public names are loaded on first use (PEP 562): `from agentfactory import tool` does not load torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentfactory.agent import Agent
    from agentfactory.rollout.agent import Turn
    from agentfactory.rollout.client import Completion
    from agentfactory.rollout.group_files import read_groups
    from agentfactory.rollout.parsers import FormatError, Parser, Reading
    from agentfactory.rollout.renderer import Parsed
    from agentfactory.rollout.rewards import reward
    from agentfactory.rollout.trajectory import Group, Outcome, Trajectory
    from agentfactory.tools.environment import Environment
    from agentfactory.tools.images.coordinates import ModelView
    from agentfactory.tools.messages import ToolInfrastructureError
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
    "ToolInfrastructureError",
    "Trajectory",
    "Turn",
    "finish",
    "read_groups",
    "reward",
    "tool",
]

_HOME = {
    "Agent": "agentfactory.agent",
    "Completion": "agentfactory.rollout.client",
    "Environment": "agentfactory.tools.environment",
    "FormatError": "agentfactory.rollout.parsers",
    "Group": "agentfactory.rollout.trajectory",
    "ModelView": "agentfactory.tools.images.coordinates",
    "Outcome": "agentfactory.rollout.trajectory",
    "Parsed": "agentfactory.rollout.renderer",
    "Parser": "agentfactory.rollout.parsers",
    "Reading": "agentfactory.rollout.parsers",
    "ToolInfrastructureError": "agentfactory.tools.messages",
    "Trajectory": "agentfactory.rollout.trajectory",
    "Turn": "agentfactory.rollout.agent",
    "finish": "agentfactory.tools.tool",
    "read_groups": "agentfactory.rollout.group_files",
    "reward": "agentfactory.rollout.rewards",
    "tool": "agentfactory.tools.tool",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
