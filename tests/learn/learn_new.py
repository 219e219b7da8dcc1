"""Part of `make learn`: the templates of `agentfactory new` learn in minutes, by the commands of their READMEs, on
every seed of the variable SEEDS."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.learn.runs import SEEDS, assert_risen, read_json

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
