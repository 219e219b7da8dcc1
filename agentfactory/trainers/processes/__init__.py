"""Trainer processes. Here: a check of variables, set by accelerate's launcher, that would train beside the recipe."""

import os

from agentfactory.base.errors import SettingError

_STRATEGY = "set train.strategy to single, ddp, fsdp2 or hsdp"
_WITHOUT_EFFECT = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("1", "set train.batch_size, and train.token_budget for its parts"),
    "ACCELERATE_DYNAMO_BACKEND": ("no", "set train.compile"),
    "ACCELERATE_USE_DEEPSPEED": ("false", _STRATEGY),
    "ACCELERATE_USE_MEGATRON_LM": ("false", _STRATEGY),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("false", _STRATEGY),
}
"""Variable -> its only supported value, and what to set in the recipe."""


def check_launch_variables() -> None:
    """Raise SettingError if a variable would change training beside the recipe."""
    for name, (neutral, instead) in _WITHOUT_EFFECT.items():
        if (value := os.environ.get(name, neutral)).lower() != neutral:
            problem = f"got {value!r} from the environment or accelerate's configuration, beside the recipe"
            raise SettingError(name, problem, f"unset it; in the recipe, {instead}")
