"""Custom agents, and agents with their own loop, through the whole command: trained tokens are exactly the sampled
ones, whatever the agents do to prefixes, contexts and histories."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentfactory.rollout.groups.group_files import read_groups
from agentfactory.rollout.trajectory import Outcome
from tests.conftest import QUICKSTART

pytestmark = pytest.mark.long

HUNT = str(QUICKSTART / "treasure_hunt.py:TreasureHunt")

TWO_PIECES = """
from agentfactory import Agent


class TwoPieces(Agent):
    async def generate(self, turn):
        first = await turn.sample(max_tokens=6)
        return await turn.sample(after=first) if first.cut else first
"""


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

ELSEWHERE = """
import json, os, sys
import httpx
from openai import APIStatusError, OpenAI

sys.path.insert(0, sys.argv[2])
from treasure_hunt import TreasureHunt

tasks = httpx.Client(base_url=sys.argv[1], timeout=60)
token = {"Authorization": "Bearer " + os.environ["AGENTFACTORY_TOKEN"]}
held = None


def report(taken, **said):
    return tasks.post("/reward", headers={"Authorization": "Bearer " + taken["key"]}, json=said).status_code


def hunt(taken):
    client = OpenAI(base_url=taken["url"], api_key=taken["key"], max_retries=0)
    game = TreasureHunt()
    game.reset(**taken["task"])
    messages = [{"role": "user", "content": taken["task"]["question"]}]
    while True:
        try:
            answer = client.chat.completions.create(
                model="any", messages=messages, tools=[TreasureHunt.move.spec.to_openai()]
            )
        except APIStatusError:  # no more turns
            return game.reward()
        message = answer.choices[0].message
        if taken is held or not message.tool_calls:
            return game.reward()
        (call,) = message.tool_calls
        seen = game.move(**json.loads(call.function.arguments))
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": seen}]


played = 0
while True:
    try:
        answer = tasks.post("/tasks", headers=token)
    except httpx.TransportError:
        if played:
            break  # the run is over
        continue
    if answer.status_code == 204:
        continue
    taken = answer.json()
    if held is None:
        held = taken
        hunt(taken)  # one turn, and it is never reported in time
        continue
    assert report(taken, reward=hunt(taken)) == 200
    played += 1
"""


def train(
    folder: Path, recipe: dict[str, Any], expected: frozenset[Outcome] | set[Outcome] = frozenset()
) -> tuple[list[dict[str, Any]], list[Any]]:
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "output": str(folder / "run")}))
    subprocess.run([sys.executable, "-m", "agentfactory", "train", str(folder / "recipe.yaml")], check=True)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    chains = [t for group in read_groups(folder / "run" / "trajectories") for t in group.trajectories]
    assert all(len(chain.turn_spans()) == chain.turns for chain in chains)
    failed = [chain for chain in chains if chain.outcome.failed and chain.outcome not in expected]
    assert not failed, [chain.error for chain in failed]
    return [line for line in lines if "loss" in line], chains


def recipe_of(warm_start: Path, quickstart_run: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(warm_start), "dtype": "float32"},
        "data": {"path": str(quickstart_run / "prepared" / "train.jsonl")},
        "rollout": {"group_size": 8, "max_tokens": 32, "max_total_tokens": 512},
        "train": {"algorithm": "grpo", "steps": 2, "batch_size": 2, "learning_rate": 1e-4},
        "server": {"engine": "embedded", "max_model_len": 512},
    }


def check_two(steps: list[dict[str, Any]]) -> None:
    assert len(steps) == 2
    for step in steps:
        assert step["mismatch/max"] < 1e-4
        assert step["grad_norm"] > 0


def test_an_agent_with_a_prefix_and_shortened_contexts(warm_start: Path, quickstart_run: Path, tmp_path: Path) -> None:
    (tmp_path / "my_agent.py").write_text(TWO_PIECES)
    recipe = recipe_of(warm_start, quickstart_run)
    recipe["tools"] = [HUNT]
    recipe["rollout"] |= {"max_total_tokens": 168, "agent": "my_agent.py:TwoPieces"}
    recipe["rollout"] |= {"assistant_prefix": "<tool_call>\n", "context": {"policy": "summarize", "keep_turns": 1}}
    steps, chains = train(tmp_path, recipe)
    check_two(steps)
    for step in steps:
        assert step["trajectory/rows"] > 1
        assert step["environments/TreasureHunt/made"] >= 1
    assert any("Summarize what was done" in str(chain.messages) for chain in chains)


def test_a_function_that_forgets(warm_start: Path, quickstart_run: Path, tmp_path: Path) -> None:
    (tmp_path / "my_agent.py").write_text(FUNCTION)
    recipe = recipe_of(warm_start, quickstart_run)
    recipe["tools"] = [HUNT]
    recipe["rollout"]["agent"] = "my_agent.py:run"
    steps, chains = train(tmp_path, recipe)
    check_two(steps)
    for step in steps:
        assert step["trajectory/gateway/unmatched_turns"] == 0
    forgetful = [chain for chain in chains if chain.turns > 3]
    assert forgetful
    for chain in chains:
        assert len(chain.rows) == 1 + (chain.turns > 3)
        # the kept turns are sent back without the first one
        assert chain.metrics["gateway/spliced_turns"] == 2 * (chain.turns > 3)


def test_a_program_elsewhere_trains_and_a_chain_that_it_keeps_too_long_is_dropped(
    warm_start: Path, quickstart_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTFACTORY_TOKEN", "for this test")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    recipe = recipe_of(warm_start, quickstart_run)
    recipe["rollout"] |= {"agent": {"name": "outside", "options": {"port": port}}, "group_size": 4, "max_staleness": 1}
    recipe["train"]["steps"] = 5
    command = [sys.executable, str(tmp_path / "elsewhere.py"), f"http://127.0.0.1:{port}", str(QUICKSTART)]
    with subprocess.Popen(command) as program:
        try:
            steps, chains = train(tmp_path, recipe, {Outcome.CANCELLED})
        finally:
            program.terminate()
    assert len(steps) == 5
    # tokens of older weights differ by the change of weights; tokens of the same weights do not differ
    assert all(step.get("mismatch/age/0", 0.0) < 1e-5 for step in steps)
    assert "mismatch/age/0" in steps[0]
    assert {step["staleness/max"] for step in steps} == {0, 1}
    assert any(step["grad_norm"] > 0 for step in steps)
    assert sum(step["cancelled/chains"] for step in steps) == 1
    (late,) = [chain for chain in chains if chain.outcome is Outcome.CANCELLED]
    assert (late.turns, late.reward) == (1, None)
    assert late.error == "its group reached rollout.max_staleness=1"
    others = [chain for chain in chains if chain is not late]
    assert len({chain.metrics["success"] for chain in others}) == 2
    assert {len(chain.rows) for chain in others} == {1}
