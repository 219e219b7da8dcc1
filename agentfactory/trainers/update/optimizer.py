"""Optimiser, gradient clipping and learning-rate schedule of a recipe."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import PreTrainedModel

from agentfactory.trainers.config import OptimizerConfig, TrainConfig
from agentfactory.trainers.networks.critic import Role, role_of
from agentfactory.trainers.networks.network import need_gpu
from agentfactory.trainers.networks.vision_tower import tower_of

Groups = list[dict[str, Any]]
"""Parameter groups in torch's form; each has its own `lr` and `weight_decay`."""


def make_optimizer(model: nn.Module, config: TrainConfig) -> Optimizer:
    """Create the optimiser that `train.optimizer` names, on the trainable weights of `model`. Raises
    SettingError if the optimiser is not available."""
    settings = config.optimizer
    groups = _groups(model, config, _matrices(model) if settings.name == "muon" else None)
    if settings.name in ("adamw_8bit", "lion"):
        need_gpu("train.optimizer.name", settings.name, groups[0]["params"][0].device, "use adamw")
    match settings.name:
        case "muon":
            return MuonAndAdamW(groups, settings)
        case "adamw":
            return _adamw(groups, settings)
        case "adamw_8bit":
            from bitsandbytes.optim import AdamW8bit

            # AdamW with its two moments in 8 bits per weight: Dettmers et al., 2021, arXiv:2110.02861
            return AdamW8bit(groups, betas=settings.betas)
        case "lion":
            from bitsandbytes.optim import Lion

            # Chen et al., 2023, arXiv:2302.06675. A good learning rate is 3 to 10 times smaller than AdamW's
            return Lion(groups, betas=settings.betas)
        case "adafactor":
            # this imports peft, which takes seconds
            from transformers.optimization import Adafactor

            # Shazeer and Stern, 2018, arXiv:1804.04235, without momentum, and with the given learning rate
            return Adafactor(groups, scale_parameter=False, relative_step=False)
        case "sgd":
            return torch.optim.SGD(groups, momentum=settings.betas[0])


def _adamw(groups: Groups, config: OptimizerConfig) -> Optimizer:
    """Loshchilov and Hutter, 2019, arXiv:1711.05101."""
    return torch.optim.AdamW(groups, betas=config.betas, fused=True)


class MuonAndAdamW(Optimizer):
    """Muon (Jordan, 2024; Liu et al., 2025, arXiv:2502.16982) on the matrices within layers, AdamW on all other
    weights. Muon's updates have the size of AdamW's (equation 4), so that one learning rate serves both."""

    def __init__(self, groups: Groups, config: OptimizerConfig) -> None:
        """Muon updates the groups with `matrix` set to true."""
        self._parts: dict[bool, Optimizer] = {}
        if mine := [group for group in groups if group["matrix"]]:
            self._parts[True] = torch.optim.Muon(mine, momentum=config.betas[0], adjust_lr_fn="match_rms_adamw")
        if others := [group for group in groups if not group["matrix"]]:
            self._parts[False] = _adamw(others, config)
        super().__init__([group for part in self._parts.values() for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for matrix, part in self._parts.items():
            # pass loaded or scheduled settings to the parts, which have no own state
            part.param_groups = [group for group in self.param_groups if group["matrix"] is matrix]
            part.state = self.state
            part.step()


def _matrices(model: nn.Module) -> set[int]:
    """Return identities of the matrices within layers, unlike embeddings and heads."""
    tables: set[int] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            for table in (module.get_input_embeddings(), module.get_output_embeddings()):
                tables |= {id(weight) for weight in table.parameters()} if table is not None else set()
    return {id(weight) for weight in model.parameters() if weight.ndim == 2} - tables


def _groups(model: nn.Module, config: TrainConfig, matrices: set[int] | None = None) -> Groups:
    """Group trainable weights by learning rate and weight decay, and by whether they are among `matrices`, if given."""
    settings = config.optimizer
    made: dict[tuple[Any, ...], dict[str, Any]] = {}
    towers = [tower_of(module) for module in model.modules() if isinstance(module, PreTrainedModel)]
    tower_weights = {id(weight) for tower in towers if tower is not None for weight in tower.parameters()}
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        rate = config.learning_rate
        if role_of(name) == Role.CRITIC:
            rate = config.critic.critic_learning_rate
        elif id(weight) in tower_weights and not isinstance(config.vision, str):
            rate = config.vision
        decay = settings.weight_decay if weight.ndim > 1 else 0.0
        group: dict[str, Any] = {"lr": rate, "weight_decay": decay}
        if matrices is not None:
            group["matrix"] = id(weight) in matrices
        made.setdefault(tuple(group.values()), {"params": [], **group})["params"].append(weight)
    return [*made.values()]


def make_schedule(optimizer: Optimizer, config: TrainConfig) -> LRScheduler:
    """Create the learning-rate schedule by step: a linear warm-up to each group's own rate, then `train.schedule`. wsd
    is warm-up, stable, decay (Hu et al., 2024, arXiv:2404.06395), with a linear decay."""

    def share(done: int) -> float:
        """Return the factor of the learning rate after `done` steps, which is above 0 in every step."""
        if done < config.warmup_steps:
            return (done + 1) / config.warmup_steps
        begins = config.steps - config.decay_steps if config.schedule == "wsd" else config.warmup_steps
        progress = min(max(0, done - begins) / max(1, config.steps - begins), 1.0)
        if config.schedule == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        return 1.0 if config.schedule == "constant" else 1.0 - progress

    return LambdaLR(optimizer, share)


def clip_gradients(accelerator: Accelerator, parameters: Iterable[Tensor], max_norm: float, whose: str) -> float:
    """Scale the gradients down to `max_norm`, the 2-norm over all of them; return the norm before scaling. Every
    process calls it. Raises FloatingPointError if the norm is not finite."""
    norm = float(accelerator.clip_grad_norm_(parameters, max_norm))
    if not math.isfinite(norm):
        problem = f"the {whose}'s gradient norm is {norm}: no update was made"
        raise FloatingPointError(f"{problem}; lower its learning rate, or look for infinite values in the batch")
    return norm
