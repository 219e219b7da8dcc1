"""Anthropic's Messages API: requests, responses and streams."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentfactory.base.messages import Message
from agentfactory.rollout.gateway.request_options import (
    GRAMMAR,
    Part,
    Readers,
    Refusal,
    Reply,
    TurnRequest,
    assistant,
    integer,
    read_content,
    read_image,
    read_text,
    read_tools,
    refuse,
    stops,
    unmet,
    wrong,
)

ROUTE = "/v1/messages"
_REFUSED = {
    "container": "run code in the agent's own tools",
    "thread": "send the whole conversation",
    "compaction": "ask for a summary in a message",
    "output_format": GRAMMAR,
}


def _image(block: Part) -> Part:
    source = block.get("source") or {}
    if source.get("type") == "base64":
        return read_image(f"data:{source['media_type']};base64,{source['data']}")
    return read_image(source.get("url"))


_PARTS: Readers = {"text": read_text, "image": _image}


def read(body: Mapping[str, Any], temperature: float, stored: Any) -> TurnRequest:
    refuse(body, _REFUSED)
    refuse({"output_config.format": (body.get("output_config") or {}).get("format")}, {"output_config.format": GRAMMAR})
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise wrong("messages: give a list with at least one message")
    system = read_content(body.get("system"), _PARTS)
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for message in given:
        messages += _messages(message)
    choice = body.get("tool_choice") or {"type": "auto"}
    specs, left_out = read_tools(body.get("tools"), choice.get("type") != "none", "input_schema", [None, "custom"])
    thinks = (body.get("thinking") or {}).get("type") in ("enabled", "adaptive")
    requested = {**body, "tool_choice": {"type": choice.get("type")}}
    return TurnRequest(
        messages,
        specs,
        str(body.get("model") or ""),
        integer(body, "max_tokens"),
        stops(body.get("stop_sequences")),
        1,
        bool(body.get("stream")),
        unmet(requested, temperature) | left_out,
        options={"thinking": thinks},
    )


def _messages(message: Any) -> list[Message]:
    if not isinstance(message, dict):
        raise wrong(f"messages: got {str(message)[:200]}; use objects with a role")
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    role = message.get("role")
    if role == "assistant":
        text = "".join(block["text"] for block in blocks if block.get("type") == "text")
        reasoning = "".join(block.get("thinking") or "" for block in blocks if block.get("type") == "thinking")
        calls = [(block["id"], block["name"], block["input"]) for block in blocks if block.get("type") == "tool_use"]
        return [assistant(text, calls, reasoning)]
    if role == "system":
        return [{"role": "system", "content": read_content(content, _PARTS)}]
    if role != "user":
        raise wrong(f"messages: got the role {role!r}; use user or assistant")
    results: list[Message] = [
        {
            "role": "tool",
            "tool_call_id": str(block.get("tool_use_id") or ""),
            "content": read_content(block.get("content"), _PARTS),
        }
        for block in blocks
        if block.get("type") == "tool_result"
    ]
    rest = [block for block in blocks if block.get("type") != "tool_result"]
    user_message: list[Message] = (
        [{"role": "user", "content": read_content(rest, _PARTS)}] if rest or not results else []
    )
    return [*results, *user_message]


def write(turn_request: TurnRequest, turns: Sequence[Reply]) -> dict[str, Any]:
    (turn,) = turns
    return {
        **_frame(turn_request, turn),
        "content": _blocks(turn_request, turn),
        "stop_reason": _reason(turn),
        "stop_sequence": turn.stop,
        "usage": {**_used(turn), "output_tokens": turn.tokens},
    }


def events(turn_request: TurnRequest, turns: Sequence[Reply]) -> Iterator[str]:
    (turn,) = turns
    begun = {**_frame(turn_request, turn), "content": [], "stop_reason": None, "stop_sequence": None}
    yield _event("message_start", message={**begun, "usage": {**_used(turn), "output_tokens": 0}})
    for place, block in enumerate(_blocks(turn_request, turn)):
        for kind, fields in _pieces(block):
            yield _event(kind, index=place, **fields)
    ended = {"stop_reason": _reason(turn), "stop_sequence": turn.stop}
    yield _event("message_delta", delta=ended, usage={"output_tokens": turn.tokens})
    yield _event("message_stop")


def _pieces(block: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    match block["type"]:
        case "text":
            yield "content_block_start", {"content_block": {"type": "text", "text": ""}}
            yield "content_block_delta", {"delta": {"type": "text_delta", "text": block["text"]}}
        case "thinking":
            yield "content_block_start", {"content_block": {"type": "thinking", "thinking": "", "signature": ""}}
            yield "content_block_delta", {"delta": {"type": "thinking_delta", "thinking": block["thinking"]}}
            yield "content_block_delta", {"delta": {"type": "signature_delta", "signature": block["signature"]}}
        case _:
            yield "content_block_start", {"content_block": {**block, "input": {}}}
            text = json.dumps(block["input"])
            yield "content_block_delta", {"delta": {"type": "input_json_delta", "partial_json": text}}
    yield "content_block_stop", {}


def error(refusal: Refusal) -> dict[str, Any]:
    kinds = {
        400: "invalid_request_error",
        401: "authentication_error",
        404: "not_found_error",
        413: "request_too_large",
    }
    text = str(refusal)
    if refusal.code == "context_length_exceeded":
        text = f"prompt is too long: {text}"  # clients recognise this text
    return {"type": "error", "error": {"type": kinds.get(refusal.status, "api_error"), "message": text}}


def failed(refusal: Refusal) -> str:
    return f"event: error\ndata: {json.dumps(error(refusal))}\n\n"


PING = 'event: ping\ndata: {"type": "ping"}\n\n'


def _frame(turn_request: TurnRequest, turn: Reply) -> dict[str, Any]:
    return {"id": f"msg_{turn.id}", "type": "message", "role": "assistant", "model": turn_request.model}


def _used(turn: Reply) -> dict[str, int]:
    return {"input_tokens": turn.prompt_tokens, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def _blocks(turn_request: TurnRequest, turn: Reply) -> list[dict[str, Any]]:
    """Return the blocks of a turn. Only clients that enable thinking get reasoning; they return its signature."""
    blocks: list[dict[str, Any]] = []
    if turn.reasoning and turn_request.options["thinking"]:
        blocks.append({"type": "thinking", "thinking": turn.reasoning, "signature": turn.id})
    if turn.text:
        blocks.append({"type": "text", "text": turn.text})
    blocks += [{"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in turn.calls]
    return blocks


def _reason(turn: Reply) -> str:
    if turn.stop is not None:
        return "stop_sequence"
    return "max_tokens" if turn.cut else "tool_use" if turn.calls else "end_turn"


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"
