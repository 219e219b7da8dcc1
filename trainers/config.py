"""The part of a recipe that the trainers package owns: train and sync."""

from typing import Annotated, Literal

from pydantic import Field

from rollout.config import RolloutRecipe
from tools.config import Section

PositiveInt = Annotated[int, Field(gt=0)]


class TrainConfig(Section):
    """How the policy learns."""

    algorithm: Literal["grpo", "sft"] = "grpo"
    """grpo: group-relative policy optimisation; sft: supervised fine-tuning on conversations or saved rows."""
    steps: PositiveInt
    """Optimiser steps (SFT) or batches of fresh groups (GRPO)."""
    batch_size: PositiveInt = 8
    """Groups (GRPO) or rows (SFT) per step, over all processes."""
    updates_per_batch: PositiveInt = 1
    """GRPO: optimiser updates on each batch of groups."""
    learning_rate: float = Field(default=1e-6, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up; linear and cosine end at 0."""
    warmup_steps: int = Field(default=0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    clip_low: float = Field(default=0.2, gt=0)
    """Probability ratios are clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """Probability ratios are clipped above at 1 + clip_high."""
    scale_advantages: bool = True
    """GRPO: divide a group's advantages by their standard deviation."""
    token_budget: PositiveInt = 16384
    """Tokens (padding included) per micro-batch and process."""
    from_trajectories: str | None = None
    """Train on saved groups (a JSONL file or a folder of them), without worker or server."""
    checkpoint_every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 writes one at the end."""
    processes: PositiveInt = 1
    """Trainer processes; a launch with another number is refused."""
    strategy: Literal["single", "ddp", "fsdp2"] = "single"
    """How processes share the work; a launch that accelerate set up otherwise is refused."""


class SyncConfig(Section):
    """How new weights reach the inference server."""

    backend: Literal["auto", "file", "lora", "nccl"] = "auto"
    """lora: the adapter's files; file: full weights as safetensors, on a disk that the servers read; nccl: full weights
    by broadcast from GPU to GPUs, to vLLM only (untested on a GPU so far); auto: lora when model.lora is set, else
    file."""


class TrainRecipe(RolloutRecipe):
    """The recipe fields that the trainers package reads."""

    train: TrainConfig
    sync: SyncConfig = SyncConfig()
