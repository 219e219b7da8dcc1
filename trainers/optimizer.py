"""Optimiser and learning-rate schedule of a recipe."""

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from trainers.config import TrainConfig
from trainers.policy import Policy


def make_optimizer(policy: Policy, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101) on the trainable weights; norms and biases, which have one
    dimension, do not decay."""
    trainable = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)


def make_schedule(optimizer: torch.optim.Optimizer, config: TrainConfig) -> LRScheduler:
    """The learning rate by step (not by optimiser update): a linear warm-up, then constant, or down to 0 at the end."""
    name = "constant_with_warmup" if config.schedule == "constant" else config.schedule
    return get_scheduler(name, optimizer, num_warmup_steps=config.warmup_steps, num_training_steps=config.steps)
