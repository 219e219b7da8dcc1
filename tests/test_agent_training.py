"""A custom agent, a forced prefix and shortened contexts through the whole command: trained tokens are exactly the
sampled ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from agentfactory.rollout.groups.group_files import read_groups
from tests.conftest import QUICKSTART

pytestmark = pytest.mark.long

AGENT = """
from agentfactory import Agent


class TwoPieces(Agent):
    async def generate(self, turn):
        first = await turn.sample(max_tokens=6)
        return await turn.sample(after=first) if first.cut else first
"""


def test_server_and_trainer_agree(warm_start: Path, quickstart_run: Path, tmp_path: Path) -> None:
    (tmp_path / "my_agent.py").write_text(AGENT)
    recipe = {
        "output": str(tmp_path / "run"),
        "model": {"path": str(warm_start), "dtype": "float32"},
        "data": {"path": str(quickstart_run / "prepared" / "train.jsonl")},
        "tools": [str(QUICKSTART / "treasure_hunt.py:TreasureHunt")],
        "rollout": {
            "group_size": 8,
            "max_tokens": 32,
            "max_total_tokens": 168,
            "agent": "my_agent.py:TwoPieces",
            "assistant_prefix": "<tool_call>\n",
            "context": {"policy": "summarize", "keep_turns": 1},
        },
        "train": {"algorithm": "grpo", "steps": 2, "batch_size": 2, "learning_rate": 1e-4},
        "server": {"engine": "embedded", "max_model_len": 512},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command = [sys.executable, "-m", "agentfactory", "train", str(tmp_path / "recipe.yaml")]
    subprocess.run(command, check=True)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert len(steps) == 2
    for step in steps:
        assert step["mismatch/max"] < 1e-4
        assert step["grad_norm"] > 0
        assert step["trajectory/rows"] > 1
        assert step["environments/TreasureHunt/made"] >= 1
    chains = [t for group in read_groups(tmp_path / "run" / "trajectories") for t in group.trajectories]
    assert all(len(t.turn_spans()) == t.turns for t in chains)
    assert not any(t.outcome.failed for t in chains)
    assert any("Summarize what was done" in str(t.messages) for t in chains)
