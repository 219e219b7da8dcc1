"""`train.py`, as called by users and launchers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import QUICKSTART, REPOSITORY

pytestmark = [pytest.mark.processes, pytest.mark.extended]

TRAIN = str(REPOSITORY / "train.py")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "missing"),
        ([str(QUICKSTART / "quickstart.yaml")], "agentfactory train"),
        ([str(QUICKSTART / "grpo.yaml")], "agentfactory serve"),
    ],
)
def test_what_train_py_cannot_do_names_the_command_that_can(arguments: list[str], words: str, tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, TRAIN, *arguments], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 2
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def train(folder: Path, recipe: dict[str, Any], *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command, by default train, on a small recipe."""
    base = {"server": {"engine": "embedded", "max_model_len": 512}, "output": "run"}
    # JSON is YAML
    (folder / "recipe.yaml").write_text(json.dumps({**base, **recipe}))
    arguments = [sys.executable, "-m", "agentfactory", *(command or ("train", "recipe.yaml"))]
    return subprocess.run(arguments, capture_output=True, text=True, cwd=folder)


WORLD = """
from agentfactory import Environment

class World(Environment):
    def reset(self, question):
        if "even" in question:
            raise RuntimeError("the world is gone")
        self.turn = 0

    def reward(self):
        return 0.5
"""


def test_a_run_that_drops_most_of_its_chains_says_so_and_exits_with_4(tmp_path: Path, warm_start: Path) -> None:
    """Three of four tasks cannot be reset, and each is tried twice."""
    (tmp_path / "world.py").write_text(WORLD)
    rows = [{"question": f"{'odd' if index % 4 == 0 else 'even'} {index}"} for index in range(16)]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    recipe = {
        "model": {"path": str(warm_start), "dtype": "float32"},
        "data": {"path": "train.jsonl", "shuffle": False},
        "tools": ["world.py:World"],
        "rollout": {"group_size": 2, "max_tokens": 4, "max_total_tokens": 256},
        "train": {"steps": 3, "batch_size": 1},
    }
    result = train(tmp_path, recipe)
    assert result.returncode == 4, result.stderr
    told = "chains ended as tool_infrastructure, such as: "
    first, *_, last = [line for line in result.stdout.splitlines() if told in line]
    assert first.startswith("warning: 4 of ")
    assert last.startswith("  ")
    assert "run/logs/worker.log" in last
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    chains, dropped = summary["chains"], summary["dropped_chains"]
    assert chains > 2 * 3
    assert dropped > chains / 2
    assert summary["status"] == "completed"
    assert f"agentfactory: most chains were dropped: {dropped} of {chains} chains" in result.stderr
    lost = train(tmp_path, recipe, "rollout", "recipe.yaml", "output=o")
    assert lost.returncode == 4, lost.stderr
    assert "24 of 32 chains have no reward" in lost.stderr
