"""This machine's devices: whether it may have a GPU, and the precision in which it computes fastest, for
`model.dtype: auto`. `python -m agentfactory.base.processes.devices` measures and prints it, so that the caller need not
import torch."""

import functools
import json
import logging
import math
import os
import platform
import time
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from agentfactory.base.errors import SettingError
from agentfactory.base.files.disk import write_whole
from agentfactory.base.processes import parent_watch
from agentfactory.base.run_notices import inform

logger = logging.getLogger(__name__)

ROWS = {"a decoding step": 8, "a prefill": 256}
"""Rows of the input of a linear layer from WIDTH to HEIGHT features."""
WIDTH, HEIGHT, REPETITIONS = 1024, 4096, 5
FASTER = 0.8
"""Share of float32's time below which bfloat16 pays for its rounding."""
_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
)
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Files of GPU drivers that torch supports: NVIDIA's, AMD's, and NVIDIA's under WSL."""


def may_have_gpu() -> bool:
    """Return whether torch could find a GPU here. Only then is torch queried, which takes seconds to import."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(map(os.path.exists, GPU_DRIVERS))


def fastest_dtype(tell: bool) -> str:
    """Return bfloat16 or float32, and show the reason once if `tell`. Raises SettingError without torch."""
    dtype, reason = measured()
    if tell:
        _tell(f"model.dtype: auto is {dtype}: {reason}")
    return dtype


@functools.cache
def _tell(text: str) -> None:
    inform(logger, text)


@functools.cache
def measured() -> tuple[str, str]:
    """Return the result of `measure`, which stays in the user's cache folder. Raises SettingError if torch cannot be
    imported."""
    # without torch, a home or a folder to write to, nothing is kept
    with suppress(OSError, RuntimeError, ValueError, TypeError, ImportError):
        dtype, reason = json.loads(_kept().read_text(encoding="utf-8"))
        if dtype in ("float32", "bfloat16"):
            return dtype, str(reason)
    try:
        dtype, reason = parent_watch.answer_of("agentfactory.base.processes.devices")
    except RuntimeError as error:
        raise SettingError("model.dtype", f"auto: torch cannot be imported: {error}", "install it again") from None
    # a driver whose GPU torch does not find may soon be mended
    if may_have_gpu() == ("GPU" in reason):
        with suppress(OSError, RuntimeError, ImportError):
            _kept().parent.mkdir(parents=True, exist_ok=True)
            write_whole(_kept(), json.dumps([dtype, reason]).encode())
    return dtype, reason


def _kept() -> Path:
    """Return the file of a result: for a processor by its name and instructions, for GPUs until the next start of the
    machine, for torch by its version, and by what limits them."""
    machine = Path("/proc/sys/kernel/random/boot_id" if may_have_gpu() else "/proc/cpuinfo")
    lines = machine.read_text(encoding="utf-8").splitlines() if machine.exists() else [platform.processor()]
    known = {line for line in lines if line.startswith(("model name", "flags", "Features")) or ":" not in line}
    limits = [os.environ.get(name, "") for name in _VARIABLES]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentfactory"
    return folder / f"dtype-{sha256(repr([sorted(known), version('torch'), limits]).encode()).hexdigest()[:16]}.json"


def measure() -> tuple[str, str]:
    """Return the dtype and the reason. On a CPU, a prefill and a decoding step count the same."""
    import torch

    if torch.cuda.is_available():
        native = bool(torch.version.hip) or torch.cuda.get_device_capability() >= (8, 0)
        return ("bfloat16", "the GPU computes in it") if native else ("float32", "the GPU would emulate bfloat16")
    shares = {}
    for name, rows in ROWS.items():
        seconds = dict.fromkeys((torch.float32, torch.bfloat16), math.inf)
        layers = {dtype: (torch.ones(rows, WIDTH).to(dtype), torch.ones(HEIGHT, WIDTH).to(dtype)) for dtype in seconds}
        # in turns, so that another process disturbs both
        for dtype in REPETITIONS * tuple(seconds):
            started = time.perf_counter()
            torch.nn.functional.linear(*layers[dtype])
            seconds[dtype] = min(seconds[dtype], time.perf_counter() - started)
        shares[name] = seconds[torch.bfloat16] / seconds[torch.float32]
    found = " and ".join(f"{share:.2f} in {name}" for name, share in shares.items())
    reason = f"on this CPU, a layer in bfloat16 takes this many times as long as in float32: {found}"
    return ("bfloat16" if math.prod(shares.values()) < FASTER**2 else "float32"), reason


if __name__ == "__main__":
    parent_watch.follow_parent()
    print(json.dumps(measure()))
