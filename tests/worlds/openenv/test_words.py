"""Actions and observations of OpenEnv servers in words and images."""

import base64
from io import BytesIO
from typing import Any

import pytest
from PIL import Image

from agentfactory.worlds.openenv.words import calls_tools, in_words, shown, tools_in_words
from tests.vision_rows import file_of

METADATA = {"metadata": {"type": "object"}}


def test_nested_fields_enums_and_defaults_are_described() -> None:
    schema = {
        "type": "object",
        "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "number"}, "y": {}}, "required": ["x"]}},
        "properties": {
            **METADATA,
            "kind": {"enum": ["go", "stay"], "description": "What to\n do"},
            "at": {"type": "array", "items": {"$ref": "#/$defs/Point"}, "minItems": 1},
            "name": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}], "default": None},
            "code": {"const": 3},
            "loose": True,
        },
        "required": ["kind", "at"],
    }
    assert in_words(schema).splitlines()[1:] == [
        *('- kind ("go" | "stay"): What to do', "- at (list of object {x: number, y?: any} [minItems 1])"),
        *("- name (string [maxLength 5] | null, default null)", "- code (3, optional)", "- loose (any, optional)"),
    ]
    assert in_words({"type": "object", "properties": METADATA}) == "An action is an empty object."
    assert in_words({"oneOf": [{"type": "string"}, {"type": "integer"}]}) == "An action is: string | integer"
    # a required field of this name is the environment's own
    assert "- metadata (object)" in in_words({"properties": METADATA, "required": ["metadata"]})


def test_calls_of_tools_are_recognized() -> None:
    call = {"properties": {**METADATA, "type": {"const": "call_tool"}, "tool_name": {"type": "string"}}}
    assert calls_tools(call) is True
    assert calls_tools({"type": "object", "properties": METADATA}) is None
    assert calls_tools({"properties": {"type": {"const": "move"}}}) is False
    told = tools_in_words([{"name": "look", "description": "", "input_schema": {"properties": {}}}])
    assert told.endswith("\n\nlook\n- no arguments")


def png() -> str:
    return base64.b64encode(file_of(Image.new("RGB", (9, 9), "red"))).decode()


@pytest.mark.parametrize(
    ("observation", "names", "call", "seen"),
    [
        ({"text": "a\nb", "metadata": {"x": 1}}, None, False, "a\nb"),
        ({"text": "a\nb", "n": 1, "won": None}, None, False, "text:\na\nb\nn: 1\nwon: null"),
        ({"text": "a", "n": [1, {"é": 2}]}, ["n"], False, '[1, {"é": 2}]'),
        ({"messages": [{"role": "user", "content": "hi"}, {"role": "x", "content": ""}]}, None, False, "user: hi\nx: "),
        ({"tool_name": "a", "result": "ok", "error": None}, None, True, "ok"),
        ({"tool_name": "a", "result": {"n": 1}}, ["text"], True, '{"n": 1}'),
        ({"result": {"content": [], "structured_content": {"n": 1}}}, None, True, '{"n": 1}'),
        # neither a picture nor base64
        ({"board": [[[0, 1, 2]] * 3] * 3}, None, False, str([[[0, 1, 2]] * 3] * 3)),
        ({"board": [[[0, 1, 256]] * 8] * 8}, None, False, str([[[0, 1, 256]] * 8] * 8)),
        ({"path": "/9j/is a path"}, None, False, "/9j/is a path"),
    ],
)
def test_text_stays_rest_is_json(observation: dict[str, Any], names: list[str] | None, call: bool, seen: str) -> None:
    assert shown(observation, names, call) == seen


@pytest.mark.parametrize(
    "value",
    [
        png(),
        f"data:image/png;base64,{png()}",
        [[[255, 0, 0]] * 9] * 9,
        {"content": [{"type": "image", "data": png(), "mimeType": "image/png"}]},
        [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png()}"}}],
    ],
)
def test_images_are_images(value: Any) -> None:
    found = shown({"text": "a", "screen": value}, None)
    *texts, image = found
    assert texts == ["text: a", "screen:"]
    with Image.open(BytesIO(base64.b64decode(image.data))) as decoded:
        assert decoded.size == (9, 9)
        assert decoded.convert("RGB").getpixel((4, 4)) == (255, 0, 0)
