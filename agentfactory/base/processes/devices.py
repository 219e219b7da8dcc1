"""This machine's devices: whether it may have a GPU, and how fast it computes, for `model.dtype: auto` and the plan of
time. `python -m agentfactory.base.processes.devices` measures and prints it: the caller need not import torch."""

import functools
import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from agentfactory.base.errors import SettingError
from agentfactory.base.files.disk import write_whole
from agentfactory.base.processes import parent_watch
from agentfactory.base.run_notices import inform

if TYPE_CHECKING:
    import torch
    from torch import Tensor

logger = logging.getLogger(__name__)

ROWS = (8, 256)
"""Rows of the input of a timed linear layer: those of a decoding step, and of a prefill or an update."""
WIDTHS = (128, 1024)
"""Features of the input of a timed layer; its output has four times as many."""
WIDE = 512
REPETITIONS, COPIES = 5, (16, 2)
"""Timed layers for each of ROWS: those of a decoding step come from memory, not from the processor's caches."""
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


@dataclass(frozen=True)
class Speed:
    """The measured speed of this machine, in seconds."""

    layers: dict[str, dict[str, list[float]]]
    """Width -> dtype -> seconds of a linear layer per weight, for each of ROWS."""
    operation: float
    """Seconds to start an operation on small tensors."""
    gpu: bool | None = None
    """True if the GPU has products in bfloat16; None if there is no GPU."""

    def of(self, dtype: str, width: int) -> list[float]:
        """Return the seconds per weight, for each of ROWS, of layers of about this width."""
        return self.layers[str(WIDTHS[width >= WIDE])]["float32" if dtype == "float32" else "bfloat16"]

    def fastest(self, width: int = WIDTHS[1]) -> tuple[str, str]:
        """Return the dtype for a network of this width, and the reason."""
        if self.gpu is not None:
            return ("bfloat16", "the GPU computes in it") if self.gpu else ("float32", "the GPU would emulate bfloat16")
        pairs = zip(self.of("bfloat16", width), self.of("float32", width), strict=True)
        few, many = (half / whole for half, whole in pairs)
        found = f"{few:.2f} in a decoding step and {many:.2f} in a prefill or an update"
        reason = f"on this CPU, a layer in bfloat16 takes this many times as long as in float32: {found}"
        # a step that decodes half of its time, and prefills and updates in the other half
        return ("bfloat16" if (few + many) / 2 < FASTER else "float32"), reason


def fastest_dtype(model: str, tell: bool) -> str:
    """Return bfloat16 or float32 for a model, and show the reason once if `tell`. Raises SettingError without torch."""
    dtype, reason = measured().fastest(width_of(model))
    if tell:
        _tell(f"model.dtype: auto is {dtype}: {reason}")
    return dtype


def is_wide(model: str) -> bool:
    """Return whether layers of this model keep several threads busy."""
    return width_of(model) >= WIDE


def width_of(model: str) -> int:
    """Return the hidden size of a model in a folder, or that of small pretrained models where it is unknown."""
    with suppress(OSError, ValueError, TypeError, AttributeError, LookupError):
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        return int(config.get("hidden_size") or config["text_config"]["hidden_size"])
    return WIDTHS[1]


@functools.cache
def _tell(text: str) -> None:
    inform(logger, text)


@functools.cache
def measured() -> Speed:
    """Return the result of `measure`, kept in the user's cache folder. Raises SettingError if torch fails to import."""
    # without torch, a home or a folder to write to, nothing is kept
    with suppress(OSError, RuntimeError, ValueError, TypeError, ImportError):
        return TypeAdapter(Speed).validate_json(_kept().read_bytes())
    try:
        # threads that wait take no processor time
        answer = parent_watch.answer_of("agentfactory.base.processes.devices", env={"OMP_WAIT_POLICY": "passive"})
        speed = TypeAdapter(Speed).validate_python(answer)
    except RuntimeError as error:
        raise SettingError("model.dtype", f"auto: torch cannot be imported: {error}", "install it again") from None
    # a driver whose GPU torch does not find may soon be mended
    if may_have_gpu() == (speed.gpu is not None):
        with suppress(OSError, RuntimeError, ImportError):
            _kept().parent.mkdir(parents=True, exist_ok=True)
            write_whole(_kept(), json.dumps(asdict(speed)).encode())
    return speed


