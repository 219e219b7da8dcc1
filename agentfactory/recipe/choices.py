"""Recipe sections that choose a component by name, and their choices before validation."""

import re
from collections.abc import Iterator
from typing import Any

from agentfactory.base.config import Choice
from agentfactory.rollout.config import AgentConfig
from agentfactory.rollout.config.server import ServerConfig
from agentfactory.trainers.config import ALGORITHMS, AdvantageConfig, LossConfig, MismatchConfig

CHOICES: dict[str, type[Choice]] = {
    "rollout.agent": AgentConfig,
    "server": ServerConfig,
    "train.advantage": AdvantageConfig,
    "train.loss": LossConfig,
    "train.loss.mismatch": MismatchConfig,
}


_OF_A_SOURCE = re.compile(r"(eval\.)?data\.sources\.\d+\.")


def chosen(data: Any, path: str) -> str:
    """Return the choice of the section `path`: the recipe's own, else its algorithm's, else the default."""
    section = CHOICES[_OF_A_SOURCE.sub("rollout.", path)]
    given, algorithm = value_at(data, path), value_at(data, "train.algorithm")
    found = section.choice(given) if isinstance(given, dict) else None
    preset = ALGORITHMS.get(algorithm, {}) if isinstance(algorithm, str) else {}
    default = section.model_fields[section.chooser].default
    return str(found or preset.get(f"{path}.{section.chooser}", default))


def places(data: Any, keys: list[str]) -> Iterator[tuple[Any, Any]]:
    """Yield the mappings and lists, each with its key, that `keys` reach; * is every entry."""
    key, *rest = keys
    if isinstance(data, dict):
        entries: list[Any] = list(data) if key == "*" else [key] * (key in data)
    else:
        entries = list(range(len(data))) if key == "*" and isinstance(data, list) else []
    for entry in entries:
        if rest:
            yield from places(data[entry], rest)
        else:
            yield data, entry


def value_at(data: Any, path: str) -> Any:
    """Return the value at a dotted path of nested mappings and lists; None if there is none."""
    for key in path.split("."):
        if isinstance(data, list):
            data = data[int(key)] if key.isdigit() and int(key) < len(data) else None
        else:
            data = data.get(key) if isinstance(data, dict) else None
    return data
