"""Answers to tools/call as servers send them, and what the model reads. Made from situations of public reports."""

from typing import Any, NamedTuple

from agentfactory.base.messages import CallError, Content
from tests.tools.roughness.raw_server import message_of


class Answer(NamedTuple):
    name: str
    text: str
    """The message as it is sent, with $ID for the request's id."""
    reads: Content
    error: CallError | None = None
    told: str = ""
    """Text that the notice to the user must contain ("": no notice)."""


def _result(name: str, result: Any, reads: Content, error: CallError | None = None, told: str = "") -> Answer:
    return Answer(name, message_of(result=result), reads, error, told)


def _block(name: str, block: Any, reads: Content, told: str = "cannot be read") -> Answer:
    return _result(name, {"content": [{"type": "text", "text": "a"}, block]}, reads, told=told)


def _error(name: str, error: Any, reads: str, kind: CallError = CallError.TOOL_ERROR, told: str = "error") -> Answer:
    return Answer(name, message_of(error=error), reads, kind, told)


def _both(name: str, text: str, structured: Any, told: str = "") -> Answer:
    result = {"content": [{"type": "text", "text": text}], "structuredContent": structured}
    return _result(name, result, text, told=told)


_PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
_A = {"type": "text", "text": "a"}
_SHOWN = [_A, {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_PNG}"}}]
_HEAD = '{"jsonrpc": "2.0", "id": "$ID", '
_FAILED, _UNREADABLE = CallError.TOOL_ERROR, "The server's answer cannot be read"

ANSWERS = [
    # JSON-RPC errors of a living server
    _error("internal", {"code": -32603, "message": "backend down"}, "backend down", told="-32603, 'backend down'"),
    _error("code-of-closed", {"code": -32000, "message": "Rate limited"}, "Rate limited", told="-32000"),
    _error(
        "params",
        {"code": -32602, "message": "No such book"},
        "Invalid arguments for t: No such book.",
        CallError.INVALID_ARGUMENTS,
        told="",
    ),
    _error("code-text", {"code": "E_FAIL", "message": "boom"}, "boom", told="error 0"),
    Answer("error-and-result", message_of(result=None, error={"code": 5, "message": "x"}), "x", _FAILED, "5"),
    # the envelope
    Answer("error-null", message_of(result={"content": [_A]}, error=None), "a"),
    Answer("no-version", '{"id": "$ID", "result": {"content": [{"type": "text", "text": "a"}]}}', "a"),
    Answer("batch", f"[{message_of(result={'content': [_A]})}]", "a"),
    Answer("result-text", message_of(result="plain"), "plain", told="no list, but 'plain'"),
    Answer("no-json", _HEAD + '"result": {"content": [oops]}}', _UNREADABLE, _FAILED, "error -32700"),
    Answer("too-deep", _HEAD + '"result": ' + "[" * 9999 + "]" * 9999 + "}", _UNREADABLE, _FAILED, "error -32700"),
    # text
    Answer("half-emoji", _HEAD + r'"result": {"content": [{"type": "text", "text": "cut \ud83d"}]}}', "cut \ufffd"),
    Answer("no-utf-8", _HEAD + '"result": {"content": [{"type": "text", "text": "caf\udce9"}]}}', "caf\ufffd"),
    Answer("not-a-number", _HEAD + '"result": {"content": [], "structuredContent": {"x": NaN}}}', '{"x": NaN}'),
    # content
    _result("no-content", {"structuredContent": {"answer": 42}}, '{"answer": 42}'),
    _result("nothing", {}, "", told="no `content`"),
    _result("other-fields", {"answer": 42, "_meta": {}}, '{"answer": 42}', told="models read all of it"),
    _result("structured-list", {"content": [], "structuredContent": [1, 2]}, "[1, 2]"),
    _result("error-empty", {"content": [], "isError": True}, "The tool failed without a message.", _FAILED),
    # structured content beside text, as servers of PyPI and npm send it
    _both("both-equal", '{\n "n": 1\n}', {"n": 1}),
    _both("both-wrapped", "a", {"result": "a"}),
    _both(
        "summary",
        "Found 2 items.",
        {"items": [{"id": "x"}, {"id": 7}]},
        "the text of t lacks values of its structuredContent (items.0.id, items.1.id); models read the text",
    ),
    _result("blank-text", {"content": [{"type": "text", "text": " "}], "structuredContent": {"a": 1}}, '{"a": 1}'),
    # on stdout beside messages
    Answer("banner-before", "Server listening\n" + message_of(result={"content": [_A]}), "a"),
    # blocks
    _block("json", {"type": "json", "json": {"n": 1}}, 'a\n[json: {"json": {"n": 1}}]'),
    _block(
        "openai-image",
        {"type": "image_url", "image_url": {"url": "data:x"}},
        'a\n[image_url: {"image_url": {"url": "..."}}]',
    ),
    _block("text-null", {"type": "text", "text": None}, "a\n[text missing]"),
    _block("text-bare", "b", "a\nb", told="outside a block"),
    _block("image", {"type": "image", "data": _PNG, "mimeType": "image/png"}, _SHOWN, told=""),
    _block(
        "image-url",
        {"type": "image", "data": f"data:image/png;base64,{_PNG}", "mimeType": "image/png"},
        _SHOWN,
        told="",
    ),
    _block(
        "image-lines", {"type": "image", "data": f"{_PNG[:9]}\n{_PNG[9:]}", "mimeType": "image/png"}, _SHOWN, told=""
    ),
    _block(
        "link",
        {"type": "resource_link", "uri": "file:///b", "name": "b", "description": "Notes"},
        "a\n[resource b (file:///b): Notes]",
        told="",
    ),
    _block("resource", {"type": "resource", "resource": {"text": "b"}}, "a\nb", told=""),
]
