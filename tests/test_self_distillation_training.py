"""A whole run in which the policy teaches itself, by the user's command: without rewards, with a user's function."""

import json
from pathlib import Path

import pytest

from agentfactory.rollout.groups.group_files import read_groups
from tests.project import Command

pytestmark = [pytest.mark.extended, pytest.mark.processes]

RECIPE = """
data: {path: tasks.jsonl}
rollout: {group_size: 2, max_turns: 1, max_tokens: 8, max_total_tokens: 256}
server: {engine: embedded, max_model_len: 256, max_num_seqs: 8}
train: {algorithm: distill, steps: 2, batch_size: 2, learning_rate: 1e-3}
teacher: {context: "hints.py:hint", divergence: reverse_kl, top_k: 8}
"""
HINTS = """
def hint(trajectory, task):
    return f"The treasure is at {task['treasure']}." if trajectory.id.endswith(".1") else None
"""


def test_the_policy_teaches_itself(
    quickstart_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agentfactory: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"question": f"Where is it? {n}", "treasure": n}) for n in range(8)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(rows))
    (tmp_path / "hints.py").write_text(HINTS)
    (tmp_path / "recipe.yaml").write_text(
        RECIPE + f"model: {{path: {quickstart_run / 'prepared' / 'model'}, dtype: float32}}\n"
    )
    done = agentfactory("train", "recipe.yaml", "output=run")
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    taught = [step for step in steps if "teacher/kl" in step]
    assert len(taught) == 2
    assert all(step["teacher/graded"] == 0.5 and step["teacher/kl"] > 0 and step["grad_norm"] > 0 for step in taught)
    assert all(step["reward"] == 0.0 and step["seconds/teacher"] > 0 for step in taught)
    for group in read_groups(tmp_path / "run" / "trajectories"):
        prompts = [chain.rows[0].teacher_prompt for chain in group.trajectories]
        assert [prompt is None for prompt in prompts] == [True, False]
        assert len(prompts[1]) > group.trajectories[1].rows[0].mask.tolist().index(True)
