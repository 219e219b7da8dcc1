"""Tests of tools' return values, on the wire and as content for the model."""

import base64
import dataclasses
import datetime
import enum
import io
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from mcp.server.mcpserver import Audio, Image
from mcp_types import CallToolResult, TextContent
from pydantic import BaseModel

from agentfactory.base.messages import text_of
from agentfactory.tools.calls import mcp_results
from agentfactory.tools.tool import finish


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int
    color: Color = Color.RED


class User(BaseModel):
    name: str
    born: datetime.date | None = None


TEXTS: list[tuple[Any, str]] = [
    ("text", "text"),
    ("a\ud800b", "a?b"),
    (None, ""),
    (True, "true"),
    ({"a": [1, "ä", None]}, '{"a": [1, "ä", null]}'),
    ([1, "a"], '[1, "a"]'),
    (["a", "b"], '["a", "b"]'),
    ([Point(1)], '[{"x": 1, "color": "red"}]'),
    (User(name="Ada", born=datetime.date(1815, 12, 10)), '{"name": "Ada", "born": "1815-12-10"}'),
    (np.arange(4).reshape(2, 2), "[[0, 1], [2, 3]]"),
    ({"observation": "seen", "steps": 3}, "seen"),
    ({"observation": {"observation": 1}}, '{"observation": 1}'),
    (finish(7), "7"),
]


@pytest.mark.parametrize(("value", "text"), TEXTS)
def test_text_and_json(value: Any, text: str) -> None:
    assert mcp_results.content_of(_sent(mcp_results.result_of(value))) == text


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "F", "HSV", "I;16"])
def test_pillow_images(mode: str) -> None:
    content = mcp_results.content_of(_sent(mcp_results.result_of(PIL.Image.new(mode, (5, 3)))))
    assert isinstance(content, list)
    (part,) = content
    url = part["image_url"]["url"]
    assert url.startswith("data:image/png;base64,")
    read = PIL.Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    read.load()
    assert (read.format, read.size) == ("PNG", (5, 3))
    assert text_of(content) == "[image/png image]"


def test_lists_with_images_keep_their_order(tmp_path: Path) -> None:
    PIL.Image.new("RGB", (2, 2)).save(tmp_path / "a.jpg")
    sound = Audio(data=b"x", format="wav")
    images = [PIL.Image.new("L", (1, 1)), {"a": 1}, Image(path=tmp_path / "a.jpg"), Image(data=b"x")]
    listed = [TextContent(type="text", text="before"), *images, None, sound, 4]
    content = mcp_results.content_of(_sent(mcp_results.result_of({"observation": listed, "more": True})))
    assert isinstance(content, list)
    kinds = [part.get("text") or part["image_url"]["url"].partition(",")[0] for part in content]
    images = ["data:image/png;base64", '{"a": 1}', "data:image/jpeg;base64", "data:image/png;base64"]
    assert kinds == ["before", *images, "[audio/wav audio]", "4"]


async def nap() -> None: ...


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (object(), "a tool returns text, JSON, an image, or a list with images, and not object"),
        (nap(), "a tool returns a coroutine: write `async def`, and `await`"),
        ({"observation": "a", "info": object()}, "and not object"),
        ([finish(1)], "and not Finish"),
    ],
)
def test_what_cannot_be_sent(value: Any, reason: str) -> None:
    with pytest.raises((TypeError, ValueError), match=reason):
        mcp_results.result_of(value)


def _sent(result: CallToolResult) -> CallToolResult:
    return CallToolResult.model_validate_json(result.model_dump_json(by_alias=True))
