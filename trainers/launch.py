"""The Accelerator of a run, checked: accelerate's launchers can set up something else than was asked, in silence."""

import os
from datetime import timedelta

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs

from trainers.config import TrainConfig


class LaunchError(Exception):
    """The launch is not what the recipe asks for; the message has the command that is."""


_DDP = {
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_XPU,
    DistributedType.MULTI_NPU,
}


def make_accelerator(train: TrainConfig) -> Accelerator:
    """The accelerator of this process. Raises LaunchError where what accelerate set up is not `train.processes`
    processes under `train.strategy`.

    Precision is the policy's own business, so a mixed precision from an accelerate config is not applied.
    """
    if train.strategy == "fsdp2":
        raise LaunchError("train.strategy: fsdp2 is not supported yet; use ddp, or single with train.processes=1")
    # all buffers are constants, and every process loads the same ones
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    # ranks wait in a collective call while rank 0 waits for rollouts, which may take longer than torch's 10 minutes;
    # a rank that dies is noticed by the launcher
    group = InitProcessGroupKwargs(timeout=timedelta(days=7))
    accelerator = Accelerator(mixed_precision="no", kwargs_handlers=[ddp, group])
    check_launch(train, accelerator)
    return accelerator


def check_launch(train: TrainConfig, accelerator: Accelerator) -> None:
    """Compares recipe, launcher environment and what accelerate set up; raises LaunchError with the fix."""
    asked = f"the recipe asks for train.processes={train.processes} and train.strategy={train.strategy}"
    got = f"accelerate set up {accelerator.num_processes} process(es) as {accelerator.distributed_type.value}"
    fix = f"start it with: {launch_command(train, accelerator.device.type)}"
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != accelerator.num_processes:
        # a launcher started several processes, and each believes that it is alone
        raise LaunchError(f"the launcher started {world} processes, but {got}: they would train apart. {fix}")
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise LaunchError(f"{asked}, but the launcher's configuration asks for FSDP, and {got}. {fix}")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise LaunchError(f"{asked}, but the launcher's configuration asks for DeepSpeed. {fix}")
    if accelerator.num_processes != train.processes:
        raise LaunchError(f"{asked}, but {got}. {fix}")
    right = _DDP if train.strategy == "ddp" else {DistributedType.NO}
    if accelerator.distributed_type not in right:
        raise LaunchError(f"{asked}, but {got}. {fix}")


def launch_command(train: TrainConfig, device: str) -> str:
    """The command that starts what the recipe asks for, on this kind of device."""
    if train.strategy == "single":
        return "python train.py RECIPE (or change train.processes and train.strategy)"
    # --cpu would start a single process, and so would a MULTI_CPU configuration
    prefix = "ACCELERATE_USE_CPU=true " if device == "cpu" else ""
    return f"{prefix}accelerate launch --multi_gpu --num_processes {train.processes} train.py RECIPE"
