"""Several sources of tasks in one run: real chains, metrics by source, and a resume."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentfactory.rollout.groups.group_files import read_groups
from agentfactory.rollout.trajectory import Group
from tests.conftest import QUICKSTART
from tests.project import Command

REWARDS = """\
from agentfactory import reward

@reward
def brief(prediction, start=None):
    assert start is None, "no other source's fields"
    words = len(prediction.split())
    return {"reward": 1.0 / (1 + words), "success": float(words < 4)}
"""
BATCH, STEPS = 6, 6


@pytest.fixture
def recipe(warm_start: Path, quickstart_run: Path, tmp_path: Path) -> Path:
    prepared = quickstart_run / "prepared"
    rows = [json.loads(line) for line in (prepared / "train.jsonl").read_text().splitlines()]
    (tmp_path / "brief.jsonl").write_text("".join(json.dumps({"question": row["question"]}) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(REWARDS)
    hunt: dict[str, Any] = {"name": "hunt", "path": str(prepared / "train.jsonl"), "weight": 2}
    brief: dict[str, Any] = {"name": "brief", "path": "brief.jsonl", "rewards": ["rewards.py:brief"]}
    brief |= {"system_prompt": "treasure", "max_turns": 1, "max_tokens": 8, "group_size": 3, "tools": []}
    held_out = [{"name": "hunt", "path": str(prepared / "heldout.jsonl"), "limit": 6}, {**brief, "limit": 4}]
    made: dict[str, Any] = {
        "model": {"path": str(warm_start), "dtype": "float32"},
        "tools": [str(QUICKSTART / "treasure_hunt.py:TreasureHunt")],
        "data": {"sources": [hunt, brief]},
        "eval": {"data": {"sources": held_out}, "greedy": False},
        "rollout": {"group_size": 4, "max_turns": 4, "max_tokens": 32, "max_total_tokens": 400},
        "server": {"engine": "embedded", "max_model_len": 512, "max_num_seqs": 32},
        "train": {"steps": STEPS, "batch_size": BATCH, "learning_rate": 1e-3, "checkpoint_every": 2},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(made))
    return path


def train(agentfactory: Command, recipe: Path, output: Path, *more: str) -> str:
    done = agentfactory("train", str(recipe), f"output={output}", *more, status=0)
    return done.stdout


def trained(output: Path) -> list[Group]:
    return sorted(read_groups(output / "trajectories" / "train.jsonl"), key=lambda group: group.id)


def drawn(output: Path) -> list[tuple[str, str, Any, int]]:
    return [(group.id, group.source, group.task, len(group.trajectories)) for group in trained(output)]


@pytest.mark.processes
@pytest.mark.extended
def test_sources_keep_apart_and_a_resumed_run_draws_alike(recipe: Path, tmp_path: Path, agentfactory: Command) -> None:
    whole = tmp_path / "whole"
    told = train(agentfactory, recipe, whole)
    assert "first look at the model on source hunt:" in told
    assert "first look at the model on source brief:" in told
    groups = trained(whole)
    assert Counter(group.source for group in groups).keys() == {"hunt", "brief"}
    for group in groups:
        is_hunt = group.source == "hunt"
        assert len(group.trajectories) == (4 if is_hunt else 3)
        assert ("start" in group.task) == is_hunt
        for chain in group.trajectories:
            system = [message for message in chain.messages if message["role"] == "system"]
            assert [message["content"] for message in system] == ([] if is_hunt else ["treasure"])
            assert ("tool/move/calls" in chain.metrics) == is_hunt, "its tools are its own"
            assert chain.turns <= (4 if is_hunt else 1)
            if not is_hunt:
                assert chain.metrics["tool_errors/unknown_tool"] == chain.metrics["tool_calls"]
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    for step, line in enumerate((line for line in lines if "loss" in line), 0):
        own = [group for group in groups[step * BATCH : (step + 1) * BATCH] if group.source == "hunt"]
        assert line["source/hunt/groups"] == len(own) / BATCH
        assert line["source/brief/groups"] == pytest.approx(1 - len(own) / BATCH)
        rewards = [chain.reward or 0.0 for group in own for chain in group.trajectories]
        assert line["source/hunt/reward"] == pytest.approx(sum(rewards) / len(rewards))
    for name in ("hunt", "brief"):
        values = [line[f"eval/sampled/source/{name}/success"] for line in lines if "eval/sampled/success" in line]
        assert len(values) == 2

    # as killed after step 2
    again = tmp_path / "again"
    shutil.copytree(whole, again)
    train(agentfactory, recipe, again, "--resume", str(again / "checkpoints" / "step-000002"))
    assert drawn(again) == drawn(whole)
