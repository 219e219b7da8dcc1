"""Full weights of a model in place: from a safetensors file, and their checksums."""

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn


class WeightsError(ValueError):
    """A weights file that does not fit the model; nothing was changed."""


def load_weights(model: nn.Module, path: str) -> None:
    """Copy every tensor of a safetensors file into the model, converting to the model's dtype.

    Names are those of `model.state_dict()`; of tied tensors one name is enough. All is checked before the first copy:
    WeightsError names what is unreadable, unknown, missing, mis-shaped, or tied and yet different.
    """
    state = model.state_dict()
    tied: dict[int, list[str]] = {}
    for name, tensor in state.items():
        tied.setdefault(tensor.data_ptr(), []).append(name)
    if not Path(path).is_file():
        raise WeightsError(f"{path}: no such file")
    try:
        with safe_open(path, "pt") as file:
            given = set(file.keys())
            if unknown := sorted(given - state.keys()):
                raise WeightsError(f"{path}: the model has no tensor {_some(unknown)}")
            if missing := [names[0] for names in tied.values() if not given.intersection(names)]:
                raise WeightsError(f"{path}: lacks the tensor {_some(missing)}")
            for name in given:
                shape = tuple(file.get_slice(name).get_shape())
                if shape != state[name].shape:
                    raise WeightsError(f"{path}: {name} has shape {shape}, the model needs {tuple(state[name].shape)}")
            for names in tied.values():
                first, *others = given.intersection(names)
                if any(not torch.equal(file.get_tensor(first), file.get_tensor(other)) for other in others):
                    raise WeightsError(f"{path}: {', '.join(sorted([first, *others]))} are tied but differ")
            with torch.no_grad():
                for name in given:
                    state[name].copy_(file.get_tensor(name))
    except SafetensorError as error:
        raise WeightsError(f"{path} is not a readable safetensors file: {error}") from error


def checksums(model: nn.Module) -> dict[str, str]:
    """SHA-256 of each parameter's bytes, by name; tied parameters appear once, as in `named_parameters()`."""
    return {name: _digest(parameter.detach()) for name, parameter in model.named_parameters()}


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
