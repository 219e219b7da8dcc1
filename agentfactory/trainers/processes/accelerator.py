"""Creation and checks of a run's Accelerator: launchers can silently set up something other than requested. The ranks
of one machine connect over loopback, and rank 0 sends its decisions and weights to the others."""

import logging
import os
import socket
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from accelerate import Accelerator, ParallelismConfig, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    broadcast_object_list,
    gather_object,
)
from torch import distributed as dist
from torch import nn
from torch.distributed import FileStore, Store, TCPStore
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.rendezvous import register_rendezvous_handler
from transformers import AutoConfig, PreTrainedModel

from agentfactory.base.errors import SettingError
from agentfactory.base.http.loopback import has_foreign_peer, is_loopback, loopback_interface, own_sockets
from agentfactory.base.processes.supervised import starter
from agentfactory.base.run_notices import notify
from agentfactory.trainers.config import ACCELERATE, PORTLESS_ENVIRONMENT, PORTLESS_OPTIONS, TrainConfig, TrainRecipe
from agentfactory.trainers.processes import check_launch_variables

logger = logging.getLogger(__name__)

# accelerate makes hsdp's mesh so
warnings.filterwarnings("ignore", "Slicing a flattened dim from root mesh", UserWarning)

# ranks wait in a collective call while rank 0 waits for rollouts, which may take longer than torch's 10 minutes; if a
# rank dies, the launcher notices
PATIENCE = timedelta(days=7)

_DDP = {DistributedType.MULTI_GPU, DistributedType.MULTI_CPU, DistributedType.MULTI_XPU, DistributedType.MULTI_NPU}
_FSDP = {DistributedType.FSDP}
_STRATEGIES = {"single": {DistributedType.NO}, "ddp": _DDP, "fsdp2": _FSDP, "hsdp": _FSDP}

_FSDP_SETTINGS = {
    "FSDP_VERSION": ("fsdp_version", "2", "AgentFactory trains with FSDP2 only"),
    "FSDP_IGNORED_MODULES": ("fsdp_ignored_modules", "", "all ranks would train their own copy"),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": ("fsdp_transformer_layer_cls_to_wrap", "", "they follow from the model"),
    "FSDP_OFFLOAD_PARAMS": ("fsdp_offload_params", "false", "weights stay on the GPU"),
    "FSDP_ACTIVATION_CHECKPOINTING": ("fsdp_activation_checkpointing", "false", "set train.gradient_checkpointing"),
}
"""FSDP settings of a launcher's configuration: variable -> name, the only supported value, and the reason."""

_SAME: dict[str, Any] = {
    **dict.fromkeys(("seed", "model", "train", "placement", "sync"), True),
    # the longest sequence
    "rollout": {"max_total_tokens"},
    "server": {"max_model_len"},
}
"""Recipe fields that all processes compute with; the rest of a recipe concerns only rank 0."""


def make_accelerator(recipe: TrainRecipe) -> Accelerator:
    """Create the accelerator of this process. Raises LaunchError if accelerate did not set up `train.processes`
    processes under `train.strategy`, SettingError if a variable would change training beside the recipe."""
    check_launch_variables()
    train = recipe.train
    if recipe.sync.backend != "ipc":
        # micro-batches differ in length, and fragment fixed segments; CUDA IPC cannot share expandable ones
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    options: dict[str, Any] = {}
    earlier = own_sockets()
    method = init_method(recipe.server.urls)
    if train.is_sharded and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        for variable, (name, right, why) in _FSDP_SETTINGS.items():
            if (value := os.environ.get(variable, right).lower()) != right:
                problem = f"the launcher's configuration has {name}: {value}, which is not supported: {why}"
                raise LaunchError(f"{problem}. Start it with: {launch_command(train, 'cuda')}")
        options["parallelism_config"] = _hsdp() if train.strategy == "hsdp" else None
        options["fsdp_plugin"] = _fsdp2(getattr(torch, recipe.model.dtype), method)
    # all buffers are constants, and every process loads the same ones
    ddp = DistributedDataParallelKwargs(
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
        # each backward pass is either the policy's or the critic's
        find_unused_parameters=train.has_critic,
    )
    group = InitProcessGroupKwargs(timeout=PATIENCE, init_method=method)
    accelerator = Accelerator(mixed_precision="no", kwargs_handlers=[ddp, group], **options)
    # before the first object collective, which unpickles received data
    if method is not None and has_foreign_peer(earlier):
        raise LaunchError("another user has connected to this process in place of one of ours: start the run again")
    check_launch(train, accelerator)
    if (mesh := mesh_of(accelerator)) is not None:
        for group in mesh.get_all_groups():
            # accelerate sets that of the group of all processes only
            dist.distributed_c10d._set_pg_timeout(PATIENCE, group)
    return accelerator


