"""Memory that images take: their pixels, the vision tower's activations, and its features. The tower is not run on fake
tensors, because its shapes depend on the images' values. The factors were measured on towers of Qwen2.5-VL and
Qwen3-VL, within a fifth (tests/placement/test_image_memory.py)."""

from typing import Any

import torch
from torch import nn

from agentfactory.placement.machine import IMAGE_PIXELS, IMAGE_SHARE, OWN_PIXELS
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.inference.embedded.image_encoder import FEATURE_BYTES
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.networks.policy import Policy
from agentfactory.trainers.networks.vision_tower import is_rotary, tower_is_trained, tower_of


def image_memory(recipe: TrainRecipe, policy: Policy) -> int:
    """Return the bytes of a micro-batch's images, IMAGE_SHARE of its tokens; 0 for a text-only model."""
    tower = tower_of(policy.network)
    if tower is None:
        return 0
    patches = round(IMAGE_SHARE * recipe.train.token_budget * _patches_per_token(policy.network.config))
    trained = tower_is_trained(policy.network)
    return patches * patch_memory(tower, policy.dtype, trained, bool(recipe.train.gradient_checkpointing))


def server_image_memory(recipe: RolloutRecipe, network: Any, dtype: torch.dtype, step_tokens: int) -> int:
    """Return the bytes that a server takes for images on each of its devices; 0 for a text-only network. vLLM encodes a
    step's images together, up to `step_tokens` tokens or one larger image, and caches as many features; the embedded
    engine encodes images one after the other, and caches FEATURE_BYTES."""
    tower = tower_of(network)
    if tower is None:
        return 0
    merged = _patches_per_token(network.config)
    pixels = recipe.model.max_image_pixels or IMAGE_PIXELS if is_rotary(network.config) else OWN_PIXELS
    patch = _first(tower).shape[-2:].numel()
    largest = round(pixels / (patch * merged))
    embedded = recipe.server.engine == "embedded"
    tokens = largest if embedded else max(step_tokens, largest)
    computed = round(tokens * merged) * patch_memory(tower, dtype, trained=False, checkpointing=False)
    # Qwen3-VL adds features of some blocks to its first layers
    levels = 1 + len(getattr(network.config.vision_config, "deepstack_visual_indexes", None) or ())
    features = tokens * levels * network.config.get_text_config().hidden_size * dtype.itemsize
    return computed + (max(FEATURE_BYTES, features) if embedded else features)


def _patches_per_token(config: Any) -> float:
    """Return the number of patches that a network merges into one token, from the config field of its family."""
    if (ratio := getattr(config, "downsample_ratio", None)) is not None:
        return 1 / ratio**2
    side = getattr(config, "scale_factor", None) or getattr(config, "spatial_merge_size", None)
    return float((side or config.vision_config.spatial_merge_size) ** 2)


def _first(tower: Any) -> Any:
    """Return the weights of a tower's first layer, [width, channels, ...], whose inputs are a patch's pixels."""
    return next(part.weight for part in tower.modules() if isinstance(part, nn.Conv2d | nn.Conv3d))


def patch_memory(tower: Any, dtype: torch.dtype, trained: bool, checkpointing: bool) -> int:
    first = _first(tower)
    width, values = first.shape[0], first[0].numel()
    lists = [part for part in tower.modules() if isinstance(part, nn.ModuleList) and part is not tower]
    blocks = max(lists, key=len)
    inside = next(part for name, part in blocks[0].named_children() if name in ("mlp", "feed_forward"))
    linear = [module for module in inside.modules() if isinstance(module, nn.Linear)]
    inner = max(module.out_features for module in linear)
    gated = sum(module.out_features == inner for module in linear) > 1
    # under autocast some results are in float32, as are the weights that are trained
    size = 4.0 if dtype.itemsize >= 4 else 2.5
    # the activations of one block, or the position embedding in float32
    passing = max(44.0 * width, size * (5 * width + (3 if gated else 2) * inner))
    stored = 0.0
    if trained:
        whole = size * (12 * width + (4 if gated else 2) * inner)
        kept = size * width if checkpointing else whole
        stored = kept * len(blocks) + size * 8 * width
        # recomputed for the backward pass, one at a time
        passing = whole if checkpointing else 0.0
    # pixels are created in float32
    copies = 4.0 if dtype.itemsize >= 4 else 4.0 + dtype.itemsize
    return round(copies * values + passing + stored)
