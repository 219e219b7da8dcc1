"""Tests of servers' messages that are bounded while they arrive."""

import json
from typing import Any

import pytest

from agentfactory.tools.calls import message_bounds as message_filter
from agentfactory.tools.calls.message_bounds import TOO_LARGE, MessageFilter
from agentfactory.tools.calls.truncation import cut_bytes

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_filter, "_LEAST_TEXT", 64)
    monkeypatch.setattr(message_filter, "_SHORT", 32)
    monkeypatch.setattr(message_filter, "BINARY_BYTES", 1000)


def passed(raw: str, size: int = 7, most: int = 100, lines: bool = True) -> list[str]:
    """Return the filtered messages if `raw` arrives in pieces of `size` bytes."""
    messages, found = MessageFilter(most, lines), list[bytes]()
    data = raw.encode()
    for start in range(0, len(data), size):
        found += messages.feed(data[start : start + size])
    return [message.decode() for message in (*found, messages.end())]


def answer(**result: Any) -> str:
    return json.dumps({"jsonrpc": "2.0", "id": 5, "result": result})


TEXTS = ["x" * 500, "Grüße, 世界! 😀 " * 30, 'a "quoted" \\ back\\slash\n' * 30, "\x01\t\u2028é" * 60]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_a_long_text_is_cut_as_it_would_be_after_parsing(text: str, ascii_only: bool, size: int) -> None:
    whole = {"jsonrpc": "2.0", "id": 5, "result": {"content": [{"type": "text", "text": text}], "isError": False}}
    line, end = passed(json.dumps(whole, ensure_ascii=ascii_only) + "\n", size)
    assert end == ""
    expected = cut_bytes(text, 100)
    assert expected is not None
    if ascii_only and "😀" in text and size < 100:  # a pair of escapes may be split
        expected = json.loads(line)["result"]["content"][0]["text"]
        assert "left out" in expected
    whole["result"]["content"][0]["text"] = expected  # type: ignore[index]
    assert json.loads(line) == whole


def test_short_messages_pass_unread_and_follow_long_ones() -> None:
    raw = 'no json "at all\r\n\n{"id": 1}\n'
    assert passed(raw) == ['no json "at all\r', "\n", "\n", '{"id": 1}\n', ""]
    long, short = answer(text="y" * 300), answer(text="z")
    lines = passed(f"{long}\n{short}\n{long}\n")
    assert [json.loads(line)["result"]["text"][0] for line in lines[:3]] == ["y", "z", "y"]


def test_images_and_what_the_model_does_not_see_stay_whole() -> None:
    image = {"type": "image", "data": "A" * 400, "mimeType": "image/png"}
    meta = {"agentfactory/info": {"artefact": "B" * 400, "list": [{"deep": "C" * 150}]}}
    raw = answer(content=[image, {"type": "text", "text": "D" * 400}], _meta=meta, last="E" * 400)
    found = json.loads(passed(raw + "\n")[0])["result"]
    assert (found["content"][0], found["_meta"]) == (image, meta)
    assert found["content"][1]["text"] == found["last"].replace("E", "D") == cut_bytes("D" * 400, 100)


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ({"content": [{"type": "image", "data": "A" * 2000}]}, "MiB of images, files or info"),
        ({"_meta": {"agentfactory/info": {"text": "A" * 2000}}}, "MiB of images, files or info"),
        ({"structuredContent": {"n": list(range(300))}}, "its JSON has more than 200 bytes. Ask for less"),
        ({"content": [{"type": "text", "text": "x" * 99}] * 30}, "its JSON has more than 200 bytes. Ask for less"),
    ],
)
@pytest.mark.parametrize("size", [7, 10_000])
@pytest.mark.parametrize("last", [False, True])
def test_what_cannot_be_cut_is_an_error_with_its_id(result: dict[str, Any], reason: str, size: int, last: bool) -> None:
    """Check both positions of the id: servers in Python write it first, servers in TypeScript last."""
    frame = {"jsonrpc": "2.0", "id": "seven"}
    whole = {"result": result, **frame} if last else {**frame, "result": result}
    line = passed(json.dumps(whole) + "\n", size)[0]
    found = json.loads(line)
    assert (found["id"], found["error"]["code"]) == ("seven", TOO_LARGE)
    assert reason in found["error"]["message"]
    assert passed(f"data: {json.dumps(whole)}\n", size)[0].startswith('data: {"jsonrpc"')


def test_a_body_may_have_several_lines() -> None:
    raw = json.dumps(json.loads(answer(text="y" * 300)), indent=2)
    [body] = passed(raw, lines=False)
    assert json.loads(body)["result"]["text"] == cut_bytes("y" * 300, 100)
    many = json.dumps({"jsonrpc": "2.0", "id": 9, "result": {"n": list(range(300))}}, indent=2)
    assert json.loads(passed(many, lines=False)[0])["id"] == 9


def test_an_unending_line_that_is_no_message_takes_no_memory() -> None:
    messages = MessageFilter(100)
    for _ in range(1000):
        assert messages.feed(b"noise " * 100) == []
    assert len(messages._scan._kept) < 10_000
    assert b"too_large" in messages.feed(b"\n")[0]
