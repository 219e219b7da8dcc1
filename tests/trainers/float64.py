"""Comparisons in double precision. Kernels of float32 differ between processors, by more than a fault may change; what
differs in float64 is computed differently."""

from typing import Any, TypeVar

import torch
from torch import nn

from agentfactory.trainers.backbone import Backbone

ModuleT = TypeVar("ModuleT", bound=nn.Module)

TOLERANCE = 1e-7
"""Transformers' norms and rotary angles pass through float32 in any network: last bits of float64 that differ can be
rounded to neighbours there, 6e-8 apart."""


def in_float64(module: ModuleT) -> ModuleT:
    """A network, or modules of ours around networks, that computes in float64."""
    for part in module.modules():
        if isinstance(part, Backbone):
            part.dtype = torch.float64
    return module.double()


def assert_equal(given: Any, expected: Any) -> None:
    """Tensors, or what holds them, are equal; those that belong together are float64."""
    torch.testing.assert_close(given, expected, atol=TOLERANCE, rtol=TOLERANCE)
    tensors = [given] if isinstance(given, torch.Tensor) else given.values() if isinstance(given, dict) else given
    assert all(tensor.dtype == torch.float64 for tensor in tensors)