def _hsdp() -> ParallelismConfig:
    """Return the mesh machines x processes of a machine, as the launcher numbers them. A machine has a copy of the
    weights, which its processes divide. Raises LaunchError if either number is 1 or unknown, or machines differ."""
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK")
    world, local, rank, place = (int(os.environ.get(name, "0")) for name in names)
    if not 1 < local < world or world % local or rank % local != place:
        problem = f"train.strategy=hsdp shards within a machine and copies between machines, but {local} of {world}"
        fix = "start as many on each of several machines; on one, use fsdp2, and with one process on each, fsdp2 or ddp"
        raise LaunchError(f"{problem} processes are on this one (LOCAL_WORLD_SIZE): {fix}")
    return ParallelismConfig(dp_replicate_size=world // local, dp_shard_size=local)


def mesh_of(accelerator: Accelerator) -> DeviceMesh | None:
    """Return the mesh of `fully_shard` under hsdp; None otherwise: all processes are one dimension."""
    config = accelerator.parallelism_config
    return None if config is None else accelerator.torch_device_mesh[tuple(config.fsdp_dim_names)]


def _fsdp2(dtype: torch.dtype, method: str | None) -> FullyShardedDataParallelPlugin:
    if os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true":
        # accelerate enables FSDP only together with MULTI_GPU; it is enough that this describes the launch, not the
        # device
        PartialState(cpu=True, timeout=PATIENCE, init_method=method)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    # below float32, weights are gathered and used in `dtype`, and so is the residual stream, as in inference servers;
    # under autocast alone, weights would be gathered in float32
    precision = MixedPrecisionPolicy(dtype, torch.float32) if dtype.itemsize < 4 else MixedPrecisionPolicy()
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        # the classes are those of the prepared module's _no_split_modules
        auto_wrap_policy="transformer_based_wrap",
        state_dict_type="FULL_STATE_DICT",
        mixed_precision_policy=precision,
        # we load on rank 0 ourselves (see load_on_rank_0): transformers would still read all weights on every rank,
        # and accelerate would untie weights and refuse buffers that a checkpoint contains
        cpu_ram_efficient_loading=False,
    )


def check_launch(train: TrainConfig, accelerator: Accelerator) -> None:
    """Compare the recipe, the launcher's environment and accelerate's setup. Raises LaunchError with the fix."""
    asked = f"the recipe asks for train.processes={train.processes} and train.strategy={train.strategy}"
    got = f"accelerate set up {accelerator.num_processes} process(es) as {accelerator.distributed_type.value}"
    fix = f"start it with: {launch_command(train, accelerator.device.type)}"
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != accelerator.num_processes:
        # a launcher started several processes, each of which believes that it is alone
        raise LaunchError(f"the launcher started {world} processes, but {got}: they would train independently. {fix}")
    if not train.is_sharded and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise LaunchError(f"{asked}, but the launcher's configuration asks for FSDP, and {got}. {fix}")
    if accelerator.num_processes != train.processes or accelerator.distributed_type not in _STRATEGIES[train.strategy]:
        raise LaunchError(f"{asked}, but {got}. {fix}")


