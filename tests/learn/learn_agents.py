"""Part of `make learn-agents`: the hunt played by agents that keep their own loop, on four SDKs and frameworks.

They come from PyPI: OpenAI's and Anthropic's SDKs, LangGraph, smolagents."""

from pathlib import Path

import pytest

from tests.learn.runs import SEEDS, agentfactory, assert_risen, lines_of, read_json

RECIPES = Path(__file__).parents[2] / "recipes" / "own_agents"
STEPS = 25


@pytest.mark.parametrize("agent", ["openai", "anthropic", "langgraph", "smolagents"])
def test_an_agent_learns_as_it_is(agent: str, tmp_path: Path) -> None:
    output = tmp_path / "run"
    options = (f"output={output}", f"seed={SEEDS[0]}", f"grpo.train.steps={STEPS}")
    agentfactory("train", str(RECIPES / f"{agent}.yaml"), *options)
    summary = read_json(output / "summary.json")
    assert_risen(summary, by=0.5, figures=("success", "greedy"))
    assert summary["greedy_after"] >= 0.95
    steps = [step for step in lines_of(output / "grpo") if "loss" in step]
    assert max(step["mismatch/max"] for step in steps) < 1e-3
    assert max(step["trajectory/rows"] for step in steps) < 1.01
    assert max(step["trajectory/gateway/unmatched_turns"] for step in steps) < 0.01
