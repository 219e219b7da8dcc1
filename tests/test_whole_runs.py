"""Whole runs by the user's command: alarms of one made for them (a model that never calls its tools, equal rewards,
slow tool processes), and one in which the policy teaches itself, without rewards."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from agentfactory.rollout.groups.group_files import read_groups
from tests.conftest import REPOSITORY
from tests.project import Command

pytestmark = [pytest.mark.extended, pytest.mark.processes]


@pytest.fixture
def recipe(project: Path, warm_start: Path) -> str:
    """The quickstart's model on another task, whose turns are cut before a call; each chain starts a slow process."""
    shutil.copy(REPOSITORY / "tests" / "tools" / "notebook.py", project / "notebook.py")
    (project / "slow.py").write_text(
        "import runpy, time\ntime.sleep(0.5)\nrunpy.run_path('notebook.py', run_name='__main__')\n"
    )
    recipe = {
        "model": {"path": str(warm_start), "dtype": "float32"},
        "data": {"path": "tasks.jsonl"},
        "rewards": ["my_tools.py:exact"],
        "mcp_servers": {"pad": {"command": "python", "args": ["-S", "slow.py"], "deny": ["burn"], "pool": {"warm": 0}}},
        "rollout": {"group_size": 4, "max_turns": 1, "max_tokens": 2, "max_total_tokens": 512, "concurrency": 8},
        "server": {"engine": "embedded", "max_model_len": 512},
        "train": {"steps": 9, "batch_size": 2, "learning_rate": 1e-5},
    }
    (project / "alarming.yaml").write_text(yaml.safe_dump(recipe))
    return "alarming.yaml"


def test_a_run_that_cannot_learn_says_why(recipe: str, agentfactory: Command) -> None:
    result = agentfactory("train", recipe, "output=run", status=0)
    said = result.stdout
    # the look of the first batch, because there are no held-out tasks
    assert "first look at the model:\n  8 chains of 1 task\n  calls: 0 of 8 chains called a tool" in said
    assert "\n  rewards: all 0; they differ in 0 of 2 groups: none would teach\n" in said
    assert said.count("first look at the model:") == 1
    shown, at_end = said.split("warnings of this run:")
    for start, in_the_end in (
        ("first look: no chain of 8 in 2 groups called a tool, though ", ""),
        # the first look does not silence an alarm
        ("no chain of 64 in 16 groups called a tool, though ", ""),
        ("first look: rollout.max_tokens=2 cut a turn of 8 of 8 chains; fix: rollout.max_tokens=4", ""),
        ("first look: the rewards of all 8 chains in 2 groups are 0: such groups teach nothing; fix: easier rows", ""),
        ("step 5: nothing was learned in 5 steps: ", "1.0 of 1.0 turns a chain are cut at rollout.max_tokens; see"),
        ("chains spend ", "of their time waiting for a process of tool server pad ("),
    ):
        assert shown.count(f"warning: {start}") == 1, start
        assert (in_the_end or start) in at_end
    assert "fix: mcp_servers.pad.isolation: shared if it keeps no state" in at_end


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
