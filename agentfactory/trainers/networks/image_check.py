"""A check at start that the trainer processes images like transformers."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from PIL import Image

from agentfactory.base.errors import SettingError
from agentfactory.rollout.images.families import load_vision
from agentfactory.rollout.images.image_tokens import OwnProcessor
from agentfactory.rollout.images.store import ImageStore, digest_of
from agentfactory.trainers.batches.image_batches import ImageLoader
from agentfactory.trainers.networks.policy import BAN, Policy

_SIZES = ((60, 60), (90, 45))
"""Sizes that give one tile, and several, with processors that make tiles of one size."""


@torch.no_grad()
def check_images(policy: Policy, path: str) -> None:
    """Compare a row with two images, as built by rollouts and trainer, with the model's own processor and forward pass:
    its ids, and the log-probability of each token.

    Only for an OwnProcessor; PatchVision has one rule, which tests cover. Raises SettingError with the difference.
    """
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
    logits[:, list(vision.banned_token_ids)] -= BAN
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
