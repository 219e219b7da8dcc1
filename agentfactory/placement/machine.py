"""This machine's devices and memory, which `python -m agentfactory.placement.machine` prints, and constants that no GPU
has confirmed yet (`make test-gpu` compares the memory table with peaks)."""

import json
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from agentfactory.base.processes import parent_watch
from agentfactory.base.user_code.import_path import is_installed

CUDA_CONTEXT = 512 * 2**20
"""Bytes of CUDA, torch's loaded kernels and cuBLAS's workspaces in one process. Differs between GPUs and versions."""
ASKING_CONTEXT = 400 * 2**20
"""Bytes of the CUDA context of a process that asks for free memory and computes nothing."""
NCCL_BUFFERS = 384 * 2**20
CUDA_GRAPHS = 512 * 2**20
"""Bytes of the captured steps of a server without adapters."""
SAMPLER_COPIES = 2
"""vLLM: 32-bit values that it keeps for each logit of all sequences: counts of tokens (PenaltiesState), and what top-k
and top-p discard (apply_top_k_top_p_triton)."""
MARGIN = 0.05
"""Share of a device that is left free: allocators keep memory in pieces, some of which are too small to reuse."""

IMAGE_SHARE = 0.5
"""Share of image tokens in a micro-batch, for a model that accepts images."""
IMAGE_PIXELS = 12_845_056
"""Area in pixels of the largest image of a model if the recipe sets none: that of the published Qwen2.5-VL."""
OWN_PIXELS = 2048 * 2048
"""Area of the largest image of a model whose processor may enlarge images: that of the published SmolVLM."""
LIBRARIES = 400 * 2**20
"""Bytes of Python and its libraries in a process on a CPU, without mapped files: .31e9 in an embedded server, .45e9 in
a trainer, with torch 2.13 and transformers 5.19."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that is visible to this process, in bytes."""

    total: int
    free: int


@dataclass(frozen=True)
class Machine:
    """The machine's resources, in bytes."""

    gpus: tuple[Gpu, ...]
    ram: int
    ram_free: int
    has_vllm: bool = False
    """True if this Python, which is also the trainer's, has vLLM, whose code the trainer needs for sending by NCCL."""
    peers: int = 1
    """Machines like this one that share the trainer's processes."""


def see_machine(peers: int = 1) -> Machine:
    memory = psutil.virtual_memory()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    seen = map(torch.cuda.mem_get_info, range(count))
    # the query creates a CUDA context, which ends with this process
    gpus = tuple(Gpu(total, min(total, free + ASKING_CONTEXT)) for free, total in seen)
    return Machine(gpus, memory.total, memory.available, is_installed("vllm"), peers)


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
