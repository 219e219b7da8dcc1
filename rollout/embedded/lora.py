"""Several LoRA adapters on one model, unmerged: each acts on its own tokens of the flattened batch."""

import itertools
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

# Fields of adapter_config.json that do not change the forward pass, or that are read below. Any other field must be
# empty: what peft adds later is refused, not ignored.
_KNOWN_FIELDS = {
    *("peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision"),
    *("r", "lora_alpha", "use_rslora", "lora_dropout", "target_modules", "exclude_modules", "inference_mode"),
    *("init_lora_weights", "layers_to_transform", "layers_pattern", "loftq_config", "eva_config", "corda_config"),
    *("megatron_core", "qalora_group_size"),
}
_PREFIX = "base_model.model."
_serial = itertools.count(1)


class AdapterError(ValueError):
    """An adapter folder that cannot be served; the text says why."""


class Adapter:
    """A loaded adapter: per linear module A [in, rank] and B [rank, out], B already scaled by alpha / rank.

    `serial` tells apart two adapters that had the same name one after the other.
    """

    def __init__(self, name: str, path: str, factors: dict[str, tuple[Tensor, Tensor]]) -> None:
        self.name, self.path, self.factors = name, path, factors
        self.serial = next(_serial)


class AdapterLayers:
    """Adds the adapters' products to the outputs of the model's linear modules.

    `segments` holds (adapter, first token, end) of the step that is about to run; other tokens see the bare model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.segments: list[tuple[Adapter, int, int]] = []
        self._linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        # its input is one row per sampled token, not per token of the step
        self._head = next((n for n, m in self._linear.items() if m is model.get_output_embeddings()), None)
        self._hooked: set[str] = set()
        self._device = model.device  # not that of the weights, which may be asleep on the CPU

    def load(self, name: str, path: str) -> Adapter:
        """Read a peft folder (adapter_config.json, adapter_model.safetensors). Raises AdapterError."""
        folder = Path(path)
        try:
            config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
            tensors = load_file(folder / "adapter_model.safetensors")
        except (OSError, ValueError, SafetensorError) as error:
            raise AdapterError(f"{path} is not a readable adapter folder: {error}") from error
        _check_config(config)
        modules: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            module, _, factor = key.removeprefix(_PREFIX).rpartition(".lora_")
            if module == self._head or module not in self._linear or factor not in ("A.weight", "B.weight"):
                raise AdapterError(
                    f"tensor {key}: adapters are supported on linear modules below the output layer only"
                )
            modules.setdefault(module, {})[factor[0]] = tensor
        scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
        factors = {}
        for module, pair in modules.items():
            linear = self._linear[module]
            want = {"A": (config["r"], linear.in_features), "B": (linear.out_features, config["r"])}
            got = {factor: tuple(tensor.shape) for factor, tensor in pair.items()}
            if got != want:
                raise AdapterError(f"{module}: the adapter's factors have shapes {got}, the model needs {want}")
            weight = linear.weight
            factors[module] = (
                pair["A"].to(self._device, weight.dtype).T.contiguous(),
                (pair["B"].float() * scale).to(self._device, weight.dtype).T.contiguous(),
            )
        if not factors:
            raise AdapterError(f"{path} holds no tensors")
        for module in factors.keys() - self._hooked:
            self._hook(module)
        return Adapter(name, path, factors)

    def _hook(self, name: str) -> None:
        def add_products(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            for adapter, begin, end in self.segments:
                if pair := adapter.factors.get(name):
                    output[:, begin:end] += (args[0][:, begin:end] @ pair[0]) @ pair[1]

        self._linear[name].register_forward_hook(add_products)
        self._hooked.add(name)


def _check_config(config: dict[str, Any]) -> None:
    """Refuse everything but plain LoRA and rsLoRA."""
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"peft_type: {config.get('peft_type')}; only LORA is supported")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"bias: {config['bias']}; only none is supported")
    if config.get("init_lora_weights", True) not in (True, False, "gaussian", "orthogonal", "eva"):
        raise AdapterError(f"init_lora_weights: {config['init_lora_weights']} also changes the base model's weights")
    for field, value in config.items():
        if value and field not in _KNOWN_FIELDS | {"bias"}:
            raise AdapterError(f"{field}: {value!r} is not supported; only plain LoRA and rsLoRA are")
    for field in ("r", "lora_alpha"):
        if not isinstance(config.get(field), int | float):
            raise AdapterError(f"{field}: {config.get(field)!r} is not a number")
