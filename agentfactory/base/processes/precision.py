"""The precision in which this machine computes fastest, for `model.dtype: auto`. `python -m
agentfactory.base.processes.precision` measures and prints it, so that the caller need not import torch."""

import functools
import json
import logging
import time

from agentfactory.base.processes import parent_watch
from agentfactory.base.run_notices import inform

logger = logging.getLogger(__name__)

ROWS, WIDTH, HEIGHT = 16, 1024, 4096
"""A linear layer with the rows of a decoding step. The best of REPETITIONS products takes less than a millisecond."""
REPETITIONS = 20
FASTER = 0.8
"""Share of float32's time below which bfloat16 pays for its rounding."""


@functools.cache
def fastest_dtype() -> str:
    """Return bfloat16 or float32, and show the reason once. Raises RuntimeError if torch cannot be imported."""
    try:
        dtype, reason = parent_watch.answer_of("agentfactory.base.processes.precision")
    except RuntimeError as error:
        raise RuntimeError(f"model.dtype: auto: {error}") from None
    inform(logger, f"model.dtype: auto is {dtype}: {reason}")
    return str(dtype)


def measure() -> tuple[str, str]:
    """Return the dtype and the reason."""
    import torch

    if torch.cuda.is_available():
        native = bool(torch.version.hip) or torch.cuda.get_device_capability() >= (8, 0)
        return ("bfloat16", "the GPU computes in it") if native else ("float32", "the GPU would emulate bfloat16")
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.ones(ROWS, WIDTH, dtype=dtype), torch.ones(HEIGHT, WIDTH, dtype=dtype)
        times = []
        for _ in range(REPETITIONS):
            started = time.perf_counter()
            torch.nn.functional.linear(x, weight)
            times.append(time.perf_counter() - started)
        seconds[dtype] = min(times)
    share = seconds[torch.bfloat16] / seconds[torch.float32]
    reason = f"on this CPU, a layer takes {share:.2f} of float32's time in bfloat16"
    return ("bfloat16" if share < FASTER else "float32"), reason


if __name__ == "__main__":
    parent_watch.follow_parent()
    print(json.dumps(measure()))
