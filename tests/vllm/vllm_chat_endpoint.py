"""Evaluation against vLLM's own OpenAI-compatible chat API, with tools: a baseline by messages."""

from pathlib import Path
from typing import Any

import pytest

from agentfactory.rollout.chains.chat_endpoint import look_at
from agentfactory.rollout.chains.endpoint_chain import open_chat_runner
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.evaluation.evaluate import open_sources, run_eval
from agentfactory.rollout.groups.group_files import read_groups
from agentfactory.rollout.sources import load_all, open_all
from tests.conftest import QUICKSTART
from tests.server_process import VLLM_PYTHON, serve

pytestmark = pytest.mark.long

TASKS = 12
TOOLS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]


def recipe(model: Path, data: Path, args: list[str]) -> dict[str, Any]:
    options = {"python": VLLM_PYTHON, "args": args}
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "tools": [str(QUICKSTART / "treasure_hunt.py:TreasureHunt")],
        "rollout": {"max_turns": 8, "max_tokens": 32, "max_total_tokens": 512},
        "server": {"engine": "vllm", "max_model_len": 1024, "retry_seconds": 10, "options": options},
        "eval": {"data": {"path": str(data), "limit": TASKS}, "samples": 2},
    }


def test_the_same_model_by_messages_and_by_token_ids(quickstart_run: Path, warm_start: Path, tmp_path: Path) -> None:
    given = recipe(warm_start, quickstart_run / "prepared" / "heldout.jsonl", TOOLS)
    read = RolloutRecipe.model_validate(given)
    loaded = load_all(read.held_out_parts())
    with serve(given, tmp_path) as url:
        assert look_at(url + "/v1", None, None) == "policy"
        opened = open_all(loaded, lambda part: open_chat_runner(part, QUICKSTART, url + "/v1"))
        by_messages = run_eval(read, tmp_path / "chat", lambda record: None, opened)
        by_ids = run_eval(read, tmp_path / "ids", lambda record: None, open_sources(read, loaded, QUICKSTART, url))
    assert not by_messages.failures
    # vLLM renders the messages anew at each turn, and the model writes them in one way: the same ids, greedily
    for name in ("reward", "success", "tool_calls", "sampled_tokens", "tool_errors/invalid_arguments"):
        assert by_messages.means[f"greedy/{name}"] == by_ids.means[f"greedy/{name}"], name
    assert by_messages.means["greedy/tool_calls"] > 0
    chains = [chain for group in read_groups(tmp_path / "chat" / "final-sampled.jsonl") for chain in group.trajectories]
    assert len(chains) == 2 * TASKS
    assert all(chain.reward is not None and chain.messages[-1]["role"] in ("assistant", "tool") for chain in chains)
