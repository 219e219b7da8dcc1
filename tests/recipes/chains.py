"""Rows of a recipe, and chains with completions scripted by the test."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.chains.chain_runner import ChainRunner
from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.inference.inference_client import InferenceClient
from agentfactory.rollout.rewards import Rewards
from agentfactory.rollout.text.load_renderer import load_renderer
from agentfactory.rollout.trajectory import Trajectory
from agentfactory.tools.sessions.toolset import open_toolset
from tests.seeing_server import serve_seeing


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


async def chain_of(recipe: Recipe, base: Path, task: dict, texts: Sequence[str], images: Path) -> Trajectory:
    """Return a chain on `task` with `texts` as completions. The recipe's code is in `base`; `images` is a folder for
    the chain's images."""
    renderer = load_renderer(recipe.model, recipe.rollout.parser, images=images)
    said = iter(texts)

    def script(prompt: list[int]) -> list[int]:
        return renderer.tokenizer.encode(next(said) + "<|im_end|>", add_special_tokens=False)

    async with (
        serve_seeing(script, renderer.images.vision) as server,
        InferenceClient(server.url, retry_seconds=5) as client,
        open_toolset(recipe, base) as toolset,
        Rewards(recipe.rewards, base) as rewards,
    ):
        runner = ChainRunner(recipe, renderer, client, toolset, rewards)
        await runner.check([task])
        return await runner.run("c0", await runner.take(task), Sampling("policy", 1.0, seed="c0"))
