"""OpenAI's Responses API: requests, responses and streams."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentfactory.base.messages import Message
from agentfactory.rollout.gateway import request_options as options
from agentfactory.rollout.gateway.chat_completions import PING, SAMPLED_ONLY, error, token_logprobs
from agentfactory.rollout.gateway.request_options import GRAMMAR, Readers, Refusal, Reply, TurnRequest, wrong
from agentfactory.tools.images.lru_cache import ByteCache

__all__ = ["PING", "ROUTE", "error", "events", "failed", "read", "write"]

ROUTE = "/v1/responses"
_EMPTY: dict[str, dict[str, Any]] = {
    "message": {"content": []},
    "function_call": {"arguments": ""},
    "reasoning": {"content": []},
}
"""Type of an item -> its content at the start of a stream."""
_MOST_STORED = 1 << 27
"""Maximum number of characters of requests that are stored for later ones."""
_REFUSED = {
    "background": "responses are only sent when the turn is sampled",
    "conversation": "send the conversation, or previous_response_id",
    "prompt": "stored prompts are not supported",
    "top_logprobs": SAMPLED_ONLY,
}
_PARTS: Readers = {
    **dict.fromkeys(("input_text", "output_text", "text"), options.read_text),
    "input_image": lambda part: options.read_image(part.get("image_url")),
    "refusal": lambda part: None,
}


class Stored(ByteCache[str, list[dict[str, Any]]]):
    """A store of the items of conversations up to and including each recent response. Old responses are evicted, so
    that no client fills the memory; a character counts as a byte."""

    def __init__(self) -> None:
        super().__init__(_MOST_STORED)

    def by_id(self) -> dict[str, dict[str, Any]]:
        return {str(item.get("id")): item for items, _ in self._values.values() for item in items}


def read(body: Mapping[str, Any], temperature: float, stored: Stored) -> TurnRequest:
    options.refuse(body, _REFUSED)
    if ((body.get("text") or {}).get("format") or {"type": "text"}).get("type") != "text":
        raise wrong(f"text.format: {GRAMMAR}")
    given = body.get("input")
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list | None) or not all(isinstance(item, dict) for item in given or []):
        raise wrong(f"input: got {str(given)[:200]}; use a text, or a list of items")
    given, previous = given or [], body.get("previous_response_id")
    known = [] if previous is None else stored.get(str(previous))
    if known is None:
        raise Refusal(404, "previous_response_not_found", f"previous_response_id: unknown response {previous}")
    names = [str(item.get("id")) for item in given if item.get("type") == "item_reference"]
    by_id = stored.by_id() if names else {}
    if unknown := [name for name in names if name not in by_id]:
        raise Refusal(404, "item_not_found", f"input: unknown item {unknown[0]}")
    items = known + [by_id[str(item.get("id"))] if item.get("type") == "item_reference" else item for item in given]
    if not items:
        raise wrong("input: got none; use a text, or a list with at least one item")
    kept = body.get("store") is not False
    characters = len(json.dumps(given)) if kept else 0

    def remember(turns: Sequence[Reply]) -> None:
        if kept:
            stored.put(f"resp_{turns[0].id}", [*items, *_items(turns[0], "completed")], characters)

    instructions = options.read_content(body.get("instructions"), _PARTS)
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    return options.turn_request(
        body,
        temperature,
        [*messages, *_messages(items)],
        options.read_tools(body.get("tools"), body.get("tool_choice") != "none", "parameters", ["function"]),
        max_tokens=options.integer(body, "max_output_tokens"),
        options={"request": body, "logprobs": "message.output_text.logprobs" in (body.get("include") or [])},
        remember=remember,
    )


def _messages(items: Sequence[dict[str, Any]]) -> list[Message]:
    messages: list[Message] = []
    turn: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type") or "message"
        if kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant"):
            turn.append(item)
            continue
        if turn:
            messages.append(_turn(turn))
            turn = []
        messages.append(_message(kind, item))
    return [*messages, _turn(turn)] if turn else messages


def _turn(items: Sequence[dict[str, Any]]) -> Message:
    text, reasoning, calls = "", "", []
    for item in items:
        match item.get("type"):
            case "function_call":
                calls.append((str(item["call_id"]), str(item["name"]), item.get("arguments") or "{}"))
            case "reasoning":
                reasoning += "".join(part["text"] for part in (item.get("content") or item.get("summary") or []))
            case _:
                content = options.read_content(item.get("content"), _PARTS)
                text += content if isinstance(content, str) else ""
    return options.assistant(text, calls, reasoning)


def _message(kind: str, item: dict[str, Any]) -> Message:
    if kind == "function_call_output":
        content = options.read_content(item.get("output"), _PARTS)
        return {"role": "tool", "tool_call_id": str(item.get("call_id") or ""), "content": content}
    role = {"developer": "system"}.get(str(item.get("role")), item.get("role"))
    if kind != "message" or role not in ("system", "user"):
        raise wrong(f"input: items of type {kind!r} with role {item.get('role')!r} are not supported")
    return {"role": role, "content": options.read_content(item.get("content"), _PARTS)}


def write(turn_request: TurnRequest, turns: Sequence[Reply]) -> dict[str, Any]:
    (turn,) = turns
    status = "incomplete" if turn.cut else "completed"
    return {
        **_frame(turn_request, turn, status),
        "incomplete_details": {"reason": "max_output_tokens"} if turn.cut else None,
        "output": _items(turn, status),
        "usage": {
            "input_tokens": turn.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": turn.tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": turn.prompt_tokens + turn.tokens,
        },
    }


def events(turn_request: TurnRequest, turns: Sequence[Reply]) -> Iterator[str]:
    (turn,) = turns
    done = write(turn_request, turns)
    begun = {**_frame(turn_request, turn, "in_progress"), "output": [], "usage": None, "incomplete_details": None}
    made: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
    ]
    for place, item in enumerate(done["output"]):
        where = {"output_index": place, "item_id": item["id"]}
        started = {**item, **_EMPTY[item["type"]], "status": "in_progress"}
        made.append(("response.output_item.added", {"output_index": place, "item": started}))
        made += [(kind, {**where, **fields}) for kind, fields in _pieces(item)]
        made.append(("response.output_item.done", {"output_index": place, "item": item}))
    made.append((f"response.{done['status']}", {"response": done}))
    for number, (kind, fields) in enumerate(made):
        yield f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': number, **fields})}\n\n"


def _pieces(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    match item["type"]:
        case "function_call":
            arguments = item["arguments"]
            yield "response.function_call_arguments.delta", {"delta": arguments}
            yield "response.function_call_arguments.done", {"arguments": arguments, "name": item["name"]}
        case "message":
            (part,) = item["content"]
            where = {"content_index": 0}
            yield "response.content_part.added", {**where, "part": {**part, "text": ""}}
            with_logprobs = {**where, "logprobs": part["logprobs"]}
            yield "response.output_text.delta", {**with_logprobs, "delta": part["text"]}
            yield "response.output_text.done", {**with_logprobs, "text": part["text"]}
            yield "response.content_part.done", {**where, "part": part}
        case "reasoning":
            (part,) = item["content"]
            yield "response.reasoning_text.delta", {"content_index": 0, "delta": part["text"]}
            yield "response.reasoning_text.done", {"content_index": 0, "text": part["text"]}


def failed(refusal: Refusal) -> str:
    fields = {"type": "error", "sequence_number": 0, "code": refusal.code, "message": str(refusal), "param": None}
    return f"event: error\ndata: {json.dumps(fields)}\n\n"


def _frame(turn_request: TurnRequest, turn: Reply, status: str) -> dict[str, Any]:
    request = turn_request.options["request"]
    return {
        "id": f"resp_{turn.id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "instructions": request.get("instructions"),
        "max_output_tokens": request.get("max_output_tokens"),
        "metadata": request.get("metadata") or {},
        "model": turn_request.model,
        "parallel_tool_calls": True,
        "previous_response_id": request.get("previous_response_id"),
        "temperature": request.get("temperature"),
        "tool_choice": request.get("tool_choice") or "auto",
        "tools": request.get("tools") or [],
        "top_p": request.get("top_p"),
        "text": {"format": {"type": "text"}},
        "store": request.get("store", True),
    }


def _items(turn: Reply, status: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if turn.reasoning:
        content = [{"type": "reasoning_text", "text": turn.reasoning}]
        items.append({"id": f"rs_{turn.id}", "type": "reasoning", "summary": [], "content": content, "status": status})
    if turn.text or not turn.calls:
        part = {"type": "output_text", "text": turn.text, "annotations": [], "logprobs": token_logprobs(turn)}
        frame = {"id": f"msg_{turn.id}", "type": "message", "role": "assistant", "status": status}
        items.append({**frame, "content": [part]})
    items += [
        {
            "id": f"fc_{turn.id}_{place}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": json.dumps(call.arguments),
            "status": status,
        }
        for place, call in enumerate(turn.calls)
    ]
    return items