def check_same_recipe(recipe: TrainRecipe) -> None:
    """Raise LaunchError in every process unless their recipes agree: each machine reads its own file."""
    told = recipe.model_dump(mode="json", include=_SAME)
    seed = told.pop("seed")
    own = {f"{section}.{name}": value for section, fields in told.items() for name, value in fields.items()}
    first, *others = gather_object([{"seed": seed, **own}])
    for number, other in enumerate(others, 1):
        for name, value in first.items():
            if other[name] != value:
                problem = f"process {number} has {name}={other[name]!r}, and process 0 has {value!r}"
                raise LaunchError(f"{problem}: start all machines with the same recipe and overrides")


def launch_command(train: TrainConfig, device: str) -> str:
    """Return the command that launches the recipe's processes on this kind of device, on each machine."""
    if train.strategy == "single":
        return "python -m agentfactory.train RECIPE (or change train.processes and train.strategy)"
    # --cpu would start a single process, and so would a MULTI_CPU configuration
    prefix = "ACCELERATE_USE_CPU=true " if device == "cpu" else ""
    file = ACCELERATE / f"{train.strategy}.yaml"
    file = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    # the number of launchers that torchrun has connected
    machines = os.environ.get("GROUP_WORLD_SIZE", "1")
    machines = "MACHINES" if machines == "1" and train.strategy == "hsdp" else machines
    where = f"--num_machines {machines} --machine_rank R --main_process_ip ADDRESS " if machines != "1" else ""
    options = f"--config_file {file} {where}--num_processes {train.processes}"
    return f"{prefix}accelerate launch {options} -m agentfactory.train RECIPE"


# ---- rendezvous: torch's default store is a TCP server on all interfaces without authentication. Anyone who writes to
# it can redirect gloo's connections, and object collectives unpickle the data that arrives, which can run code. So the
# ranks of one machine connect over loopback, and to their store through a private file.

_SCHEME = "agentfactory"
_PAGE = "docs/multi-node.md"


class LaunchError(Exception):
    """The launch does not match the recipe, or another user could interfere; the message contains the fix."""


def init_method(urls: Iterable[str]) -> str | None:
    """Return torch's `init_method` for this launch; None keeps torch's own: for one process, or for several machines.
    On one machine, bind gloo and NCCL to loopback, unless the user names an interface; NCCL only if it also reaches the
    inference servers at `urls` there. Warn, on rank 0, about ports that are open to the network. Raises LaunchError."""
    first, world = os.environ.get("RANK", "0") == "0", os.environ.get("WORLD_SIZE", "1")
    # a launcher that does not say how many ranks run here may have started others elsewhere
    if world != "1" and os.environ.get("LOCAL_WORLD_SIZE") != world:
        if first:
            address = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
            notify(logger, "open ports", _REACHABLE.format(address), see=_PAGE)
        return None
    loopback = loopback_interface()
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        if all(is_loopback(urlsplit(url).hostname or "") for url in urls):
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={loopback}")
    if world == "1":
        return None
    if first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        notify(logger, "open ports", _LAUNCHER.format(os.environ.get("MASTER_PORT")), see=_PAGE)
    file = _store_file() if "TORCHELASTIC_RUN_ID" in os.environ else None
    return f"{_SCHEME}://{file or ''}"


_LOOPBACK = "127.0.0.1"
_REACHABLE = (
    "torch's store at {0} and the connections of gloo and NCCL have no authentication: anyone who reaches these ports "
    "can run code as you; protect them by a firewall or a private network"
)
_LAUNCHER = (
    "the launcher's store listens on all interfaces, port {0}, without authentication: others can end this run; "
    "`agentfactory train` opens no such port, and neither does "
    f"`{' '.join(f'{name}={value}' for name, value in PORTLESS_ENVIRONMENT.items())} accelerate launch "
    f"{' '.join(PORTLESS_OPTIONS)} ...`"
)


