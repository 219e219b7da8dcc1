"""A run of the installed TRL, whose files may have changed since those in data/trl."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from agentfactory.audit.record import METRICS, REWARDS
from agentfactory.base.findings import Severity
from tests.audit.foreign.reading import audited, groups_of, record_of

pytestmark = [
    pytest.mark.processes,
    pytest.mark.extended,
    pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed"),
]


ROOT = Path(__file__).parents[3]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The output_dir of a run."""
    script = Path(__file__).with_name("trl_training.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, script, tmp_path, "3"], check=True, env=environment, capture_output=True, timeout=240
    )
    return tmp_path


async def test_a_run_of_trl(run: Path) -> None:
    groups = groups_of(run)
    assert [(seen.step, len(seen.group.trajectories)) for seen in groups] == [(step, 4) for step in (1, 1, 2, 2, 3, 3)]
    for seen in groups:
        for chain in seen.group.trajectories:
            digits, short = chain.metrics["reward/digits"], chain.metrics["reward/short"]
            assert chain.reward == pytest.approx(digits + 0.5 * short)
            assert [message["role"] for message in chain.messages] == ["user", "assistant"]
    record = record_of(run)
    assert not {METRICS, REWARDS} & record.lacks.keys()
    # the logged rewards are those of the saved completions
    notes = [finding.text for finding in record.problems]
    assert notes == ["the logged means tell the weights of the rewards: 1 of digits, 0.5 of short"]
    assert not (await audited(run)).of(Severity.WRONG)
