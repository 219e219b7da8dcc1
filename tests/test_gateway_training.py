"""Agents with a loop of their own through the whole command: what is trained is what was sampled, whatever they do to
their histories."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentfactory.rollout.group_files import read_groups
from tests.conftest import QUICKSTART

pytestmark = pytest.mark.long

FUNCTION = """
async def run(client, task, tools):
    messages = [{"role": "user", "content": task["question"]}]
    for turn in range(6):
        if turn == 3:
            # forgets its first move
            messages = messages[:1] + messages[3:]
        answer = await client.chat.completions.create(model="any", messages=messages, tools=tools.definitions)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return
        (call,) = message.tool_calls
        content = await tools.call(call.function.name, call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
"""

PROGRAM = """
import sys
from anthropic import Anthropic

client = Anthropic(max_retries=0)
messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(2):
    answer = client.messages.create(model="any", max_tokens=8, messages=messages)
    messages += [{"role": "assistant", "content": answer.content or "nothing"}, {"role": "user", "content": "Go on."}]
print(len(messages))
"""

REWARD = """
from agentfactory import reward


@reward
def length(prediction, trajectory):
    return float(prediction == "5") * sum(sum(row.mask) for row in trajectory.rows) / 16
"""


def train(folder: Path, recipe: dict[str, Any]) -> tuple[list[dict[str, Any]], list[Any]]:
    """The steps of a run, and its chains."""
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "output": str(folder / "run")}))
    subprocess.run([sys.executable, "-m", "agentfactory", "train", str(folder / "recipe.yaml")], check=True)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    chains = [t for group in read_groups(folder / "run" / "trajectories") for t in group.trajectories]
    assert all(len(chain.turn_spans()) == chain.turns for chain in chains)
    assert not any(chain.outcome.failed for chain in chains), [chain.error for chain in chains]
    return [line for line in lines if "loss" in line], chains


def recipe_of(warm_start: Path, quickstart_run: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(warm_start), "dtype": "float32"},
        "data": {"path": str(quickstart_run / "prepared" / "train.jsonl")},
        "rollout": {"group_size": 8, "max_tokens": 32, "max_total_tokens": 512},
        "train": {"algorithm": "grpo", "steps": 2, "batch_size": 2, "learning_rate": 1e-4},
        "server": {"engine": "embedded", "max_model_len": 512},
    }


def test_a_function_that_forgets(warm_start: Path, quickstart_run: Path, tmp_path: Path) -> None:
    (tmp_path / "my_agent.py").write_text(FUNCTION)
    recipe = recipe_of(warm_start, quickstart_run)
    recipe["tools"] = [str(QUICKSTART / "treasure_hunt.py:TreasureHunt")]
    recipe["rollout"]["agent"] = "my_agent.py:run"
    steps, chains = train(tmp_path, recipe)
    assert len(steps) == 2
    for step in steps:
        assert step["mismatch/max"] < 1e-4
        assert step["grad_norm"] > 0
        assert step["trajectory/gateway/unmatched_turns"] == 0
    forgetful = [chain for chain in chains if chain.turns > 3]
    assert forgetful
    for chain in chains:
        assert len(chain.rows) == 1 + (chain.turns > 3)
        # the turns that it kept come back without the first one
        assert chain.metrics["gateway/spliced_turns"] == 2 * (chain.turns > 3)


def test_a_program(warm_start: Path, quickstart_run: Path, tmp_path: Path) -> None:
    (tmp_path / "my_agent.py").write_text(PROGRAM)
    (tmp_path / "my_reward.py").write_text(REWARD)
    recipe = recipe_of(warm_start, quickstart_run)
    recipe["rewards"] = ["my_reward.py:length"]
    recipe["rollout"]["agent"] = {"command": ["python", "${here}/my_agent.py", "${task.question}"]}
    steps, chains = train(tmp_path, recipe)
    assert len(steps) == 2
    assert all(step["mismatch/max"] < 1e-4 for step in steps)
    assert {chain.result for chain in chains} == {"5"}
    assert all(len(chain.rows) == 1 or chain.metrics["gateway/unmatched_turns"] for chain in chains)
