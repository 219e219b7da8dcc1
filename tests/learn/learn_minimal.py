"""Part of `make learn`: examples/minimal_rl.py learns, on every seed of the variable SEEDS; in full by
`make learn-worlds`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.learn.runs import FULL, SEEDS

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
