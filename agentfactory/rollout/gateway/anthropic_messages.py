"""Anthropic's Messages API: requests, responses and streams."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentfactory.base.messages import Message
from agentfactory.rollout.gateway import request_options as options
from agentfactory.rollout.gateway.request_options import GRAMMAR, Part, Readers, Refusal, Reply, TurnRequest, wrong

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
        return options.read_image(f"data:{source['media_type']};base64,{source['data']}")
    return options.read_image(source.get("url"))


_PARTS: Readers = {"text": options.read_text, "image": _image}


def read(body: Mapping[str, Any], temperature: float, stored: Any) -> TurnRequest:
    options.refuse(body, _REFUSED)
    grammar = (body.get("output_config") or {}).get("format")
    options.refuse({"output_config.format": grammar}, {"output_config.format": GRAMMAR})
    system = options.read_content(body.get("system"), _PARTS)
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for message in options.messages_of(body):
        messages += _messages(message)
    choice = (body.get("tool_choice") or {"type": "auto"}).get("type")
    kinds = [None, "custom"]
    return options.turn_request(
        {**body, "tool_choice": {"type": choice}},
        temperature,
        messages,
        options.read_tools(body.get("tools"), choice != "none", "input_schema", kinds),
        max_tokens=options.integer(body, "max_tokens"),
        stop=options.stops(body.get("stop_sequences")),
        options={"thinking": (body.get("thinking") or {}).get("type") in ("enabled", "adaptive")},
    )


def _messages(message: dict[str, Any]) -> list[Message]:
    content, role = message.get("content"), message.get("role")
    if role == "system":
        return [{"role": "system", "content": options.read_content(content, _PARTS)}]
    if role not in ("user", "assistant"):
        raise wrong(f"messages: got the role {role!r}; use user or assistant")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content or []

    def of(kind: str) -> list[dict[str, Any]]:
        return [block for block in blocks if block.get("type") == kind]

    if role == "assistant":
        reasoning = "".join(block.get("thinking") or "" for block in of("thinking"))
        calls = [(block["id"], block["name"], block["input"]) for block in of("tool_use")]
        return [options.assistant("".join(block["text"] for block in of("text")), calls, reasoning)]
    messages: list[Message] = []
    for block in of("tool_result"):
        result = options.read_content(block.get("content"), _PARTS)
        messages.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id") or ""), "content": result})
    rest = [block for block in blocks if block.get("type") != "tool_result"]
    if rest or not messages:
        messages.append({"role": "user", "content": options.read_content(rest, _PARTS)})
    return messages


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
