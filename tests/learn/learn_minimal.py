"""What `make learn` runs, too: examples/minimal_rl.py learns, on every seed of the variable SEEDS; in full by
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
    steps, at_least = (50, 0.85) if FULL else (15, 0.25)
    command = [sys.executable, SCRIPT, "--output", "run", "--seed", seed, "--steps", steps]
    done = subprocess.run([*map(str, command)], check=True, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    found = dict(re.findall(r"(\w+) ([\d.]+)(?:, |$)", done.stdout.splitlines()[-1]))
    assert float(found["sampled_before"]) <= 0.2
    assert float(found["sampled_after"]) >= at_least
    assert float(found["greedy_after"]) > float(found["greedy_before"]) + 0.3


def test_the_file_is_short() -> None:
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) <= 200
