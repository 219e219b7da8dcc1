"""A worker's memory use over ten thousand chains with four images each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.vision_models import make_vision_model

TOOLS = '''
import numpy as np
from PIL import Image
from agentfactory import tool


@tool
def look(seed: int) -> list:
    """Look at three pictures."""
    draw = np.random.default_rng(seed)
    return [Image.fromarray(draw.integers(0, 255, (56, 56, 3), dtype=np.uint8)) for _ in range(3)]
'''
SERVER = """
import asyncio, json, random, sys
from pathlib import Path
from agentfactory.rollout.config import ModelConfig
from agentfactory.rollout.text.load_renderer import load_renderer
from tests.seeing_server import serve_seeing

async def main():
    renderer = load_renderer(ModelConfig(path="model"), "hermes", images=Path("server"))
    vision, draw = renderer.images.vision, random.Random(0)
    opening = renderer.tokenizer.convert_tokens_to_ids("<|vision_start|>")

    def script(prompt):
        call = json.dumps({"name": "look", "arguments": {"seed": draw.randrange(KINDS)}})
        text = "done" if prompt.count(opening) > 1 else f"<tool_call>\\n{call}\\n</tool_call>"
        server.prompts.clear(), server.responses.clear()
        return renderer.tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)

    async with serve_seeing(script, vision) as server:
        print(server.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)

KINDS = int(sys.argv[1])
asyncio.run(main())
"""
WORKER = """
import asyncio, gc, json, sys
from contextlib import AsyncExitStack
from pathlib import Path
import psutil
from agentfactory.rollout.chains.chain_runner import ChainRunner
from agentfactory.rollout.inference.inference_client import InferenceClient
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.text.load_renderer import load_renderer
from agentfactory.rollout.rewards import Rewards
from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.tools.sessions.toolset import open_toolset

async def main(url, warm, chains, kinds):
    recipe = RolloutRecipe.model_validate({"model": {"path": "model"}, "tools": ["looking.py:look"]})
    renderer = load_renderer(recipe.model, recipe.rollout.parser, images=Path("images"))
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(InferenceClient([url], retry_seconds=5))
        toolset = await stack.enter_async_context(open_toolset(recipe, Path.cwd()))
        rewards = await stack.enter_async_context(Rewards.load(recipe.rewards, Path.cwd()))
        runner, numbers, seen = ChainRunner(recipe, renderer, client, toolset, rewards), iter(range(chains)), []

        async def run():
            for n in numbers:
                task = await runner.take({"question": "What is shown?", "images": [f"task-{n % kinds}.png"]})
                chain = await runner.run(f"c{n}", task, Sampling("policy", 1.0, seed=str(n)), frozenset())
                [row] = chain.rows
                assert chain.outcome.value == "completed" and len(row.images) == 4
                if n + 1 in (warm, chains):
                    gc.collect()
                    seen.append(psutil.Process().memory_info().rss)

        await asyncio.gather(*(run() for _ in range(32)))
    print(json.dumps(seen))

asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
"""


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_memory_does_not_grow_with_chains(tmp_path: Path) -> None:
    warm, chains, kinds = 2000, 10_000, 100
    make_vision_model(tmp_path / "model", "qwen3_vl")
    (tmp_path / "looking.py").write_text(TOOLS)
    draw = "import numpy as np; from PIL import Image; [Image.fromarray(np.random.default_rng(9000 + n).integers("
    draw += f"0, 255, (56, 84, 3), dtype=np.uint8)).save(f'task-{{n}}.png') for n in range({kinds})]"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", draw], cwd=tmp_path, check=True)
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(kinds)],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        command = [sys.executable, "-c", WORKER, url, *map(str, (warm, chains, kinds))]
        try:
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1100)
        finally:
            server.kill()
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout.splitlines()[-1])
    print(f"{before / 2**20:.0f} MiB after {warm} chains, {after / 2**20:.0f} after {chains}")
    assert len(list((tmp_path / "images").rglob("*.png"))) == 4 * kinds
    # keeping 32,000 more images of 9 to 14 kB would take 330 MiB
    assert after - before < 16 * 2**20
