"""`python -m agentfactory.doctor.devices`: print the devices that torch finds as JSON, in a process of its own."""

import json
from typing import Any

import torch

from agentfactory.base.processes import parent_watch
from agentfactory.base.user_code.import_path import is_installed
from agentfactory.placement.machine import see_machine


def see_devices() -> dict[str, Any]:
    """Return torch's platform, the GPUs with free bytes and bfloat16 support, and errors of CUDA and torchvision."""
    version = torch.version
    build = f"cuda {version.cuda}" if version.cuda else f"rocm {version.hip}" if version.hip else "cpu"
    seen: dict[str, Any] = {"build": build, "gpus": [], "error": "", "torchvision": ""}
    if is_installed("torchvision"):
        try:
            import torchvision  # noqa: F401
        except Exception as error:  # boundary: built for another torch, it can raise anything
            seen["torchvision"] = f"{type(error).__name__}: {error}"
    if build == "cpu":
        return seen
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # no driver, or one that is too old
        seen["error"] = str(error)
        return seen
    for index, gpu in enumerate(see_machine().gpus):
        about = torch.cuda.get_device_properties(index)
        # bfloat16 is native on Ampere and later; earlier GPUs emulate it
        bf16 = bool(version.hip) or about.major >= 8
        seen["gpus"].append({"name": about.name, "total": gpu.total, "free": gpu.free, "bf16": bf16})
    return seen


if __name__ == "__main__":
    parent_watch.follow_parent()
    print(json.dumps(see_devices()))
