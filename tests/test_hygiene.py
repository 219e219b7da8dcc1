"""After the death of any process of a run, no process of ours is left, the last line says why, and the run folder is
readable."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from agentfactory.rollout.groups.group_files import read_groups
from tests.conftest import QUICKSTART
from tests.waiting import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.extended]

GONE_WITHIN = 10.0
"""Seconds after which no process of a broken run may remain."""

MARKS = {
    "launcher": "-m agentfactory train ",
    "trainer": "-m agentfactory.train ",
    "worker": "agentfactory.rollout.workers.rollout_worker",
    "server": "agentfactory.rollout.inference.embedded",
    "tool server": "agentfactory.tools.serve",
}
"""Process -> a text that only its command line contains."""


@pytest.fixture
def run(tmp_path: Path, warm_start: Path, quickstart_run: Path) -> Iterator["subprocess.Popen[str]"]:
    """`agentfactory train` of the treasure hunt over a stdio tool server, into `run`: five processes."""
    hunt = ["-m", "agentfactory.tools.serve", str(QUICKSTART / "treasure_hunt.py:TreasureHunt")]
    recipe = {
        "model": {"path": str(warm_start), "dtype": "float32"},
        "data": {"path": str(quickstart_run / "prepared" / "train.jsonl")},
        "mcp_servers": {"hunt": {"command": "python", "args": hunt, "environment": {}}},
        "rollout": {"group_size": 4, "max_turns": 8, "max_tokens": 32, "max_total_tokens": 512},
        "server": {"engine": "embedded", "max_model_len": 512},
        "train": {"steps": 1000, "batch_size": 4, "learning_rate": 1e-4, "checkpoint_every": 2},
    }
    # JSON is YAML
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "agentfactory", "train", str(tmp_path / "recipe.yaml"), f"output={tmp_path}/run"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, **pipes, start_new_session=True, env=environment) as process:
        yield process
        if process.poll() is None:
            process.send_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("victim", "number", "last_words"),
    [
        ("launcher", signal.SIGTERM, "interrupted by SIGTERM"),
        pytest.param("worker", signal.SIGKILL, "the rollout worker was killed by signal 9", marks=pytest.mark.long),
        pytest.param("server", signal.SIGKILL, "the server was ended by signal 9", marks=pytest.mark.long),
    ],
)
def test_a_death_ends_the_whole_run(
    run: "subprocess.Popen[str]", tmp_path: Path, victim: str, number: signal.Signals, last_words: str
) -> None:
    output = tmp_path / "run"
    metrics = output / "metrics.jsonl"
    wait_for(lambda: run.poll() is not None or (metrics.exists() and '"loss"' in metrics.read_text()), 120)
    launcher = psutil.Process(run.pid)
    family = [launcher, *launcher.children(recursive=True)]
    found = {name: next(p for p in family if mark in " ".join(p.cmdline())) for name, mark in MARKS.items()}
    assert len({process.pid for process in found.values()}) == len(MARKS)
    found[victim].send_signal(number)
    said, _ = run.communicate(timeout=GONE_WITHIN)
    _, alive = psutil.wait_procs(family[1:], timeout=GONE_WITHIN)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    last = said.strip().splitlines()[-1]
    assert last_words in last
    assert str(output) in last
    assert json.loads((output / "summary.json").read_text())["status"] in ("interrupted", "failed")
    assert run.returncode == (130 if "interrupted" in last else 1)
    # the folder can be read
    assert any("loss" in json.loads(line) for line in metrics.read_text().splitlines())
    assert len(list(read_groups(output / "trajectories"))) >= 4
    assert (output / "recipe.yaml").exists()
