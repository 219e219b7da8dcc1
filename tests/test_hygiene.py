"""After the death of any process of a run, no process of ours is left, the last line says why, and the run folder is
readable."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from agentfactory.rollout.groups.group_files import read_groups
from tests.conftest import QUICKSTART

pytestmark = [pytest.mark.processes, pytest.mark.extended]

GONE_WITHIN = 10.0
"""Seconds after which no process of a broken run may remain."""

MARKS = {
    "trainer": "-m agentfactory.train ",
    "worker": "agentfactory.rollout.workers.rollout_worker",
    "server": "agentfactory.rollout.inference.embedded",
    "tool server": "agentfactory.tools.serve",
}
"""Process -> a text that only its command line contains."""


class Run:
    def __init__(self, process: subprocess.Popen[str], output: Path):
        self.process = process
        self.output = output
        self.launcher = psutil.Process(process.pid)

    def wait_for_steps(self, number: int) -> None:
        metrics = self.output / "metrics.jsonl"
        while not metrics.exists() or sum('"loss"' in line for line in metrics.open()) < number:
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.1)
        self.processes = [self.launcher, *self.launcher.children(recursive=True)]

    def find(self, name: str) -> psutil.Process:
        if name == "launcher":
            return self.launcher
        return next(p for p in self.processes if MARKS[name] in " ".join(p.cmdline()))

    def left_after(self, seconds: float) -> list[str]:
        """Command lines of the processes still running after `seconds`."""
        deadline = time.monotonic() + seconds
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        _, alive = psutil.wait_procs(self.processes[1:], timeout=max(0.0, deadline - time.monotonic()))
        alive += [self.launcher] if self.process.poll() is None else []
        return [" ".join(p.cmdline()) for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@contextmanager
def start_run(folder: Path, warm_start: Path, prepared: Path) -> Iterator[Run]:
    """Train the treasure hunt over a stdio tool server: five processes."""
    hunt = {
        "command": "python",
        "args": ["-m", "agentfactory.tools.serve", str(QUICKSTART / "treasure_hunt.py:TreasureHunt")],
    }
    recipe = {
        "model": {"path": str(warm_start), "dtype": "float32"},
        "data": {"path": str(prepared / "train.jsonl")},
        "mcp_servers": {"hunt": {**hunt, "environment": {}}},
        "rollout": {"group_size": 4, "max_turns": 8, "max_tokens": 32, "max_total_tokens": 512},
        "server": {"engine": "embedded", "max_model_len": 512},
        "train": {"steps": 1000, "batch_size": 4, "learning_rate": 1e-4, "checkpoint_every": 2},
    }
    # JSON is YAML
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    output = folder / "run"
    command = [sys.executable, "-m", "agentfactory", "train", str(folder / "recipe.yaml"), f"output={output}"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        run = Run(process, output)
        try:
            yield run
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)


@pytest.fixture
def prepared(quickstart_run: Path) -> Path:
    return quickstart_run / "prepared"


@pytest.mark.parametrize(
    ("victim", "number", "last_words"),
    [
        ("launcher", signal.SIGTERM, "interrupted by SIGTERM"),
        pytest.param("worker", signal.SIGKILL, "the rollout worker was killed by signal 9", marks=pytest.mark.long),
        pytest.param("server", signal.SIGKILL, "the server was ended by signal 9", marks=pytest.mark.long),
    ],
)
def test_a_death_ends_the_whole_run(
    tmp_path: Path, warm_start: Path, prepared: Path, victim: str, number: signal.Signals, last_words: str
) -> None:
    with start_run(tmp_path, warm_start, prepared) as run:
        run.wait_for_steps(1)
        names = {name: run.find(name).pid for name in MARKS}
        assert len(set(names.values())) == len(MARKS)
        run.find(victim).send_signal(number)
        assert run.left_after(GONE_WITHIN) == []
        said, _ = run.process.communicate()
    last = said.strip().splitlines()[-1]
    assert last_words in last
    assert str(run.output) in last
    assert json.loads((run.output / "summary.json").read_text())["status"] in ("interrupted", "failed")
    assert run.process.returncode == (130 if "interrupted" in last else 1)
    check_folder(run.output)


def check_folder(output: Path) -> None:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert any("loss" in line for line in lines)
    assert len(list(read_groups(output / "trajectories"))) >= 4
    assert (output / "recipe.yaml").exists()
