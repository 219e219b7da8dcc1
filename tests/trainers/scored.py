"""Log-probabilities of a few tokens, by a policy and by a plain network."""

from typing import Any

import torch
from torch import Tensor, nn

from agentfactory.trainers.networks.policy import Policy

IDS = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
# two turns in the first row, one in the second; the tokens between them were not sampled
TARGETS = torch.tensor([3, 4, 9, 10, 12 + 5, 12 + 6, 12 + 7])
INPUTS = (IDS, TARGETS - 1, IDS.flatten()[TARGETS])


def score(policy: Policy) -> Tensor:
    return policy(*INPUTS)[0]


def scores_of(network: Any, temperature: float = 1.0) -> Tensor:
    """Return the same by a plain network."""
    logits = network(IDS).logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).div(temperature).log_softmax(-1).flatten(0, 1)
    return logits[INPUTS[1]].gather(-1, INPUTS[2][:, None]).squeeze(-1)


@torch.no_grad()
def fill_adapters(model: nn.Module, std: float, generator: torch.Generator) -> None:
    """Make adapters act, and a critic's head."""
    for name, weight in model.named_parameters():
        if "lora_B" in name or name == "critic.head":
            weight.normal_(std=std, generator=generator)


@torch.no_grad()
def disturb(model: nn.Module, seed: int, size: float = 0.1) -> None:
    """Change all trained weights, as training does."""
    torch.manual_seed(seed)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.add_(size * torch.randn_like(weight))
