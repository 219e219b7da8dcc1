"""Part of `make learn`: the templates of `agentfactory new` learn in minutes, by the commands of their READMEs, the
task of docs/database.md and examples/minimal_rl.py, in full by `make learn-worlds`, on every seed of the variable
SEEDS."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.database_page import follow
from tests.learn.runs import FULL, SEEDS, assert_risen, read_json

WITHIN = {"text": 180.0, "vision": 300.0, "environment": 180.0}
"""Seconds, from the empty folder to the printed figures."""


@pytest.mark.parametrize("kind", WITHIN)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_new_task_learns_within_minutes(tmp_path: Path, seed: int, kind: str) -> None:
    started = time.monotonic()
    run(tmp_path, "new", "my_own", *([] if kind == "text" else [f"--{kind}"]))
    said = run(tmp_path, "train", "my_own/tiny/recipe.yaml", f"seed={seed}")
    seconds = time.monotonic() - started
    summary = read_json(tmp_path / "runs" / "my_own-tiny" / "summary.json")
    print(f"seed {seed}: {seconds:.0f} s;\n{said}")
    assert f"success {summary['success_before']:.2f} -> {summary['success_after']:.2f}" in said
    assert_risen(summary)
    assert summary["success_after"] >= 0.85
    assert seconds < WITHIN[kind]


def run(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "agentfactory", *arguments]
    return subprocess.run(command, check=True, cwd=folder, stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.parametrize("seed", SEEDS)
def test_the_database_task_learns(tmp_path: Path, seed: int) -> None:
    summary = read_json(follow(tmp_path, f"seed={seed}") / "runs" / "shop-tiny" / "summary.json")
    print(f"seed {seed}: {summary}")
    assert_risen(summary)
    assert summary["success_after"] >= 0.85


SCRIPT = REPOSITORY / "examples" / "minimal_rl.py"


@pytest.mark.parametrize("seed", SEEDS)
def test_the_loop_in_one_file_learns(tmp_path: Path, seed: int) -> None:
    steps, rise = (50, 0.6) if FULL else (15, 0.2)
    command = [sys.executable, SCRIPT, "--output", "run", "--seed", seed, "--steps", steps]
    done = subprocess.run([*map(str, command)], check=True, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    told = re.findall(r"(\w+) ([\d.]+)(?:, |$)", done.stdout.splitlines()[-1])
    found = {name: float(figure) for name, figure in told}
    assert found["sampled_after"] >= found["sampled_before"] + rise
    assert found["greedy_after"] > found["greedy_before"] + 0.3
    if FULL:
        assert found["sampled_after"] >= 0.85


def test_the_file_is_short() -> None:
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) <= 200
