"""Create the inputs of off_policy.yaml: the quickstart's, and hunts that a trained agent has played."""

import subprocess
import sys
from pathlib import Path

import prepare as quickstart

TEACHER = "../../runs/quickstart/grpo/checkpoints/step-000050"
TASKS = 100


def prepare(folder: Path, seed: int) -> None:
    """Write the quickstart's inputs into `folder`, and the hunts of TEACHER, two for each of TASKS tasks, into
    rollout/. Raise SystemExit if they cannot be played."""
    here = Path(__file__).parent
    teacher = (here / TEACHER).resolve()
    if not teacher.is_dir():
        raise SystemExit(f"{teacher} does not exist; fix: train it by quickstart.yaml, or set TEACHER in {__file__}")
    quickstart.prepare(folder, seed)
    settings = [f"model.path={teacher}", f"data.limit={TASKS}", "rollout.group_size=2"]
    command = [sys.executable, "-m", "agentfactory", "rollout", here / "grpo.yaml", *settings]
    done = subprocess.run([*command, f"seed={seed}", f"output={folder}"])
    if done.returncode:
        raise SystemExit(done.returncode)
