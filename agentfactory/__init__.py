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

_HOME = {
    "Agent": "agentfactory.agent",
    "Completion": "agentfactory.rollout.inference.inference_client",
    "Environment": "agentfactory.tools.environments.environment",
    "FormatError": "agentfactory.rollout.text.parsers",
    "Group": "agentfactory.rollout.trajectory",
    "ModelView": "agentfactory.tools.images.coordinates",
    "Outcome": "agentfactory.rollout.trajectory",
    "Parsed": "agentfactory.rollout.text.renderer",
    "Parser": "agentfactory.rollout.text.parsers",
    "Reading": "agentfactory.rollout.text.parsers",
    "TaskSource": "agentfactory.rollout.config",
    "ToolInfrastructureError": "agentfactory.base.messages",
    "Trajectory": "agentfactory.rollout.trajectory",
    "Turn": "agentfactory.rollout.chains.agent_hooks",
    "finish": "agentfactory.tools.tool",
    "read_groups": "agentfactory.rollout.groups.group_files",
    "reward": "agentfactory.rollout.rewards",
    "tool": "agentfactory.tools.tool",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
