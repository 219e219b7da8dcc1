"""Requests decoded by the embedded engine, and their log-probabilities by a model's own forward pass."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch

from agentfactory.rollout.inference.embedded.engine import Engine
from agentfactory.rollout.inference.embedded.sampling import Request


def finish(engine: Engine, *requests: Request) -> None:
    for request in requests:
        engine.add(request)
    while engine.busy:
        engine.step()


def decode(
    engine: Engine, prompts: list[np.ndarray], max_tokens: int = 6, adapters: tuple[Any, ...] = (None,), **options: Any
) -> list[Request]:
    """Requests that alternate between the adapters, each with its own seed."""
    requests = [Request(prompt, max_tokens, lambda request: None, **options) for prompt in prompts]
    for index, request in enumerate(requests):
        request.generator, request.adapter = random.Random(index), adapters[index % len(adapters)]
    finish(engine, *requests)
    return requests


@torch.no_grad()
def check(model: Any, request: Request, atol: float = 3e-4) -> None:
    ids = torch.tensor([[*request.token_ids, *request.tokens]], device=next(model.parameters()).device)
    logits = model(input_ids=ids).logits[0, len(request.prompt) - 1 : -1].double()
    expected = torch.log_softmax(logits, -1).gather(1, ids[0, len(request.prompt) :, None])[:, 0].cpu()
    torch.testing.assert_close(torch.tensor(request.logprobs, dtype=torch.float64), expected, atol=atol, rtol=0)


def random_prompts(*lengths: int, vocabulary: int = 97) -> list[np.ndarray]:
    return [np.random.default_rng(length).integers(0, vocabulary, length) for length in lengths]


def make_adapter(network: Any, folder: Path, seed: int, std: float = 0.2, **config: Any) -> Path:
    """Save an adapter that changes the network's samples."""
    torch.manual_seed(seed)
    wrapped = peft.get_peft_model(network, peft.LoraConfig(**{"r": 4, "target_modules": "all-linear", **config}))
    for name, weight in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=std)
    wrapped.save_pretrained(folder)
    return folder