def _store_file() -> Path:
    """Return the file for this launch, named by the launcher's process. Files of earlier launches are removed."""
    # containers that share the folder number their processes independently
    processes = os.stat("/proc/self/ns/pid").st_ino
    folder = Path(tempfile.gettempdir(), f"agentfactory-ranks-{os.geteuid()}-{processes}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        fix = "remove it, or set TMPDIR to a folder of yours"
        raise LaunchError(f"{folder}: another user could read or change this folder of the ranks' store; {fix}")
    for file in folder.iterdir():
        pid, started, _ = file.name.split("-")
        if _start_of(int(pid)) != started:
            file.unlink(missing_ok=True)
    launcher, restart = starter(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return folder / f"{launcher}-{_start_of(launcher)}-{restart}"


def _start_of(pid: int) -> str | None:
    """Return the start of a process in clock ticks since boot; None if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None


def _rendezvous(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield store, rank and number of ranks. For ranks started by hand, the store is a TCP server on loopback."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if file := urlsplit(url).path:
        yield FileStore(file, world), rank, world
        return
    port = int(os.environ.get("MASTER_PORT", "29500"))
    options: dict[str, Any] = {}
    if rank == 0:
        # torch itself binds to all interfaces, whatever the host's name
        listener = socket.create_server((_LOOPBACK, port), backlog=max(world, 128))
        options = {"multi_tenant": True, "master_listen_fd": listener.detach()}
    yield TCPStore(_LOOPBACK, port, world, is_master=rank == 0, timeout=timeout, **options), rank, world


register_rendezvous_handler(_SCHEME, _rendezvous)


# ---- decisions and weights of rank 0: only it loads weights that are sharded, and the others get their shards

Value = TypeVar("Value")


def load_on_rank_0(load: Callable[[], PreTrainedModel], kind: Any, path: str, dtype: torch.dtype) -> Any:
    """Return the network that `load` loads from `path`, by transformers' class `kind`; on all ranks except 0, the same
    network on the CPU with arbitrary weights and buffers, which take up memory only once they are written. Every
    process calls it."""
    if dist.get_rank() == 0:
        network: Any = load()
    else:
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
            network = kind.from_config(config, dtype=dtype, trust_remote_code=False)
        # new memory for each name, so tied weights are no longer tied
        network.to_empty(device="cpu")
    # weights that the checkpoint stores under both names with different values are not tied, whatever its config says
    network.all_tied_weights_keys = decided_by_rank_0(lambda: dict(network.all_tied_weights_keys))
    network.tie_weights(recompute_mapping=False)
    return network


def decided_by_rank_0(decide: Callable[[], Value]) -> Value:
    """Return, in all ranks, the result of `decide` on rank 0, or raise its SettingError. Every process calls it."""
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = decide()
        except SettingError as error:
            found[1] = error
    dist.broadcast_object_list(found, src=0)
    if found[1] is not None:
        raise found[1]
    return found[0]


@contextmanager
def weights_of_rank_0(model: nn.Module) -> Iterator[None]:
    """Fill `model`, which is sharded in place in this context, with rank 0's weights. Every process calls it."""
    weights = model.state_dict() if dist.get_rank() == 0 else {}
    own = {name for name, _ in model.named_parameters()}
    # torch shards a module with two names, such as the trained rows of tied tables, under the first one only
    for alias in {name for name, _ in model.named_parameters(remove_duplicate=False)} - own:
        weights.pop(alias, None)
    yield
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    missing = own & {*set_model_state_dict(model, weights, options=options).missing_keys}
    if missing:
        raise RuntimeError(f"rank 0 has no weights for {', '.join(sorted(missing))}")
    for buffer in model.buffers():
        # buffers outside the state dictionary, such as the frequencies of rotary embeddings
        dist.broadcast(buffer, src=0)


def of_rank_0(value: Value) -> Value:
    """Return rank 0's `value` in all ranks; every process calls it."""
    found: list[Value] = broadcast_object_list([value])
    return found[0]
