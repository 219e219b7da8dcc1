"""Unmodified third-party tool servers, driven from a recipe: SFT on scripted calls, then GRPO steps with each."""

import asyncio
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from agentfactory.base.config import ToolsRecipe
from agentfactory.base.messages import Message, ToolCall, text_of
from agentfactory.base.user_code.loading import load_object
from agentfactory.rollout.groups.group_files import read_groups
from agentfactory.rollout.trajectory import Trajectory
from agentfactory.tools.sessions.toolset import open_toolset
from tests.conftest import QUICKSTART, embedded_server
from tests.forked import TRAINER, Forked
from tests.third_party_servers import everything, time_server

pytestmark = pytest.mark.long

__all__ = ["everything"]  # a fixture

make_model, write_jsonl = (load_object(f"tiny_model.py:{name}", QUICKSTART) for name in ("make_model", "write_jsonl"))

TRANSCRIPTS = 600
"""Scripted conversations with each server."""
SLIPS = 0.3
"""Fraction of conversations with another task's call, so that the learned behaviour is not always rewarded."""
STEPS, BATCH, GROUP = 2, 4, 8
ZONES = ["Asia/Tokyo", "Europe/Paris", "America/New_York", "Africa/Cairo", "Australia/Sydney"]
WORDS = ["lemon", "Grüße", "two words", "tea & cake"]

REWARD = '''
from agentfactory import Trajectory, reward


@reward
def told(trajectory: Trajectory, expected: list[str]) -> dict[str, float]:
    """Whether the server's last answer holds all that is expected."""
    said = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    right = float(bool(said) and all(part in said[-1] for part in expected))
    return {"reward": right, "success": right}
'''


def task_of_everything(rng: random.Random) -> dict[str, Any]:
    """A task for server-everything, and the call that solves it."""
    if rng.random() < 0.5:
        word = rng.choice(WORDS)
        call = {"name": "echo", "arguments": {"message": word}}
        return {"question": f"Echo {word}.", "expected": [f"Echo: {word}"], "call": call}
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    call = {"name": "get-sum", "arguments": {"a": a, "b": b}}
    return {"question": f"Add {a} and {b}.", "expected": [f"The sum of {a} and {b} is {a + b}"], "call": call}


def task_of_time(rng: random.Random) -> dict[str, Any]:
    """A task for mcp-server-time, and the call that solves it."""
    here, there = rng.sample(ZONES, 2)
    if rng.random() < 0.5:
        call = {"name": "get_current_time", "arguments": {"timezone": here}}
        return {"question": f"What time is it in {here}?", "expected": [here], "call": call}
    time = f"{rng.randint(10, 23)}:30"
    arguments = {"source_timezone": here, "time": time, "target_timezone": there}
    question = f"It is {time} in {here}. What time is it in {there}?"
    expected = [here, there, f"T{time}:00"]
    return {"question": question, "expected": expected, "call": {"name": "convert_time", "arguments": arguments}}


TASKS = {"everything": task_of_everything, "time": task_of_time}
TOOLS = {"everything": ["echo", "get-sum"], "time": ["get_current_time", "convert_time"]}
"""The tools used in tasks; the schemas of all tools would make long prompts."""


