"""python -m benchmarks.gpu_parts PART OUTPUT: one part of gpu_day.py in this process; see there."""

import sys
from importlib import import_module
from pathlib import Path

from benchmarks.gpu_parts.findings import Findings, NotHereError

PARTS: dict[str, tuple[str, ...]] = {
    "race": ("probes", "race"),
    "leak": ("probes", "leak"),
    "sdpa": ("training", "sdpa"),
    "update-0.5b": ("training", "update", "0.5b", "bfloat16"),
    "fp8-0.5b": ("training", "update", "0.5b", "fp8"),
    "update-1.5b": ("training", "update", "1.5b", "bfloat16"),
    "fp8-1.5b": ("training", "update", "1.5b", "fp8"),
    "vllm-imports": ("serving", "imports"),
    "vllm-full": ("serving", "full"),
    "vllm-adapters": ("serving", "adapters"),
    "vllm-time-share": ("serving", "time_share"),
    "curve": ("training", "curve"),
}
"""Part -> its module and function, and the function's arguments before the findings."""


def main() -> None:
    """Run the part."""
    name, output = sys.argv[1], Path(sys.argv[2])
    module, function, *arguments = PARTS[name]
    findings = Findings(name, output, output / "data")
    findings.write(finished=False)
    try:
        getattr(import_module(f"benchmarks.gpu_parts.{module}"), function)(*arguments, findings)
    except NotHereError as error:
        sys.exit(str(error))
    findings.write(finished=True)


if __name__ == "__main__":
    main()
