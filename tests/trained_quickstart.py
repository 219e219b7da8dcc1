"""The quickstart after a few steps, trained once for all processes of a test run.

`python -m tests.trained_quickstart FOLDER` trains it ahead of the tests that need it."""

import subprocess
import sys
from pathlib import Path

from filelock import FileLock

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart" / "quickstart.yaml"
OVERRIDES = ["sft.train.steps=120", "grpo.train.steps=2", "grpo.train.warmup_steps=0", "grpo.eval.data.limit=10"]


def train_once(shared: Path) -> Path:
    """Return the run folder in `shared`. Train it unless it is already trained; wait for a process that trains it."""
    output = shared / "quickstart"
    with FileLock(shared / "quickstart.lock"):
        if not (output / "summary.json").exists():
            # a process whose tests ended may have stopped its training
            command = [sys.executable, "-m", "agentfactory", "train", str(RECIPE), *OVERRIDES, f"output={output}"]
            subprocess.run([*command, "--overwrite"], check=True)
    return output


if __name__ == "__main__":
    train_once(Path(sys.argv[1]))
