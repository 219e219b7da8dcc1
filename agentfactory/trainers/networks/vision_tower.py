"""Find the vision tower and projector of a multimodal network, freeze them, and exclude them from LoRA."""

import re
from typing import Any

from torch import nn

from agentfactory.base.errors import SettingError
from agentfactory.rollout.images.families import BY_PATCHES, supports_images
from agentfactory.rollout.images.families import banned_token_ids as banned_in

_LANGUAGE = ("language_model", "text_model")
"""Names of the language model in transformers' multimodal networks; everything else in them is for images."""


def sees(config: Any) -> bool:
    """Return whether networks of this configuration are trained with images."""
    return getattr(config, "vision_config", None) is not None and supports_images(config.model_type)


def is_rotary(config: Any) -> bool:
    """Return whether networks of this configuration take positions in time, height and width."""
    return sees(config) and config.model_type in BY_PATCHES


def language_name(network: Any) -> str:
    """Return the name of the language model in a multimodal network, with or without its head."""
    return next(name for name in _LANGUAGE if hasattr(network.base_model, name))


def tower_of(network: Any) -> Any:
    """Return the vision tower of a transformers network, with or without its head, as one module with the projector if
    that is separate. None for a text-only network."""
    if not sees(network.config):
        return None
    language = language_name(network)
    towers = [module for name, module in network.base_model.named_children() if name != language]
    return towers[0] if len(towers) == 1 else nn.ModuleList(towers)


def tower_is_trained(network: Any) -> bool:
    """Return whether any weight of the tower, or of an adapter in it, is trained."""
    tower = tower_of(network)
    return tower is not None and any(weight.requires_grad for weight in tower.parameters())


def is_of_tower(name: str) -> bool:
    """Return whether a weight of this name belongs to a vision tower or projector."""
    return re.match(r"(model\.)?(visual|vision_tower|vision_model|multi_modal_projector|connector)\.", name) is not None


def banned_token_ids(network: Any) -> list[int]:
    """Return the placeholder tokens of images and videos, which servers never sample: see Vision.banned_token_ids."""
    if not sees(network.config):
        return []
    names = ("image_token_id", "video_token_id")
    return [*banned_in({name: getattr(network.config, name, None) for name in names})]


def adapted_modules(network: Any, asked: str | list[str], trained: bool) -> str | list[str]:
    """Return peft's `target_modules` for model.lora.target_modules of a network that peft has not changed yet.

    "all-linear" means the language model's layers, unless the tower is `trained`, too. Raises SettingError if it is
    frozen but would be adapted, or for a name of no module.
    """
    tower = tower_of(network)
    if tower is None or trained:
        _check_targets(network, asked)
        return asked
    language = language_name(network)
    if asked == "all-linear":
        linear = {
            name.rpartition(".")[2]
            for name, module in getattr(network.base_model, language).named_modules()
            if isinstance(module, nn.Linear)
        }
        return within(language, sorted(linear))
    inside = set(tower.modules())
    hit = [name for name, module in network.named_modules() if module in inside and _is_target(name, asked)]
    if hit:
        names = within(language, asked) if isinstance(asked, list) else rf".*\.{language}\..*"
        problem = f"got {asked}, which is also in the vision tower ({hit[0]}), and train.vision is frozen"
        raise SettingError("model.lora.target_modules", problem, f"use all-linear, or the pattern {names!r}")
    _check_targets(network, asked)
    return asked


def _check_targets(network: Any, asked: str | list[str]) -> None:
    """Raise SettingError for a name or a pattern that fits no module; peft ignores such names in a list."""
    if asked == "all-linear":
        return
    names = [name for name, _ in network.named_modules()]
    unknown = [
        target
        for target in ([asked] if isinstance(asked, str) else asked)
        if not any(_is_target(name, target if isinstance(asked, str) else [target]) for name in names)
    ]
    if unknown:
        linear = {
            name.rpartition(".")[2]
            for name, module in network.base_model.named_modules()
            if isinstance(module, nn.Linear)
        }
        problem = f"got {asked}, but {' and '.join(map(repr, unknown))} fits no module of the network"
        raise SettingError("model.lora.target_modules", problem, f"use names such as {', '.join(sorted(linear))}")


def within(language: str, names: list[str]) -> str:
    """Return a pattern for the language model's modules with these names."""
    return rf".*\.{language}\..*\.({'|'.join(map(re.escape, names))})"


def _is_target(name: str, asked: str | list[str]) -> bool:
    """Return whether peft would adapt a module."""
    if isinstance(asked, str):
        return re.fullmatch(asked, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in asked)
