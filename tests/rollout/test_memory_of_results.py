"""A worker's memory use with a tool that returns 50 MB in each of eight chains, from the call to the row's tokens."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripted_chains import NOTES, call

ROOT = Path(__file__).parents[2]
SOURCE = NOTES.replace('f"noted {text}"', "text * 10_000_000")
WORKER = """
import asyncio, json, sys
from pathlib import Path
from agentfactory.rollout.chains.sampling import Sampling
from tests.scripted_chains import scripted_chains

SOURCE, CALL, LIMITS = sys.argv[1:]

async def main():
    turns = [CALL] * 8 + ["done"] * 8
    async with scripted_chains(Path.cwd(), turns, source=SOURCE, limits=json.loads(LIMITS)) as scripted:
        runner, sampling = scripted.runner, Sampling("policy", 1.0, seed="s")
        chains = (runner.run(f"c{n}", {"question": "go"}, sampling) for n in range(8))
        found = await asyncio.gather(*chains)
    # not ru_maxrss: that of a child begins at its parent's
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    print(json.dumps([peak, [chain.metrics["limits/result_bytes"] for chain in found]]))

asyncio.run(main())
"""


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("limits", [{}, {"result_tokens": 100}])
def test_eight_chains_stay_below_one_gigabyte(limits: dict[str, int], tmp_path: Path) -> None:
    command = [sys.executable, "-c", WORKER, SOURCE, call("note", text="word "), json.dumps(limits)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    peak, cuts = json.loads(done.stdout.splitlines()[-1])
    assert cuts == [1.0] * 8
    assert peak < 1_000_000, "KiB"
