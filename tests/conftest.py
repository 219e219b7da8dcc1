"""What many tests start from: the quickstart, trained for a few steps by the user's own command, and a server on it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from filelock import FileLock

REPOSITORY = Path(__file__).parent.parent
QUICKSTART = REPOSITORY / "recipes" / "quickstart"


@pytest.fixture(scope="session")
def quickstart_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder of a short quickstart: the model calls the tool, often well-formed, and has learned little else."""
    # the parallel processes of a test run share one
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    output = shared / "quickstart"
    with FileLock(shared / "quickstart.lock"):
        if not (output / "summary.json").exists():
            _train_quickstart(output)
    return output


def _train_quickstart(output: Path) -> None:
    command = [sys.executable, "-P", "-m", "agentfactory", "train", str(QUICKSTART / "quickstart.yaml")]
    overrides = [
        "sft.train.steps=120",
        "grpo.train.steps=3",
        "grpo.train.warmup_steps=0",
        "grpo.eval.data.limit=40",
        f"output={output}",
    ]
    subprocess.run([*command, *overrides], check=True)


@contextmanager
def embedded_server(model: Path, *flags: str) -> Iterator[str]:
    """The address of an embedded engine that serves `model` in float32."""
    command = [sys.executable, "-P", "-m", "rollout.embedded", str(model), "--port", "0", "--dtype", "float32", *flags]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            assert line.startswith("ready "), line
            yield line.split()[1]
        finally:
            server.terminate()


@pytest.fixture(scope="session")
def warm_start(quickstart_run: Path) -> Path:
    """The checkpoint of the short quickstart's first stage."""
    return next((quickstart_run / "sft" / "checkpoints").iterdir())


@pytest.fixture(scope="session")
def warm_server(warm_start: Path) -> Iterator[str]:
    """The address of an embedded engine on `warm_start`."""
    with embedded_server(warm_start, "--max-model-len", "1024", "--max-num-seqs", "64") as url:
        yield url
