"""Comparisons in double precision. Kernels of float32 differ between processors, by more than a fault may change; what
differs in float64 is computed differently."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import nn

from agentfactory.trainers.networks.backbone import Backbone

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


@contextmanager
def never_through_float32() -> Iterator[None]:
    """Where transformers' layers convert float64 to float32 and back, they do not, so that nothing is rounded."""
    to, to_float = torch.Tensor.to, torch.Tensor.float

    def kept(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor if tensor.dtype == torch.float64 and args[:1] == (torch.float32,) else to(tensor, *args, **kwargs)

    def kept_float(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.dtype == torch.float64 else to_float(tensor)

    with patch.object(torch.Tensor, "to", kept), patch.object(torch.Tensor, "float", kept_float):
        yield


def assert_equal(given: Any, expected: Any) -> None:
    """Tensors, or what holds them, are equal; those that belong together are float64."""
    torch.testing.assert_close(given, expected, atol=TOLERANCE, rtol=TOLERANCE)
    tensors = [given] if isinstance(given, torch.Tensor) else given.values() if isinstance(given, dict) else given
    assert all(tensor.dtype == torch.float64 for tensor in tensors)
