"""Linear layers in float32 on the CPU by oneDNN, which runs twice as fast as torch's default MKL on AMD processors."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# oneDNN compiles a kernel per shape (0.4 ms) and keeps 1024 of them: batches are padded to a multiple of ROWS, so that
# there are few shapes. Below MULTIPLICATIONS its longer call costs more than it saves. Measured on an EPYC 9004.
ROWS = 32
MULTIPLICATIONS = 2**20


def use_onednn(model: nn.Module) -> None:
    """Let the model's float32 `nn.Linear` modules on a CPU with AVX-512 compute by oneDNN; elsewhere do nothing.

    Their inputs must be [1, rows, features] or [rows, features], without gradients. Weights may change in place.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return
    for module in model.modules():
        if type(module) is nn.Linear and (module.weight.dtype, module.weight.device.type) == (torch.float32, "cpu"):
            module.forward = partial(_linear, module)  # type: ignore[method-assign]


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    rows = x.shape[-2]
    if rows * module.weight.numel() < MULTIPLICATIONS:
        return F.linear(x, module.weight, module.bias)
    padding = -rows % ROWS
    if padding:
        x = F.pad(x, (0, 0, 0, padding))
    # the operator behind torch.compile's CPU back end; torch's version is bounded in setup.py
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, module.weight, module.bias, "none", [], "")
    return y[..., :rows, :] if padding else y
