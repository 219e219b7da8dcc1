"""The Accelerator of a run, checked: accelerate's launchers can set up something else than was asked, in silence."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    gather_object,
)

from agentfactory.trainers.config import ACCELERATE, TrainConfig, TrainRecipe

# ranks wait in a collective call while rank 0 waits for rollouts, which may take longer than torch's 10 minutes; a rank
# that dies is noticed by the launcher
PATIENCE = timedelta(days=7)

_DDP = {
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_XPU,
    DistributedType.MULTI_NPU,
}
_STRATEGIES = {"single": {DistributedType.NO}, "ddp": _DDP, "fsdp2": {DistributedType.FSDP}}

_FSDP_SETTINGS = {
    "FSDP_VERSION": ("fsdp_version", "2", "AgentFactory trains with FSDP2 only"),
    "FSDP_OFFLOAD_PARAMS": ("fsdp_offload_params", "false", "weights stay on the GPU"),
    "FSDP_ACTIVATION_CHECKPOINTING": (
        "fsdp_activation_checkpointing",
        "false",
        "set train.gradient_checkpointing in the recipe",
    ),
}
"""What a launcher's configuration may ask of FSDP: variable -> name, the one value that is done, and why."""

_SAME: dict[str, Any] = {
    **dict.fromkeys(("seed", "model", "train", "placement", "sync"), True),
    # the longest sequence
    "rollout": {"max_total_tokens"},
    "server": {"max_model_len"},
}
"""What all processes compute with; the rest of a recipe is rank 0's."""


class LaunchError(Exception):
    """The launch is not what the recipe asks for; the message has the command that is."""


def make_accelerator(train: TrainConfig) -> Accelerator:
    """The accelerator of this process. Raises LaunchError where what accelerate set up is not `train.processes`
    processes under `train.strategy`.

    Precision is the policy's own business, so a mixed precision from an accelerate config is not applied.
    """
    options: dict[str, Any] = {}
    if train.strategy == "fsdp2" and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        _check_fsdp_settings(train)
        options["fsdp_plugin"] = _fsdp2()
    # all buffers are constants, and every process loads the same ones
    ddp = DistributedDataParallelKwargs(
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
        # a backward pass is the policy's or the critic's
        find_unused_parameters=train.has_critic,
    )
    group = InitProcessGroupKwargs(timeout=PATIENCE)
    accelerator = Accelerator(mixed_precision="no", kwargs_handlers=[ddp, group], **options)
    check_launch(train, accelerator)
    return accelerator


def _fsdp2() -> FullyShardedDataParallelPlugin:
    if os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true":
        # accelerate turns FSDP on beside MULTI_GPU only; that this names the launch, not the device, is enough for it
        PartialState(cpu=True, timeout=PATIENCE)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        # the classes are those of the prepared module's _no_split_modules
        auto_wrap_policy="transformer_based_wrap",
        state_dict_type="FULL_STATE_DICT",
        # it would load weights on rank 0 only, and untie embeddings and head of what is no transformers model
        cpu_ram_efficient_loading=False,
    )


def _check_fsdp_settings(train: TrainConfig) -> None:
    for variable, (name, right, why) in _FSDP_SETTINGS.items():
        value = os.environ.get(variable, right).lower()
        if value != right:
            raise LaunchError(
                f"the launcher's configuration has {name}: {value}, which is not done here: {why}. "
                f"Start it with: {launch_command(train, 'cuda')}"
            )


def check_launch(train: TrainConfig, accelerator: Accelerator) -> None:
    """Compares recipe, launcher environment and what accelerate set up; raises LaunchError with the fix."""
    asked = f"the recipe asks for train.processes={train.processes} and train.strategy={train.strategy}"
    got = f"accelerate set up {accelerator.num_processes} process(es) as {accelerator.distributed_type.value}"
    fix = f"start it with: {launch_command(train, accelerator.device.type)}"
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != accelerator.num_processes:
        # a launcher started several processes, and each believes that it is alone
        raise LaunchError(f"the launcher started {world} processes, but {got}: they would train apart. {fix}")
    if train.strategy != "fsdp2" and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise LaunchError(f"{asked}, but the launcher's configuration asks for FSDP, and {got}. {fix}")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise LaunchError(f"{asked}, but the launcher's configuration asks for DeepSpeed. {fix}")
    if accelerator.num_processes != train.processes or accelerator.distributed_type not in _STRATEGIES[train.strategy]:
        raise LaunchError(f"{asked}, but {got}. {fix}")


def check_same_recipe(recipe: TrainRecipe) -> None:
    """Compares the recipes of all processes: each machine has read its own. Raises LaunchError in every process."""
    told = recipe.model_dump(mode="json", include=_SAME)
    seed = told.pop("seed")
    own = {f"{section}.{name}": value for section, fields in told.items() for name, value in fields.items()}
    first, *others = gather_object([{"seed": seed, **own}])
    for number, other in enumerate(others, 1):
        for name, value in first.items():
            if other[name] != value:
                raise LaunchError(
                    f"process {number} has {name}={other[name]!r}, and process 0 has {value!r}: "
                    "start all machines with the same recipe and overrides"
                )


def launch_command(train: TrainConfig, device: str) -> str:
    """The command that starts what the recipe asks for, on this kind of device; of several machines, on each."""
    if train.strategy == "single":
        return "python -m agentfactory.train RECIPE (or change train.processes and train.strategy)"
    # --cpu would start a single process, and so would a MULTI_CPU configuration
    prefix = "ACCELERATE_USE_CPU=true " if device == "cpu" else ""
    file = ACCELERATE / f"{train.strategy}.yaml"
    file = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    # torchrun's count of the launchers that it has brought together
    machines = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    where = f"--num_machines {machines} --machine_rank R --main_process_ip ADDRESS " if machines > 1 else ""
    options = f"--config_file {file} {where}--num_processes {train.processes}"
    return f"{prefix}accelerate launch {options} -m agentfactory.train RECIPE"
