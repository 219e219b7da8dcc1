"""A vLLM plugin that loads full weights from safetensors files, computes digests that prove them, and keeps the
TCPStores of vLLM's processes on loopback. vLLM loads it if this package is installed in its environment (entry point
group `vllm.general_plugins`). A server accepts weights from files if started with `--weight-transfer-config
'{"backend": "file"}'`. Only vLLM's processes import this module."""

import importlib
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import vllm.distributed.utils
from safetensors import safe_open
from torch import Tensor
from torch.distributed import TCPStore
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from agentfactory.base.http.loopback import is_loopback
from agentfactory.rollout.inference.vllm import TABLE_ADAPTERS_VARIABLE
from agentfactory.rollout.inference.weight_digest import UNKNOWN, weight_digest

BACKEND = "file"


def register() -> None:
    """Register the backend, LoopbackStore, and (for any backend) our digests for /weight_checker in this process. vLLM
    calls this in each of its processes, possibly more than once."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, FileWeightTransferEngine)
    from vllm.model_executor.model_loader import weight_checksum

    weight_checksum.compute_tensor_digests = used_weights_digests
    if worker := sys.modules.get("vllm.v1.worker.gpu_worker"):
        worker.compute_tensor_digests = used_weights_digests  # type: ignore[attr-defined]
    # a function of the same name hides the module
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    for module in (torch.distributed, rendezvous, vllm.distributed.utils):
        module.TCPStore = LoopbackStore  # type: ignore[attr-defined, misc, union-attr]
    if os.environ.get(TABLE_ADAPTERS_VARIABLE):
        from vllm.model_executor.models.interfaces import SupportsLoRA

        # the default of models that do not set it, such as Qwen2; their embedding and head are the same layers as in
        # models that do, such as Llama
        SupportsLoRA.embedding_modules = {"embed_tokens": "input_embeddings", "lm_head": "output_embeddings"}


class LoopbackStore(TCPStore):
    """A TCPStore for workers on one machine that listens only on loopback if that is its address. torch's own listens
    on all interfaces without a key, and vLLM unpickles data from it."""

    def __init__(
        self, host_name: str, port: int, world_size: int | None = None, is_master: bool = False, **options: Any
    ):
        if is_master and is_loopback(host_name) and options.get("master_listen_fd") is None:
            family = socket.AF_INET6 if ":" in host_name else socket.AF_INET
            listener = socket.create_server((host_name, port), family=family, backlog=max(world_size or 0, 128))
            port = listener.getsockname()[1]
            options["master_listen_fd"] = listener.detach()
        super().__init__(host_name, port, world_size, is_master, **options)


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """The `init_info`, {}: the backend needs no initialisation."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """`update_info` of one /update_weights request: a safetensors file with weights under their checkpoint names, or a
    folder of such files, readable by every worker."""

    path: str


class FileWeightTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """A weight-transfer backend that loads weights in the checkpoint's format into the live model, layer by layer."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        # materialised layers go to the default device, as at the first load
        with torch.device(self.device):
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, str]) -> None:
        """See WeightTransferEngine, whose method requires an accelerator; this one also works on a CPU."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Load every tensor of the files. Missing weights stay unchanged, which the trainer's content proof detects."""
        path = Path(update_info.path)
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files or not files[0].is_file():
            raise ValueError(f"update_info.path: {path}: no safetensors file on the server's machine")
        with torch.device(self.device):
            self.model.load_weights(_tensors_of(files))

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with torch.device(self.device):
            finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            # repack what vLLM on a CPU uses as packed copies but does not repack at a reload: the head of a model with
            # tied embeddings, which owns none of the loaded weights, and experts, which are reloaded unpacked
            from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

            for module in self.model.modules():
                weight = getattr(module, "weight", None)
                if hasattr(module, "cpu_linear") and isinstance(weight, Tensor) and weight.ndim == 2:
                    dispatch_cpu_unquantized_gemm(module, remove_weight=False)
                if hasattr(module, "w13_weight"):
                    module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)  # type: ignore[operator, union-attr]

    def shutdown(self) -> None:
        """Do nothing."""


def _tensors_of(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    for path in files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def used_weights_digests(model: torch.nn.Module) -> dict[str, str]:
    """Return the `weight_digest` of every parameter, by name, from the weights in use, packed or not. vLLM's own sha256
    digests take a minute for 100 GB, and on a CPU skip packed layers, and for a tied head cover the embeddings. Experts
    whose reordering by a kernel cannot be undone become UNKNOWN."""
    from vllm.model_executor.model_loader.weight_checksum import _tensors

    digests: dict[str, str] = {}
    packs = next(model.parameters()).device.type == "cpu"
    seen: set[tuple[int, str]] = set()
    for name, parameter in model.named_parameters(remove_duplicate=not packs):
        path, _, own_name = name.rpartition(".")
        module = model.get_submodule(path)
        if (id(module), own_name) in seen:
            continue
        seen.add((id(module), own_name))
        if own_name in ("w13_weight", "w2_weight") and (backend := _reordering(module)):
            digests[name] = f"{UNKNOWN}:{backend}"
            continue
        # a quantised parameter consists of several tensors
        for key, used in _tensors(name, parameter):
            # fold even on a CPU: vLLM's environment may lack the library for xxh3
            digests[key] = weight_digest(_used(module, own_name, used) if packs else used, "fold")
    return digests


def _used(module: Any, own_name: str, weight: Tensor) -> Tensor:
    if own_name in ("w13_weight", "w2_weight"):
        return _unpacked_experts(module, own_name)
    if own_name == "weight" and hasattr(module, "cpu_linear"):
        own = module.weight
        width = own.shape[1] if own.ndim == 2 else getattr(module, "input_size_per_partition", module.input_size)
        packed: Tensor = module.cpu_linear(torch.eye(width, dtype=own.dtype), own, None).T
        # 0 and -0 are the same weight
        if weight.shape != packed.shape or not torch.equal(weight, packed):
            return packed
    return weight


def _reordering(module: Any) -> str:
    """Return the kernel that has reordered a module's experts; "" if they are in order, or it can be restored."""
    backend = getattr(getattr(module, "quant_method", None), "unquantized_backend", None)
    name = getattr(backend, "name", "another")
    if name == "CPU":
        experts = module.quant_method.moe_kernel.fused_experts
        largest = max(weight[0].numel() for weight in (module.w13_weight, module.w2_weight))
        readable = module.w13_weight.dtype == torch.float32 and largest < 2**24 and not experts._use_zentorch
        return "" if readable else "CPU"
    return "" if name in ("TRITON", "BATCHED_TRITON", "FLASHINFER_CUTLASS") else name


def _unpacked_experts(module: Any, name: str) -> Tensor:
    """Return all experts' weights [experts, out, in], unpacked from vLLM's CPU layout. vLLM cannot reload experts whose
    width it had to pad to a multiple of 32."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    packed, isa = getattr(module, name), module.quant_method.moe_kernel.fused_experts.isa
    count, rows, columns = packed.shape
    # packing permutes every expert the same way; packing indices shows the permutation, exact in float32 up to 2**24
    numbers = torch.arange(rows * columns, dtype=torch.float32).view(1, rows, columns)
    order = cpu_prepack_moe_weight(numbers, isa).flatten().long()
    weight = torch.empty_like(packed.data).view(count, -1)
    weight[:, order] = packed.data.reshape(count, -1)
    return weight.view(packed.shape)
