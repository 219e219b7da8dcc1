"""In-place updates of a model's full weights, from safetensors files or shared memory, and their checksums."""

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from agentfactory.base.errors import some
from agentfactory.rollout.inference.embedded.device_memory import SharedBuffers, SharedMemoryError
from agentfactory.rollout.inference.embedded.packed_linear import ServedWeights
from agentfactory.rollout.inference.http_server import BadRequest
from agentfactory.rollout.inference.weight_digest import memory_threads, weight_digest

_PACKED = ("names", "dtype_names", "shapes", "tensor_sizes")
"""Lists that describe one part sent through shared memory, with one entry per tensor."""


class WeightUpdate:
    """One update of all weights: from files, or in parts through shared memory."""

    def __init__(self, model: nn.Module, overwritten: bool = False) -> None:
        """`model` stays on its device until the update ends; `overwritten`: an earlier update remained incomplete."""
        self.overwritten = overwritten
        """True if weights have been overwritten: the model then matches no version until an update has replaced all."""
        self._weights = ServedWeights(model)
        self._given: set[str] = set()
        # packed weights have left their parameters on the meta device
        self._device = next(weight.device for weight in model.parameters() if weight.device.type != "meta")
        self._buffers = SharedBuffers(self._device)

    def load(self, info: Any) -> None:
        """Load all weights from {"path": PATH}, a safetensors file or a folder of them, or some from a packed part. As
        in vLLM's `ipc` backend, a part has the lists `names`, `dtype_names`, `shapes` and `tensor_sizes` (in bytes),
        and `ipc_handles_pickled`, the handle of the buffer with these tensors one after the other. Names are keys of
        `model.state_dict()`; one name of tied tensors is enough. Everything is checked before anything is copied into
        the model. Raises BadRequest."""
        match info:
            case {"path": str(path), **rest} if not rest:
                self._load_files(Path(path))
            case {"ipc_handles_pickled": str(), **lists} if lists.keys() == set(_PACKED):
                self._load_packed(info)
            case _:
                raise BadRequest(
                    'update_info: the file backend takes {"path": "<safetensors file, or folder of such files>"}, the '
                    f"ipc backend {{{', '.join(_PACKED)}, ipc_handles_pickled}}"
                )

    def check_whole(self) -> None:
        """Raise BadRequest unless every weight was loaded."""
        if not self._given:
            raise BadRequest("weight_version: no weights were updated; POST /update_weights first")
        self._check_whole("weight_version: the update", self._given)

    def close(self) -> None:
        self._buffers.close()

    def _check_whole(self, source: str, given: set[str]) -> None:
        if missing := [names[0] for names in self._weights.tied if not given.intersection(names)]:
            raise BadRequest(f"{source} lacks the tensor {some(missing)}")

    def _load_files(self, path: Path) -> None:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files or not files[0].is_file():
            raise BadRequest(f"{path}: no such file" if files else f"{path}: no *.safetensors files in this folder")
        try:
            with ExitStack() as stack:
                opened = [stack.enter_context(safe_open(file, "pt")) for file in files]
                self._load_opened(path, {name: file for file in opened for name in file.keys()})  # noqa: SIM118
        except SafetensorError as error:
            raise BadRequest(f"{path} is not a readable safetensors file: {error}") from error

    def _load_opened(self, path: Path, holders: Mapping[str, Any]) -> None:
        given = set(holders)
        if unknown := sorted(given - self._weights.state.keys()):
            raise BadRequest(f"{path}: the model has no tensor {some(unknown)}")
        self._check_whole(f"{path}:", given)
        for name, file in holders.items():
            shape, needed = tuple(file.get_slice(name).get_shape()), self._weights.state[name].shape
            if shape != needed:
                raise BadRequest(f"{path}: {name} has shape {shape}, the model needs {tuple(needed)}")
        for names in self._weights.tied:
            first, *others = given.intersection(names)
            read = holders[first].get_tensor(first)
            if any(not torch.equal(read, holders[other].get_tensor(other)) for other in others):
                raise BadRequest(f"{path}: {', '.join(sorted([first, *others]))} are tied but differ")
        self.overwritten = True

        def copy(name: str) -> None:
            self._weights.write(name, holders[name].get_tensor(name))

        # most of the time is spent on page faults, which each thread handles one at a time
        with ThreadPoolExecutor(memory_threads()) as pool:
            list(pool.map(copy, holders))
        self._given = given

    def _load_packed(self, info: Mapping[str, Any]) -> None:
        lists = [info[key] for key in _PACKED]
        if any(not isinstance(entries, list) or len(entries) != len(lists[0]) for entries in lists):
            raise BadRequest(f"update_info: {', '.join(_PACKED)} must be lists of one length")
        try:
            buffer = self._buffers.open(info["ipc_handles_pickled"])
        except SharedMemoryError as error:
            raise BadRequest(str(error)) from error
        part: dict[str, Tensor] = {}
        start = 0
        for name, dtype_name, shape, size in zip(*lists, strict=True):
            part[name] = self._unpacked(buffer[start:], name, dtype_name, shape, size)
            start += size
        for names in self._weights.tied:
            new = [part[name] for name in names if name in part]
            given = new + [self._weights.read(name) for name in names if name in self._given]
            if new and any(not torch.equal(new[0], other) for other in given[1:]):
                raise BadRequest(f"update_info: {', '.join(sorted(names))} are tied but differ")
        self.overwritten = True
        for name, value in part.items():
            self._weights.write(name, value)
        if buffer.is_cuda:
            # the sender overwrites the buffer after the response
            torch.cuda.synchronize(buffer.device)
        self._given |= part.keys()

    def _unpacked(self, rest: Tensor, name: Any, dtype_name: Any, shape: Any, size: Any) -> Tensor:
        if name not in self._weights.state:
            raise BadRequest(f"update_info: the model has no tensor {name}")
        needed = self._weights.state[name].shape
        if tuple(shape) != needed:
            raise BadRequest(f"update_info: {name} has shape {tuple(shape)}, the model needs {tuple(needed)}")
        dtype = getattr(torch, str(dtype_name), None)
        if not isinstance(dtype, torch.dtype):
            raise BadRequest(f"update_info: {name} has dtype {dtype_name!r}, which is no dtype of torch")
        if size != math.prod(shape) * dtype.itemsize or size > len(rest):
            raise BadRequest(
                f"update_info: {name} needs {math.prod(shape) * dtype.itemsize} bytes; tensor_sizes has {size}, and "
                f"the buffer has {len(rest)} left"
            )
        flat = rest[:size]
        # after a tensor of a smaller dtype, this one may be unaligned
        aligned = flat.clone() if flat.data_ptr() % dtype.itemsize else flat
        return aligned.view(dtype).view(shape).to(self._device, self._weights.state[name].dtype)


def checksums(model: nn.Module) -> dict[str, str]:
    """Return the `weight_digest` of each weight, by name: parameters, and buffers that a checkpoint contains, such as
    DeepSeek's router bias correction. Tied weights appear once, under their first name."""
    weights = ServedWeights(model)
    names = [tied[0] for tied in weights.tied]
    with ThreadPoolExecutor(memory_threads()) as pool:
        return dict(zip(names, pool.map(lambda name: weight_digest(weights.read(name)), names), strict=True))
