"""The vision tower and projector of a multimodal network: finding them, excluding them from LoRA, and a check that the
trainer processes images like transformers."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from agentfactory.base.errors import SettingError
from agentfactory.rollout.images.families import BY_PATCHES, load_vision, supports_images
from agentfactory.rollout.images.families import banned_token_ids as banned_in
from agentfactory.rollout.images.image_tokens import BANNED_BIAS, OwnProcessor
from agentfactory.rollout.images.store import ImageStore, digest_of
from agentfactory.trainers.batches.image_batches import ImageLoader

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
    """Return the vision tower of a network as one module with its projector; None for a text-only network."""
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
    """Return the placeholder tokens of images and videos: see Vision.banned_token_ids."""
    if not sees(network.config):
        return []
    names = ("image_token_id", "video_token_id")
    return [*banned_in({name: getattr(network.config, name, None) for name in names})]


def adapted_modules(network: Any, asked: str | list[str], trained: bool) -> str | list[str]:
    """Return peft's `target_modules` for model.lora.target_modules of a network that peft has not changed yet:
    "all-linear" means the language model's layers, unless the tower is `trained`, too. Raises SettingError if the tower
    is frozen but would be adapted, or for a name of no module."""
    tower = tower_of(network)
    if tower is not None and not trained:
        language = language_name(network)
        if asked == "all-linear":
            return _within(language, _linear_names(getattr(network.base_model, language)))
        inside = set(tower.modules())
        named = [name for name, module in network.named_modules() if module in inside]
        if hit := [name for name in named if any(re.fullmatch(known, name) for known in _patterns(asked).values())]:
            pattern = _within(language, asked) if isinstance(asked, list) else rf".*\.{language}\..*"
            problem = f"got {asked}, which is also in the vision tower ({hit[0]}), and train.vision is frozen"
            raise SettingError("model.lora.target_modules", problem, f"use all-linear, or the pattern {pattern!r}")
    # peft ignores names in a list that fit no module
    names, patterns = [name for name, _ in network.named_modules()], _patterns(asked).items()
    unknown = [target for target, known in patterns if not any(re.fullmatch(known, name) for name in names)]
    if unknown and asked != "all-linear":
        problem = f"got {asked}, but {' and '.join(map(repr, unknown))} fits no module of the network"
        fix = f"use names such as {', '.join(_linear_names(network.base_model))}"
        raise SettingError("model.lora.target_modules", problem, fix)
    return asked


def _linear_names(network: nn.Module) -> list[str]:
    layers = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    return sorted({name.rpartition(".")[2] for name in layers})


def _within(language: str, names: list[str]) -> str:
    return rf".*\.{language}\..*\.({'|'.join(map(re.escape, names))})"


def _patterns(asked: str | list[str]) -> dict[str, str]:
    return {asked: asked} if isinstance(asked, str) else {target: rf"(.*\.)?{re.escape(target)}" for target in asked}


_SIZES = ((60, 60), (90, 45))
"""Sizes that give one tile, and several, with processors that make tiles of one size."""


@torch.no_grad()
def check_images(policy: Any, path: str) -> None:
    """Compare ids and log-probabilities of a row with two images, as built by rollouts and a Policy, with those of the
    model's own processor and forward pass. Only for models of `own_processor`: tests cover those of `patches`. Raises
    SettingError with the difference."""
    vision = load_vision(path)
    if not isinstance(vision, OwnProcessor):
        return
    network = policy.network
    device = network.device
    draw = np.random.default_rng(0)
    images = [Image.fromarray(draw.integers(0, 255, (*size[::-1], 3), dtype=np.uint8)) for size in _SIZES]
    mark = vision.processor.image_token
    text = f"What is {mark} beside {mark}?"
    theirs = vision.processor(text=[text], images=images, return_tensors="pt")
    expected_ids: list[int] = theirs["input_ids"][0].tolist()
    ids, spans = vision.expand(
        vision.processor.tokenizer(text)["input_ids"], [(digest_of(image), vision.grid(image)) for image in images]
    )
    kind = type(network).__name__
    if ids != expected_ids:
        place = next((n for n, (a, b) in enumerate(zip(ids, expected_ids, strict=False)) if a != b), "their end")
        problem = f"{kind} tokenizes a row with two images to {len(expected_ids)} tokens, and rows here would have"
        raise _different(f"{problem} {len(ids)}, with different ids from {place} on")
    with TemporaryDirectory() as folder:
        store = ImageStore(Path(folder))
        for image in images:
            store.put(image)
        seen = ImageLoader(path, vision, store.folder).load(spans, None, device)
    tokens = torch.tensor([ids], device=device)
    sources = torch.arange(len(ids) - 1, device=device)
    found, _ = policy(tokens, sources, tokens[0, 1:], images=seen)
    arguments = {name: value.to(device) for name, value in theirs.items() if name != "attention_mask"}
    lower = policy.dtype.itemsize < 4
    with torch.autocast(device.type, dtype=policy.dtype, enabled=lower, cache_enabled=False):
        logits = network(**arguments, use_cache=False).logits[0, :-1].float()
    logits[:, list(vision.banned_token_ids)] += BANNED_BIAS
    expected = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    # placeholder tokens of an image are never targets
    shown = torch.zeros(len(ids), dtype=torch.bool, device=device)
    for span in spans:
        shown[span.offset : span.offset + span.length] = True
    difference = float((found - expected)[~shown[1:]].abs().max())
    if not difference < (0.1 if lower else 1e-3):
        problem = f"log-probabilities of tokens after two images deviate from {kind}'s own processor and forward pass"
        raise _different(f"{problem} by {difference:.2g}")


def _different(problem: str) -> SettingError:
    return SettingError("model.path", f"{problem}; training would be wrong", "train another model")
