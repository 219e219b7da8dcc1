"""AgentFactory: reinforcement learning for LLM agents that call tools over many turns.

Public names are loaded when they are first asked for (PEP 562): `from agentfactory import tool` loads no torch.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentfactory.agent import Agent
    from rollout.agent import Turn
    from rollout.client import Completion
    from rollout.parsers import FormatError, Parser, Reading
    from rollout.renderer import Parsed
    from rollout.rewards import reward
    from rollout.trajectory import Group, Outcome, Trajectory
    from tools.environment import Environment
    from tools.tool import finish, tool

__all__ = [
    "Agent",
    "Completion",
    "Environment",
    "FormatError",
    "Group",
    "Outcome",
    "Parsed",
    "Parser",
    "Reading",
    "Trajectory",
    "Turn",
    "check_own_packages",
    "finish",
    "reward",
    "tool",
]

_HOME = {
    "Agent": "agentfactory.agent",
    "Completion": "rollout.client",
    "Environment": "tools.environment",
    "FormatError": "rollout.parsers",
    "Group": "rollout.trajectory",
    "Outcome": "rollout.trajectory",
    "Parsed": "rollout.renderer",
    "Parser": "rollout.parsers",
    "Reading": "rollout.parsers",
    "Trajectory": "rollout.trajectory",
    "Turn": "rollout.agent",
    "finish": "tools.tool",
    "reward": "rollout.rewards",
    "tool": "tools.tool",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_own_packages()
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def check_own_packages() -> None:
    """Raise ImportError, naming the file, where something else is found under the name of one of our packages."""
    root = Path(__file__).resolve().parent.parent
    for package in ("trainers", "rollout", "tools"):
        module = sys.modules.get(package)
        spec = module.__spec__ if module else importlib.util.find_spec(package)
        places = [spec.origin] if spec and spec.origin else list((spec and spec.submodule_search_locations) or [])
        found = Path(places[0]).resolve() if places else None
        if found != root / package / "__init__.py":
            raise ImportError(
                f"AgentFactory's package {package!r} is shadowed by {found}: rename that file, "
                "or start Python with -P so that the current folder is not on its path"
                if found
                else f"AgentFactory's package {package!r} is not installed; run pip install -e {root}"
            )
