"""Chains of a vision model with scripted turns: the whole runner on a server that expands image tokens as vLLM does."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from agentfactory.rollout.chains.chain_runner import ChainRunner
from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.inference.inference_client import InferenceClient
from agentfactory.rollout.rewards import Rewards
from agentfactory.rollout.text.load_renderer import load_renderer
from agentfactory.rollout.text.renderer import Renderer
from agentfactory.rollout.trajectory import Trajectory
from agentfactory.tools.sessions.toolset import open_toolset
from tests.seeing_server import SeeingServer, serve_seeing

TOOLS = '''
import numpy as np
from PIL import Image
from agentfactory import reward, tool
from mcp.server.mcpserver import Image as Part


@tool
def look(width: int, height: int, seed: int = 0, count: int = 1):
    """Look."""
    draw = np.random.default_rng(seed)
    return ["seen <|image_pad|>", *(picture(draw, width, height) for _ in range(count)), "so it is"]


@tool
def broken():
    """Look at a file that is no image."""
    return ["look:", Part(data=b"no image", format="png")]


@reward
def widths(images, seen_images):
    sizes = [Image.open(path).width for path in (*images, *seen_images)]
    return {"reward": 1.0, "widths": sum(width * 1000**place for place, width in enumerate(sizes))}


def picture(draw, width, height):
    small = Image.fromarray(draw.integers(0, 255, (7, 9, 3), dtype=np.uint8))
    return small.resize((width, height))
'''


class Seeing:
    """A runner, its servers, and their received requests."""

    def __init__(self, runner: ChainRunner, renderer: Renderer, servers: list[SeeingServer]) -> None:
        self.runner, self.renderer, self.servers = runner, renderer, servers

    async def run(self, name: str = "c0", **task: Any) -> Trajectory:
        taken = await self.runner.take({"question": "What is shown?", **task})
        return await self.runner.run(name, taken, Sampling("policy", 1.0, seed=name), frozenset())

    def check(self, *chains: Trajectory) -> None:
        """Assert that each sampled turn follows, in its row, exactly the ids to which the server expanded its request,
        and that the row's images are those in the request."""
        vision = self.renderer.images.vision
        answered = [pair for s in self.servers for pair in zip(s.prompts, s.responses, strict=True)]
        for row in (row for chain in chains for row in chain.rows):
            assert len(row.mask) == len(row.logprobs) == len(row.token_ids)
            inside = [i for span in row.images for i in range(span.offset, span.offset + span.length)]
            assert inside == [i for i, token in enumerate(row.token_ids) if token == vision.image_token_id]
            assert not any(row.mask[i] for i in inside)
            for start, end in row.turn_spans():
                answered.remove((row.token_ids[:start], row.token_ids[start:end]))
            collapsed = vision.collapse(row.token_ids, row.images)
            again = vision.expand(collapsed, [(i.digest, i.grid) for i in row.images])
            assert again == (row.token_ids, row.images)
        assert not answered
        for server in self.servers:
            for digest, image in server.images.items():
                assert np.array_equal(np.asarray(image), np.asarray(self.renderer.images.store.load(digest)))


@asynccontextmanager
async def seeing(
    path: str,
    folder: Path,
    texts: Callable[[str], str] | list[str],
    servers: int = 1,
    kind: Any = SeeingServer,
    **fields: Any,
) -> AsyncIterator[Seeing]:
    """Answer the n-th request by the n-th of `texts`, or by the result of calling `texts` on its prompt; `fields` are
    recipe sections."""
    (folder / "looking.py").write_text(TOOLS)
    sections: dict[str, Any] = {"model": {"path": path}, "tools": ["looking.py:look", "looking.py:broken"]}
    recipe = RolloutRecipe.model_validate({**sections, **fields})
    renderer = load_renderer(recipe.model, recipe.rollout.parser, images=folder / "images")
    said = iter(() if callable(texts) else texts)

    def script(prompt: list[int]) -> list[int]:
        text = texts(renderer.tokenizer.decode(prompt)) if callable(texts) else next(said)
        return renderer.tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)

    async with AsyncExitStack() as stack:
        vision = renderer.images.vision
        started = [await stack.enter_async_context(serve_seeing(script, vision, kind)) for _ in range(servers)]
        client = await stack.enter_async_context(InferenceClient([server.url for server in started], retry_seconds=5))
        toolset = await stack.enter_async_context(open_toolset(recipe, folder))
        rewards = await stack.enter_async_context(Rewards(recipe.rewards, folder))
        yield Seeing(ChainRunner(recipe, renderer, client, toolset, rewards), renderer, started)