@pytest.fixture(scope="session")
def servers(everything: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The servers in the form of a recipe's `mcp_servers:`."""
    found = {"everything": everything, "time": time_server()}
    return {name: {**entry, "allow": TOOLS[name]} for name, entry in found.items()}


async def scripted(name: str, server: dict[str, Any], rng: random.Random) -> list[dict[str, Any]]:
    """Conversations in which the server answers the calls, as rows for supervised fine-tuning."""
    rows = []
    async with (
        open_toolset(ToolsRecipe.model_validate({"mcp_servers": {name: server}}), Path.cwd()) as toolset,
        toolset.chain("script", {}) as session,
    ):
        specs = [spec.to_openai() for spec in toolset.specs]
        for _ in range(TRANSCRIPTS):
            task = TASKS[name](rng)
            made = TASKS[name](rng) if rng.random() < SLIPS else task
            call = ToolCall("call_0", **made["call"])
            result = await session.call(call)
            assert result.error is None, result.content
            messages: list[Message] = [
                {"role": "user", "content": task["question"]},
                {"role": "assistant", "content": "", "tool_calls": [call.to_openai()]},
                result.to_message(call),
                {"role": "assistant", "content": "There it is."},
            ]
            rows.append({"messages": messages, "tools": specs})
    return rows


def train(recipe: dict[str, Any], folder: Path, *overrides: str) -> Path:
    """Train the recipe; return the run folder."""
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    arguments = (str(folder / "recipe.yaml"), f"output={folder / 'run'}", *overrides)
    trainer = Forked(TRAINER, *arguments, log=folder / "train.log")
    assert trainer.wait() == 0, trainer.log.read_text()
    return folder / "run"


def checkpoint(run: Path) -> Path:
    return run / json.loads((run / "summary.json").read_text())["checkpoint"]


@pytest.fixture(scope="module")
def warm_start(servers: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that has learned from scripted calls of both servers."""
    folder = tmp_path_factory.mktemp("scripted")
    rows = [row for name in servers for row in asyncio.run(scripted(name, servers[name], random.Random(name)))]
    specs = list({spec["function"]["name"]: spec for row in rows for spec in row["tools"]}.values())
    write_jsonl(folder / "transcripts.jsonl", rows)
    make_model(folder / "model", random.Random(0).sample([row["messages"] for row in rows], 1000), specs, seed=0)
    recipe = {
        "model": {"path": "model", "dtype": "float32"},
        "data": {"path": "transcripts.jsonl"},
        "train": {"algorithm": "sft", "steps": 200, "learning_rate": 3e-3, "schedule": "cosine", "warmup_steps": 20},
    }
    return checkpoint(train(recipe, folder))


@pytest.mark.parametrize("name", TASKS)
def test_grpo_over_a_server(name: str, servers: dict[str, dict[str, Any]], warm_start: Path, tmp_path: Path) -> None:
    rng = random.Random(f"tasks of {name}")
    write_jsonl(tmp_path / "tasks.jsonl", [TASKS[name](rng) for _ in range(STEPS * BATCH)])
    (tmp_path / "told.py").write_text(REWARD)
    recipe = {
        "model": {"path": str(warm_start), "dtype": "float32"},
        "data": {"path": "tasks.jsonl"},
        "mcp_servers": {name: servers[name]},
        "rewards": ["told.py:told"],
        "rollout": {"group_size": GROUP, "max_turns": 3, "max_tokens": 64, "max_total_tokens": 512, "temperature": 0.8},
        "server": {"engine": "embedded", "max_model_len": 512},
        "train": {"steps": STEPS, "batch_size": BATCH, "learning_rate": 1e-4},
    }
    with embedded_server(warm_start, "--max-model-len", "512") as url:
        run = train(recipe, tmp_path, f"server.url={url}")
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "loss" in step]
    assert len(steps) == STEPS
    for step in steps:
        assert math.isfinite(step["loss"])
        assert step["grad_norm"] > 0, "chains of one task are rewarded differently"
        # the server returns the time of day, so no two runs learn the same
        assert step["trajectory/tool_calls"] >= 0.75
        assert sum(value for key, value in step.items() if key.startswith("trajectory/tool_errors/")) <= 0.2, step
        assert step["tokens"] > 0
    chains = [chain for group in read_groups(run / "trajectories") for chain in group.trajectories]
    assert len(chains) == STEPS * BATCH * GROUP
    assert sum(answered(chain) for chain in chains) >= 0.7 * len(chains)
    before, after = (load_file(folder / "model.safetensors") for folder in (warm_start, checkpoint(run)))
    assert any((after[key] != value).any() for key, value in before.items())


def is_answer(text: str, name: str, arguments: dict[str, Any]) -> bool:
    """Return whether `text` is the server's answer to this call."""
    match name, arguments:
        case "echo", {"message": message}:
            return text == f"Echo: {message}"
        case "get-sum", {"a": a, "b": b}:
            return text == f"The sum of {a} and {b} is {a + b}."
        case "get_current_time", {"timezone": zone}:
            return f'"timezone": "{zone}"' in text
        case "convert_time", {"time": time, "target_timezone": zone}:
            return f"T{time}:00" in text and f'"timezone": "{zone}"' in text
    return False  # an unknown tool, or missing arguments


def answered(chain: Trajectory) -> int:
    """Count the chain's calls that got the server's own answer."""
    calls = [call["function"] for message in chain.messages for call in message.get("tool_calls", [])]
    said = [text_of(message["content"]) for message in chain.messages if message["role"] == "tool"]
    return sum(is_answer(text, **call) for call, text in zip(calls, said, strict=False))