def _kept() -> Path:
    """Return the file of a result: for a processor by its name and instructions, for GPUs until the next start of the
    machine, for torch by its version, and by what limits them."""
    machine = Path("/proc/sys/kernel/random/boot_id" if may_have_gpu() else "/proc/cpuinfo")
    lines = machine.read_text(encoding="utf-8").splitlines() if machine.exists() else [platform.processor()]
    known = {line for line in lines if line.startswith(("model name", "flags", "Features")) or ":" not in line}
    limits = [*(os.environ.get(name, "") for name in _VARIABLES), ROWS, WIDTHS, "packed"]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentfactory"
    return folder / f"speed-{sha256(repr([sorted(known), version('torch'), limits]).encode()).hexdigest()[:16]}.json"


def onednn_packs(dtype: "torch.dtype") -> bool:
    """Return whether the embedded engine packs weights of this dtype for oneDNN on this CPU."""
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    if dtype == torch.bfloat16:
        instructions = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return capability == "AVX512" and instructions and torch.backends.mkldnn.is_available()
    return capability in ("AVX2", "AVX512") and torch.backends.mkldnn.is_available()


def measure() -> Speed:
    """Time linear layers in both dtypes, on a GPU if any: few rows as the engine does, and many as the trainer does."""
    import torch

    on_gpu = torch.cuda.is_available()
    torch.set_default_device("cuda" if on_gpu else "cpu")
    gpu = bool(torch.version.hip) or torch.cuda.get_device_capability() >= (8, 0) if on_gpu else None
    found: dict[str, dict[str, list[float]]] = {}
    for width in WIDTHS:
        rates = {torch.float32: [math.inf] * len(ROWS), torch.bfloat16: [math.inf] * len(ROWS)}
        layers = {
            (dtype, rows): [_layer(torch.ones(4 * width, width).to(dtype), rows) for _ in range(copies)]
            for dtype in rates
            for rows, copies in zip(ROWS, COPIES, strict=True)
        }
        # in turns, so that another process disturbs all alike
        for place, rows in REPETITIONS * [*enumerate(ROWS)]:
            for dtype in rates:
                x = torch.ones(rows, width).to(dtype)
                call = partial(_compute, layers[dtype, rows], x)
                seconds = _seconds(call, torch.get_num_threads())
                rates[dtype][place] = min(rates[dtype][place], seconds / COPIES[place] / (4 * width**2))
        found[str(width)] = {str(dtype).removeprefix("torch."): rate for dtype, rate in rates.items()}
    small = torch.ones(8, 8)
    operation = min(_seconds(lambda: [small.add(1.0) for _ in range(1000)]) / 1000 for _ in range(REPETITIONS))
    return Speed(found, operation, gpu)


def _compute(layers: "list[Callable[[Tensor], Tensor]]", x: "Tensor") -> None:
    for layer in layers:
        layer(x)


def _layer(weight: "Tensor", rows: int) -> "Callable[[Tensor], Tensor]":
    import torch

    if rows > ROWS[0] or weight.device.type != "cpu" or not onednn_packs(weight.dtype):
        return partial(torch.nn.functional.linear, weight=weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _seconds(call: Callable[[], object], threads: int = 1) -> float:
    """Return the seconds of a call that keeps all threads busy; on a CPU, of its processor time."""
    import torch

    on_gpu = torch.cuda.is_available()
    now = time.perf_counter if on_gpu else time.process_time
    started = now()
    call()
    if on_gpu:
        torch.cuda.synchronize()
    return (now() - started) / (1 if on_gpu else threads)


if __name__ == "__main__":
    parent_watch.follow_parent()
    print(json.dumps(asdict(measure())))
