"""The files of an adapter as peft writes them, and the settings that servers apply exactly. Does not need torch."""

from collections.abc import Mapping
from typing import Any

ADAPTER = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

# Fields that do not change the forward pass, or that the embedded engine reads. Any other field must be empty, so
# fields that peft adds later are rejected, not ignored.
_KNOWN_FIELDS = {
    *("peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision"),
    *("r", "lora_alpha", "use_rslora", "lora_dropout", "target_modules", "exclude_modules", "inference_mode"),
    *("init_lora_weights", "layers_to_transform", "layers_pattern", "loftq_config", "eva_config", "corda_config"),
    *("megatron_core", "qalora_group_size", "rank_pattern", "alpha_pattern"),
}


def unsupported(config: Mapping[str, Any]) -> str | None:
    """Return why an adapter with this configuration cannot be served unmerged; None for plain LoRA and rsLoRA."""
    if config.get("peft_type") != "LORA":
        return f"peft_type: {config.get('peft_type')}; only LORA is supported"
    if config.get("bias", "none") != "none":
        return f"bias: {config['bias']}; only none is supported"
    if config.get("init_lora_weights", True) not in (True, False, "gaussian", "orthogonal", "eva"):
        return f"init_lora_weights: {config['init_lora_weights']} also changes the base model's weights"
    for field, value in config.items():
        if value and field not in _KNOWN_FIELDS | {"bias"}:
            return f"{field}: {value!r} is not supported; only plain LoRA and rsLoRA are"
    for field in ("r", "lora_alpha"):
        if not isinstance(config.get(field), int | float):
            return f"{field}: {config.get(field)!r} is not a number"
    return None
