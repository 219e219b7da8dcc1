"""Run in three processes by test_nccl.py: sharded weights are sent to servers while they are gathered.

Arguments: a recipe as JSON, the address of a receiver (gloo_receiver.py) and of an embedded engine, a folder, and "yes"
if the policy is in bfloat16."""

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from agentfactory.trainers import update
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.processes.accelerator import make_accelerator
from agentfactory.trainers.sync import content_proof as content
from agentfactory.trainers.sync import file_sync
from agentfactory.trainers.sync.file_sync import FileSync
from agentfactory.trainers.sync.nccl_sync import NcclSync
from agentfactory.trainers.sync.server_control import ServerControl
from agentfactory.trainers.sync.weight_sync import WeightSync
from agentfactory.trainers.update.learner import Learner
from tests.trainers.launched_loading import megabytes
from tests.trainers.test_nccl import GlooGroup

PART = 2**22
M_MMAP_THRESHOLD = -3


def main() -> None:
    recipe = TrainRecipe.model_validate(json.loads(sys.argv[1]))
    receiver, engine, folder = sys.argv[2], sys.argv[3], Path(sys.argv[4])
    file_sync._FILE_BYTES = content._MOST_PENDING = PART
    accelerator = make_accelerator(recipe)
    update.learner.KEEPS_MEMORY = 0
    learner = Learner(recipe, accelerator)
    # freed weights' memory returns to the system, in every thread
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16)
    main_process = accelerator.is_main_process
    backends: dict[str, WeightSync] = {}
    if main_process:
        one = [ServerControl(receiver, timeout_seconds=60)]
        backends["nccl"] = NcclSync(one, "run-", open_group=GlooGroup, buffer_bytes=PART)
        backends["file"] = FileSync([ServerControl(engine, timeout_seconds=60)], folder / "sync", "run-")
    found: dict[str, Any] = {}
    for version in range(3):
        with torch.no_grad():
            for weight in learner.policy.parameters():
                weight.add_(0.01 * version)
        for name in ("nccl", "file"):
            state = learner.policy.gather()
            if main_process:
                before = megabytes("VmRSS")
                Path("/proc/self/clear_refs").write_text("5")
                report = backends[name].push(version, learner.policy, state)
                found[f"{name} {version}"] = {"peak": megabytes("VmHWM") - before, "bytes": report.bytes}
            state.finish()
    # rank 0 stops reading in the middle, and the ranks still stay in step
    state = learner.policy.gather()
    if main_process:
        reading = state.stream()
        found["begun"] = [next(reading)[0], next(reading)[0]]
    started = time.monotonic()
    state.finish()
    accelerator.wait_for_everyone()
    found["finished"] = time.monotonic() - started
    whole = learner.policy.gather()
    assert bool(len(whole)) == main_process
    if main_process:
        backends["file"].close()
        save_file(dict(whole), folder / "whole.safetensors")
        (folder / "found.json").write_text(json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    main()
