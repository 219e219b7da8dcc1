"""Comparisons in float64: float32 kernels differ between processors by more than a fault might."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import nn

from agentfactory.trainers.networks.network import Backbone

ModuleT = TypeVar("ModuleT", bound=nn.Module)

TOLERANCE = 1e-7
"""Transformers' norms and rotary angles pass through float32 in any network, which can round differences in float64's
last bits to neighbours 6e-8 apart."""


def in_float64(module: ModuleT) -> ModuleT:
    for part in module.modules():
        if isinstance(part, Backbone):
            part.dtype = torch.float64
    return module.double()


@contextmanager
def never_through_float32() -> Iterator[None]:
    """Disable conversions of float64 to float32 and back in transformers' layers, so that nothing is rounded."""
    to, to_float, matmul = torch.Tensor.to, torch.Tensor.float, torch.Tensor.__matmul__

    def kept(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor if tensor.dtype == torch.float64 and args[:1] == (torch.float32,) else to(tensor, *args, **kwargs)

    def kept_float(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.dtype == torch.float64 else to_float(tensor)

    def promoted(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        # transformers 5.18 multiplies frequencies and positions as matrices, whose dtypes must be equal
        dtype = torch.promote_types(one.dtype, two.dtype)
        return matmul(to(one, dtype), to(two, dtype))

    patched = {"to": kept, "float": kept_float, "__matmul__": promoted}
    with patch.multiple(torch.Tensor, **patched):
        yield


def assert_equal(given: Any, expected: Any) -> None:
    torch.testing.assert_close(given, expected, atol=TOLERANCE, rtol=TOLERANCE)
    tensors = [given] if isinstance(given, torch.Tensor) else given.values() if isinstance(given, dict) else given
    assert all(tensor.dtype == torch.float64 for tensor in tensors)
