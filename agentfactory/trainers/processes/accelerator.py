"""Creation and checks of a run's Accelerator: launchers can silently set up something other than requested."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    gather_object,
)
from torch.distributed.fsdp import MixedPrecisionPolicy

from agentfactory.base.http.loopback import has_foreign_peer, own_sockets
from agentfactory.trainers.config import ACCELERATE, TrainConfig, TrainRecipe
from agentfactory.trainers.processes.launch_variables import check_launch_variables
from agentfactory.trainers.processes.rendezvous import LaunchError, init_method

# ranks wait in a collective call while rank 0 waits for rollouts, which may take longer than torch's 10 minutes; if a
# rank dies, the launcher notices
PATIENCE = timedelta(days=7)

_DDP = {DistributedType.MULTI_GPU, DistributedType.MULTI_CPU, DistributedType.MULTI_XPU, DistributedType.MULTI_NPU}
_STRATEGIES = {"single": {DistributedType.NO}, "ddp": _DDP, "fsdp2": {DistributedType.FSDP}}

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
    if train.strategy == "fsdp2" and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        _check_fsdp_settings(train)
        options["fsdp_plugin"] = _fsdp2(_precision(getattr(torch, recipe.model.dtype)), method)
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
    return accelerator


def _fsdp2(mixed_precision: MixedPrecisionPolicy, method: str | None) -> FullyShardedDataParallelPlugin:
    if os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true":
        # accelerate enables FSDP only together with MULTI_GPU; it is enough that this describes the launch, not the
        # device
        PartialState(cpu=True, timeout=PATIENCE, init_method=method)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        # the classes are those of the prepared module's _no_split_modules
        auto_wrap_policy="transformer_based_wrap",
        state_dict_type="FULL_STATE_DICT",
        mixed_precision_policy=mixed_precision,
        # we load on rank 0 ourselves (see sharding): transformers would still read all weights on every rank, and
        # accelerate would untie weights and refuse buffers that a checkpoint contains
        cpu_ram_efficient_loading=False,
    )


def _precision(dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Return the precision of sharded networks. Below float32, weights are gathered and used in `dtype`, and so is the
    residual stream, as in inference servers; under autocast alone, weights would be gathered in float32."""
    if dtype.itemsize >= 4:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)


def _check_fsdp_settings(train: TrainConfig) -> None:
    for variable, (name, right, why) in _FSDP_SETTINGS.items():
        value = os.environ.get(variable, right).lower()
        if value != right:
            problem = f"the launcher's configuration has {name}: {value}, which is not supported: {why}"
            raise LaunchError(f"{problem}. Start it with: {launch_command(train, 'cuda')}")


def check_launch(train: TrainConfig, accelerator: Accelerator) -> None:
    """Compare the recipe, the launcher's environment and accelerate's setup. Raises LaunchError with the fix."""
    asked = f"the recipe asks for train.processes={train.processes} and train.strategy={train.strategy}"
    got = f"accelerate set up {accelerator.num_processes} process(es) as {accelerator.distributed_type.value}"
    fix = f"start it with: {launch_command(train, accelerator.device.type)}"
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != accelerator.num_processes:
        # a launcher started several processes, each of which believes that it is alone
        raise LaunchError(f"the launcher started {world} processes, but {got}: they would train independently. {fix}")
    if train.strategy != "fsdp2" and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
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
    machines = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    where = f"--num_machines {machines} --machine_rank R --main_process_ip ADDRESS " if machines > 1 else ""
    options = f"--config_file {file} {where}--num_processes {train.processes}"
    return f"{prefix}accelerate launch {options} -m agentfactory.train RECIPE"
