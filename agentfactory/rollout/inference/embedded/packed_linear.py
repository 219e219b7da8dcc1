"""Float32 linear layers on the CPU with oneDNN's packed weights: from 32 rows on, up to twice as fast as torch's."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# oneDNN compiles a kernel per shape (0.4 ms) and keeps 1024 of them, so batches are padded to a multiple of ROWS to
# limit the number of shapes. Smaller batches would take as long as ROWS, so torch computes them. Below MULTIPLICATIONS,
# the slower call costs more than it saves. Measured on an EPYC with torch 2.13: from 32 rows on 0.9 to 1.5 times as
# fast as torch with one thread, 0.7 to 2.5 with two; 8 rows, padded, took three to five times as long.
ROWS = 32
MULTIPLICATIONS = 2**20


def use_onednn(model: nn.Module) -> None:
    """Use oneDNN for the model's float32 `nn.Linear` modules on a CPU with AVX-512; elsewhere do nothing.

    Their inputs must be [1, rows, features] or [rows, features], without gradients. Weights may change in place. Each
    weight that was used with at least ROWS rows is also kept in oneDNN's layout.
    """
    for module in onednn_modules(model):
        module.forward = _PackedLinear(module)  # type: ignore[assignment, method-assign]


def onednn_modules(model: nn.Module, device: str = "cpu") -> list[nn.Linear]:
    """Return the modules that `use_onednn` applies to. `device` is the device of the weights: cpu, or meta before they
    are allocated."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return []
    return [
        module
        for module in model.modules()
        if type(module) is nn.Linear and (module.weight.dtype, module.weight.device.type) == (torch.float32, device)
    ]


def drop_packed(model: nn.Module) -> None:
    """Free the packed copies; each is created again on its next use."""
    for module in model.modules():
        if isinstance(module.forward, _PackedLinear):
            module.forward.drop()


class _PackedLinear:
    """The forward pass of one linear module, using the operators of torch.compile's CPU back end."""

    def __init__(self, module: nn.Linear) -> None:
        self._weight = module.weight
        self._bias = module.bias
        self.drop()

    def drop(self) -> None:
        self._packed: Tensor | None = None
        self._version = -1

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[-2]
        if rows < ROWS or rows * self._weight.numel() < MULTIPLICATIONS:
            return F.linear(x, self._weight, self._bias)
        # torch counts in-place changes of a tensor, which shows that a weight update requires a new packed copy
        if self._version != self._weight._version:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight, ROWS)
            self._version = self._weight._version
        padding = -rows % ROWS
        if padding:
            x = F.pad(x, (0, 0, 0, padding))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y[..., :rows, :] if padding else y
