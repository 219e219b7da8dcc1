"""Suites outside `make test` can at least be collected, so a renamed import fails here, not hours later."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended

TESTS = Path(__file__).parent
SUITES = {"vllm": "vllm_*.py", "gpu": "gpu_*.py", "wheel": "wheel_*.py", "learn": "learn_*.py"}


@pytest.mark.long
@pytest.mark.processes
def test_every_suite_can_be_collected() -> None:
    files = [str(file) for folder, pattern in SUITES.items() for file in sorted((TESTS / folder).glob(pattern))]
    assert len(files) > len(SUITES)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", "-m", "", *files]
    collected = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True)
    assert collected.returncode == 0, collected.stdout[-3000:]
