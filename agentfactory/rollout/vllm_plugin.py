"""vLLM plugin: loads full weights from a safetensors file, and computes digests that prove them.

vLLM loads it automatically in the environment in which this package is installed (entry point group
`vllm.general_plugins`). A server accepts such weights if it is started with `--weight-transfer-config '{"backend":
"file"}'`. Imported only by vLLM's processes.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

BACKEND = "file"


def register() -> None:
    """Register the backend in this process. vLLM calls this in each of its processes, possibly more than once."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FileWeightTransferEngine)


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """`init_info` is {}: the backend needs no initialisation."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """`update_info` of one /update_weights request."""

    path: str
    """A safetensors file with weights under their checkpoint names, readable by every worker."""


class FileWeightTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Loads weights in the checkpoint's format into the running model, layer by layer."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Make /weight_checker report the weights in use from now on, on a CPU too."""
        if self.device.type == "cpu":
            from vllm.v1.worker import gpu_worker

            gpu_worker.compute_tensor_digests = used_weights_digests

    def start_weight_update(self) -> None:
        """See WeightTransferEngine."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        # materialised layers go to the default device, as at the first load
        with torch.device(self.device):
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, str]) -> None:
        """See WeightTransferEngine, which synchronises an accelerator; a CPU has none."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Load every tensor of the file. Weights that the file lacks are unchanged, which the trainer's proof
        detects."""
        if not Path(update_info.path).is_file():
            raise ValueError(f"update_info.path: {update_info.path}: no such file on the server's machine")
        with torch.device(self.device), safe_open(update_info.path, "pt") as file:
            self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118

    def finish_weight_update(self) -> None:
        """See WeightTransferEngine."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with torch.device(self.device):
            finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _pack_again(self.model)

    def shutdown(self) -> None:
        """Do nothing: there are no resources to release."""


def _pack_again(model: torch.nn.Module) -> None:
    """Repack weights that vLLM on the CPU multiplies by in a packed copy, which a reload leaves unchanged.

    The head of a model with tied embeddings owns none of the loaded weights, so the reload skips it and its packed copy
    would keep the old weights.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and isinstance(weight, Tensor) and weight.ndim == 2:
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def used_weights_digests(model: torch.nn.Module) -> dict[str, str]:
    """Return the sha256 of every parameter's bytes in row-major order, by name: of the weights in use, packed or not.

    On a CPU, vLLM's own digests cover nothing for packed layers, whose weight it has discarded, and for a tied head
    cover the embeddings instead of the packed copy.
    """
    digests = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path, _, own_name = name.rpartition(".")
        module, used = model.get_submodule(path), parameter.data
        if own_name == "weight" and hasattr(module, "cpu_linear"):
            packed = _unpacked(module)
            # zeros of both signs are the same weight
            if used.shape != packed.shape or not torch.equal(used, packed):
                used = packed
        digests[name] = hashlib.sha256(used.cpu().contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()
    return digests


def _unpacked(module: Any) -> Tensor:
    """Return the weight [out, in] that `module` multiplies by. It is exact: a product with the identity adds only
    zeros."""
    weight = module.weight
    width = weight.shape[1] if weight.ndim == 2 else getattr(module, "input_size_per_partition", module.input_size)
    return module.cpu_linear(torch.eye(width, dtype=weight.dtype), weight, None).T
