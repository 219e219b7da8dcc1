"""The state of a learner on disk: trained weights in float32, optimiser, schedule and random states, in the format of
torch.distributed.checkpoint. Every process writes its shards, and its share of the rest; any number can load it."""

import io
import pickle
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, EnumMeta
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from agentfactory.trainers.batches.packing import deal
from agentfactory.trainers.update.learner import Learner

TRAINING_STATE = "training_state"
"""The folder of the state in a checkpoint."""
FILE_BEFORE = "training_state.pt"
"""The file with the whole state in checkpoints of version 0.1."""

_SETTINGS = "settings"
"""Key of everything that is not a tensor, as the bytes of a torch.save file. The other keys are weights/NAME,
optimizer/NAME/SLOT and random/RANK/DEVICE."""
_METADATA = {
    "torch.distributed.checkpoint.metadata": (
        *("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
        *("TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("Path", "PosixPath", "WindowsPath"),
}
"""Module -> names that a state's metadata may contain, in addition to torch's dtypes and sizes."""

# raised for a single process, and for ranks that load independently
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)

Part = dict[str, Tensor]
"""A process's part of the state by key: tensors, sharded ones as DTensor."""


def part_of(learner: Learner) -> Part:
    """Return this process's part of the state; its tensors are the learner's own. Every process calls it."""
    rank, processes = learner.accelerator.process_index, learner.accelerator.num_processes
    optimizer = _bare(learner.optimizer)
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for name, weight in _trained(learner).items():
        tensors[f"weights/{name}"] = weight.detach()
        if weight in optimizer.state:
            numbers[name] = {}
        for slot, value in optimizer.state.get(weight, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{name}/{slot}"] = value.detach()
            else:
                numbers[name][slot] = value
    whole = [key for key, value in tensors.items() if not isinstance(value, DTensor)]
    others = {*whole} - {whole[number] for number in deal([tensors[key].nbytes for key in whole], processes)[rank]}
    part: Part = {key: value for key, value in tensors.items() if key not in others}
    # torch is the only source of randomness in a trainer
    part[f"random/{rank}/cpu"] = torch.get_rng_state()
    if (device := learner.accelerator.device).type != "cpu":
        part[f"random/{rank}/{device.type}"] = torch.get_device_module(device).get_rng_state(device)
    if rank == 0:
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        settings = {"optimizer": numbers, "groups": groups, "schedule": learner.schedule.state_dict()}
        file = io.BytesIO()
        torch.save(settings, file)
        part[_SETTINGS] = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    return part


def write_part(part: Part, folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write `part`, whose tensors are in host memory, to `folder`, and make it durable. All processes of `group` (None:
    a single process) call it at the same time. Raises the first error of any process, in all processes."""
    writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _first_failure():
        dcp.save(part, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)


@contextmanager
def _first_failure() -> Iterator[None]:
    """Raise the first process's own error instead of a CheckpointException."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


class StateReader(dcp.FileSystemReader):
    """A reader of untrusted states: unpickling can run code, so it accepts only classes that describe tensors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See FileSystemReader. Raises ValueError if the metadata names anything else, or a file outside the folder."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata: Metadata = _MetadataUnpickler(file).load()
        for stored in (metadata.storage_data or {}).values():
            if Path(stored.relative_path).name != stored.relative_path:
                raise ValueError(f"the metadata of a training state names {stored.relative_path!r}, outside its folder")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            # Python 3.11.0 to 3.11.3 pickles members of enumerations this way
            return _member
        module = module.removesuffix("._local")  # of Python 3.13's pathlib
        if name in _METADATA.get(module, ()):
            return super().find_class(module, name)
        found = getattr(torch, name, None) if module == "torch" else None
        if found is torch.Size or isinstance(found, torch.dtype):
            return found
        raise ValueError(f"the metadata of a training state names {module}.{name}, which describes no tensor")


def _member(kind: Any, name: str) -> Enum:
    if not (isinstance(kind, EnumMeta) and name in kind.__members__):
        raise ValueError(f"the metadata of a training state names {name} of {kind!r}, which describes no tensor")
    return cast(Enum, kind[name])


def settings_in(state: Part) -> dict[str, Any]:
    """Return everything in a state that is not a tensor. Raises ValueError if unpickling it would run code."""
    try:
        settings: dict[str, Any] = torch.load(io.BytesIO(state[_SETTINGS].numpy().tobytes()), weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"the settings of a training state hold more than numbers and texts: {error}") from None
    return settings


def load_state(checkpoint: Path, learner: Learner) -> None:
    """Restore `learner` from the state in a checkpoint. Every process calls it.

    With the number of processes that wrote it, training continues bit for bit; with more, the additional ones keep
    their own random state. Raises ValueError if the checkpoint contains other weights than are trained."""
    if (checkpoint / FILE_BEFORE).exists():
        _load_file(checkpoint, learner)
        return
    reader = StateReader(checkpoint / TRAINING_STATE)
    held, trained = reader.read_metadata().state_dict_metadata, _trained(learner)
    _check_names(checkpoint, (key.removeprefix("weights/") for key in held if key.startswith("weights/")), trained)
    device, rank = learner.accelerator.device, learner.accelerator.process_index
    wanted: Part = {f"weights/{name}": weight.detach() for name, weight in trained.items()}
    for key, entry in held.items():
        kind, _, rest = key.partition("/")
        if kind == "optimizer":
            wanted[key] = _room(cast(TensorStorageMetadata, entry), trained[rest.rpartition("/")[0]])
        elif key in (_SETTINGS, f"random/{rank}/cpu", f"random/{rank}/{device.type}"):
            wanted[key] = torch.empty(cast(TensorStorageMetadata, entry).size, dtype=torch.uint8)
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _first_failure():
        dcp.load(wanted, storage_reader=reader, planner=planner, no_dist=True)
    settings = settings_in(wanted)
    states: dict[str, dict[str, Any]] = settings["optimizer"]
    for key, value in wanted.items():
        if key.startswith("optimizer/"):
            name, _, slot = key.removeprefix("optimizer/").rpartition("/")
            states[name][slot] = value
    random = {key.rpartition("/")[2]: value for key, value in wanted.items() if key.startswith("random/")}
    _restore(learner, states, settings["groups"], settings["schedule"], random)


def _load_file(checkpoint: Path, learner: Learner) -> None:
    # mapped: otherwise weights for a GPU would take up memory once per process
    mapped = learner.accelerator.device.type != "cpu"
    state = torch.load(checkpoint / FILE_BEFORE, map_location="cpu", weights_only=True, mmap=mapped)
    trained, rank = _trained(learner), learner.accelerator.process_index
    _check_names(checkpoint, state["weights"], trained)
    with torch.no_grad():
        for name, weight in trained.items():
            weight.copy_(_like(weight, state["weights"][name]))
    states = {name: dict(slots) for name, slots in state["optimizer"]["state"].items()}
    for name, slots in states.items():
        slots |= {slot: _like(trained[name], value) for slot, value in slots.items() if isinstance(value, Tensor)}
    random = state["random"][rank] if rank < len(state["random"]) else {}
    _restore(learner, states, state["optimizer"]["param_groups"], state["schedule"], random)


def _restore(
    learner: Learner,
    states: dict[str, dict[str, Any]],
    groups: list[dict[str, Any]],
    schedule: dict[str, Any],
    random: dict[str, Tensor],
) -> None:
    """Restore everything but the weights; `states` has the optimiser's by weight name."""
    optimizer, trained = _bare(learner.optimizer), _trained(learner)
    optimizer.state.clear()
    for name, slots in states.items():
        optimizer.state[trained[name]] = slots
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in settings.items() if key != "params"})
    # recompute the last step: train.steps may have changed, and the learning-rate schedule with it
    before = {"last_epoch": schedule["last_epoch"] - 1, "_step_count": schedule["_step_count"] - 1}
    learner.schedule.load_state_dict({**schedule, **before})
    with warnings.catch_warnings():
        # torch does not know of the optimiser's steps before this process
        warnings.simplefilter("ignore", UserWarning)
        learner.schedule.step()
    if random:
        torch.set_rng_state(random["cpu"])
        if (device := learner.accelerator.device).type in random and device.type != "cpu":
            torch.get_device_module(device).set_rng_state(random[device.type], device)


def _trained(learner: Learner) -> dict[str, nn.Parameter]:
    """Return the trained weights by name; tied weights have one name."""
    if isinstance(learner.model, FSDPModule):
        # after a forward pass without a backward pass the outermost weights are still whole
        learner.model.reshard()
    named = learner.accelerator.unwrap_model(learner.model).named_parameters()
    return {name: weight for name, weight in named if weight.requires_grad}


def _check_names(checkpoint: Path, held: Iterable[str], trained: dict[str, nn.Parameter]) -> None:
    other = sorted(set(held) ^ trained.keys())
    if other:
        raise ValueError(f"{checkpoint} holds other weights than are trained, such as {other[0]}")


def _room(entry: TensorStorageMetadata, weight: nn.Parameter) -> Tensor:
    """Return an empty tensor for a part of the optimiser's state of `weight`: sharded like it if it has its shape."""
    if entry.size == weight.shape:
        return torch.empty_like(weight.detach(), dtype=entry.properties.dtype)
    return torch.empty(entry.size, dtype=entry.properties.dtype, device=weight.device)


def _like(weight: nn.Parameter, value: Tensor) -> Tensor:
    """Return `value` on the device of `weight`, and sharded like it if it has its shape."""
    value = value.to(weight.device)
    if not isinstance(weight, DTensor) or value.shape != weight.shape:
        return value
    return distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None)


def _bare(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return getattr(optimizer, "optimizer", optimizer)
