"""Training runs of the studies: kept in a folder, so that a study can be interrupted, continued and extended."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def agentfactory(threads: int, log: Path, *arguments: str) -> None:
    """Run a command; raise RuntimeError if it fails, with the path of its log."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with log.open("w") as output:
        command = [sys.executable, "-m", "agentfactory", *arguments]
        status = subprocess.run(command, env=environment, stdout=output, stderr=output, check=False).returncode
    if status:
        raise RuntimeError(f"{' '.join(arguments)} failed with status {status}; see {log}")


def train_once(threads: int, output: Path, recipe: Path, *overrides: str) -> dict[str, Any]:
    """Train a recipe into the folder `output`, unless it has a completed run; return its summary. The log is beside the
    folder."""
    summary = output / "summary.json"
    if not summary.exists() or read_json(summary)["status"] != "completed":
        log = output.with_name(f"{output.name}.log")
        agentfactory(threads, log, "train", str(recipe), f"output={output}", "--overwrite", *overrides)
    return read_json(summary)


def read_steps(output: Path) -> list[dict[str, Any]]:
    """Return the metrics of each training step of a run."""
    logged = map(json.loads, (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [entry for entry in logged if "loss" in entry]


def only_checkpoint(output: Path) -> Path:
    """Return the only checkpoint of a run."""
    (checkpoint,) = (output / "checkpoints").iterdir()
    return checkpoint


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
