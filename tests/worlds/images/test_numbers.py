"""Images of other tools get numbers, so `image_tools` can work on them."""

import base64
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from agentfactory.base.config import ToolsRecipe
from agentfactory.base.messages import Content, ToolCall, ToolResult
from agentfactory.rollout.trajectory import Outcome
from agentfactory.tools.images.coordinates import Coordinates, ModelView
from agentfactory.tools.sessions.tool_session import ToolSession
from agentfactory.tools.sessions.toolset import open_toolset
from tests.scripted_chains import call
from tests.seeing_chains import seeing
from tests.vision_models import make_vision_model

TOOLS = """
import numpy as np
from mcp.server.mcpserver import Image as Part
from mcp.server.mcpserver import MCPServer
from PIL import Image

from agentfactory import Environment, tool


def noise(seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (80, 120, 3), dtype=np.uint8))


@tool
def shots(first: int, second: int):
    return ["two:", noise(first), noise(second)]


@tool
def broken():
    return ["look:", Part(data=b"no image", format="png")]


class Window(Environment):
    def reset(self, **task):
        return ["It opens.", noise(10)]

    @tool
    def look(self, seed: int):
        return noise(seed)


def server():
    made = MCPServer("camera")

    @made.tool()
    def photo() -> Part:
        from io import BytesIO
        file = BytesIO()
        noise(20).save(file, "PNG")
        return Part(data=file.getvalue(), format="png")

    return made


camera = server()
if __name__ == "__main__":
    camera.run()
"""


def noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (80, 120, 3), dtype=np.uint8)


def pixels(part: dict[str, Any]) -> np.ndarray:
    content = part["image_url"]["url"].removeprefix("data:image/png;base64,")
    return np.asarray(Image.open(BytesIO(base64.b64decode(content))))


def shown(content: Content) -> list[str]:
    return [part["text"] if part["type"] == "text" else "*" for part in content]


async def turn(session: ToolSession, *calls: tuple[str, dict[str, Any]]) -> list[ToolResult]:
    made = [ToolCall(str(number), name, arguments) for number, (name, arguments) in enumerate(calls)]
    return await session.number_images(made, [await session.call(call) for call in made])


@pytest.mark.processes  # an MCP server on stdio
@pytest.mark.parametrize("first", ["image_tools", "tools.py:Window"])
async def test_numbers_go_on_through_all_tools(first: str, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    names = sorted(["image_tools", "tools.py:Window"], key=lambda name: name != first)
    servers = {
        "here": {"module": "tools.py:camera", "prefix": "here_"},
        "there": {"command": "python", "args": [str(tmp_path / "tools.py")], "prefix": "there_"},
    }
    named = {"tools": [*names, "tools.py:shots", "tools.py:broken"], "mcp_servers": servers}
    recipe = ToolsRecipe.model_validate(named)
    task = {"images": [Image.fromarray(noise(0))], "model_view": ModelView(Coordinates.RELATIVE1000).to_json()}
    async with open_toolset(recipe, tmp_path) as toolset, toolset.chain("c", task) as session:
        assert shown(session.opening) == ["It opens.", "Image 1:", "*"]
        results = await turn(session, ("shots", {"first": 1, "second": 2}), ("here_photo", {}), ("there_photo", {}))
        told = [shown(result.content) for result in results]
        assert told == [["two:", "Image 2:", "*", "Image 3:", "*"], ["Image 4:", "*"], ["Image 5:", "*"]]
        # of 120 x 80 pixels
        half = {"bbox_2d": [0, 0, 500, 1000]}
        for number, seed in ((0, 0), (1, 10), (2, 1), (3, 2), (4, 20), (5, 20)):
            [result] = await turn(session, ("zoom", {**half, "img_idx": number}))
            assert shown(result.content) == [f"Image {6 + number}:", "*"]
            assert np.array_equal(pixels(result.content[1]), noise(seed)[:, :60])
            assert (result.info["of"], result.info["box"]) == (number, [0, 0, 60, 80])
        [bad, look] = await turn(session, ("broken", {}), ("look", {"seed": 30}))
        assert shown(bad.content) == ["look:", "*"]
        assert shown(look.content) == ["Image 12:", "*"]
        [unknown] = await turn(session, ("zoom", {**half, "img_idx": 13}))
        assert unknown.content == "ValueError: img_idx: got 13; there are the images 0 to 12"


async def test_a_model_zooms_into_what_another_tool_has_shown(tmp_path: Path) -> None:
    model = str(make_vision_model(tmp_path / "model", "qwen3_vl"))
    turns = [call("look", width=300, height=200), call("zoom", bbox_2d=[0, 0, 500, 500], img_idx=1), "done"]
    async with seeing(model, tmp_path, turns, tools=["looking.py:look", "image_tools"]) as chains:
        chain = await chains.run(images=[Image.fromarray(noise(0))])
        chains.check(chain)
    assert chain.outcome is Outcome.COMPLETED, chain.error
    told = [message for message in chain.messages if message["role"] == "tool"]
    assert shown(told[0]["content"]) == ["seen <|image_pad|>", "Image 1:", "*", "so it is"]
    assert shown(told[1]["content"]) == ["Image 2:", "*"]
    assert told[1]["info"] == {"image": 2, "of": 1, "box": [0, 0, 150, 100], "size": [300, 200]}
