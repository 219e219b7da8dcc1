"""The vision tower of a network that sees: found, frozen, and kept apart from what adapters train."""

import re
from typing import Any

from torch import nn

from agentfactory.rollout.images.vision import QWEN
from agentfactory.tools.errors import SettingError


def sees(config: Any) -> bool:
    """Return whether networks of this configuration are trained with images."""
    return getattr(config, "vision_config", None) is not None and config.model_type in QWEN


def tower_of(network: Any) -> Any:
    """Return the vision tower of a transformers network, with or without its head; None if it reads only text."""
    return getattr(network.base_model, "visual", None) if sees(network.config) else None


def tower_is_trained(network: Any) -> bool:
    """Return whether any weight of the tower, or of an adapter in it, is trained."""
    tower = tower_of(network)
    return tower is not None and any(weight.requires_grad for weight in tower.parameters())


def is_of_tower(name: str) -> bool:
    """Return whether a weight of this name is one of a vision tower."""
    return name.startswith(("visual.", "model.visual."))


def banned_token_ids(network: Any) -> list[int]:
    """Return the tokens that stand for images and videos, which servers never sample: see Vision.banned_token_ids."""
    if not sees(network.config):
        return []
    ids = [getattr(network.config, name, None) for name in ("image_token_id", "video_token_id")]
    return [i for i in ids if i is not None]


def adapted_modules(network: Any, asked: str | list[str], vision: str) -> str | list[str]:
    """Return peft's `target_modules` for model.lora.target_modules of a network that peft has not changed yet.

    "all-linear" means the language model's layers, unless the tower is trained, too (`vision`: train.vision). Raises
    SettingError if it is frozen, and would be adapted.
    """
    tower = tower_of(network)
    if tower is None or vision == "trained":
        return asked
    if asked == "all-linear":
        linear = {
            name.rpartition(".")[2]
            for name, module in network.base_model.language_model.named_modules()
            if isinstance(module, nn.Linear)
        }
        return within_language_model(sorted(linear))
    inside = set(tower.modules())
    hit = [name for name, module in network.named_modules() if module in inside and _is_target(name, asked)]
    if hit:
        names = within_language_model(asked) if isinstance(asked, list) else r".*\.language_model\..*"
        problem = f"got {asked}, which is also in the vision tower ({hit[0]}), and train.vision is frozen"
        raise SettingError("model.lora.target_modules", problem, f"use all-linear, or the pattern {names!r}")
    return asked


def within_language_model(names: list[str]) -> str:
    """Return the pattern of the language model's modules of these names."""
    return rf".*\.language_model\..*\.({'|'.join(map(re.escape, names))})"


def _is_target(name: str, asked: str | list[str]) -> bool:
    """Return whether peft would adapt a module."""
    if isinstance(asked, str):
        return re.fullmatch(asked, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in asked)
