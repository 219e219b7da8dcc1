"""Messages of other projects in our form: the one of OpenAI, with the arguments of calls as objects."""

from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from agentfactory.base.messages import Content, Message

TEXT = "arguments"
"""Name of the only argument of a call whose arguments are no JSON object: their text."""


def messages_of(said: Any, role: str) -> list[Message]:
    """Return a list of messages, or one text as a message of `role`, in our form. Raise ValueError at anything else."""
    if said is None:
        return []
    if isinstance(said, str):
        return [{"role": role, "content": said}]
    if not isinstance(said, list):
        raise ValueError(f"got {said!r:.80} for messages")
    return [_message(each) for each in said]


def named(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which each call has an id and each result that of its call. Some projects save neither; then
    results answer the calls of the turn before them in order, first those of the same tool."""
    found, open_calls, count = [], list[dict[str, Any]](), 0
    for message in messages:
        if message["role"] == "assistant":
            open_calls = []
            for call in message.get("tool_calls") or []:
                count += 1
                call["id"] = call.get("id") or f"call-{count}"
                open_calls.append(call)
        elif message["role"] == "tool" and open_calls:
            answered = message.get("tool_call_id")
            if answered is None:
                alike = [call for call in open_calls if call["function"]["name"] == message.get("name")]
                answered = (alike or open_calls)[0]["id"]
                message = {**message, "tool_call_id": answered}
            name = next((call["function"]["name"] for call in open_calls if call["id"] == answered), None)
            if name is not None and not message.get("name"):
                message = {**message, "name": name}
            open_calls = [call for call in open_calls if call["id"] != answered]
        found.append(message)
    return found


def _message(said: Any) -> Message:
    if not isinstance(said, dict) or not isinstance(said.get("role"), str):
        raise ValueError(f"got {said!r:.80} for a message, which has no role")
    message: Message = {"role": said["role"], "content": _content(said.get("content"))}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(said.get(name), str) and said[name]:
            message[name] = said[name]
    if calls := said.get("tool_calls"):
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _content(content: Any) -> Content:
    """Return a content; parts other than texts and images with an address become a note."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ValueError(f"got {content!r:.80} for the content of a message")
    parts: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type", "part") if isinstance(part, dict) else "part"
        if kind == "text":
            parts.append({"type": "text", "text": str(part.get("text") or "")})
        elif kind == "image_url" and isinstance((part.get("image_url") or {}).get("url"), str):
            parts.append({"type": "image_url", "image_url": {"url": part["image_url"]["url"]}})
        else:
            parts.append({"type": "text", "text": f"[{kind}]"})
    return parts


def _call(call: Any) -> dict[str, Any]:
    # verifiers up to 0.3 saves each call as a text
    call = from_json(call) if isinstance(call, str) else call
    if not isinstance(call, dict):
        raise ValueError(f"got {call!r:.80} for a tool call")
    function = call.get("function") or call
    name = function.get("name")
    if not isinstance(name, str):
        raise ValueError(f"got {call!r:.80} for a tool call, which has no name")
    found = {"type": "function", "function": {"name": name, "arguments": _arguments(function.get("arguments"))}}
    return {"id": call["id"], **found} if isinstance(call.get("id"), str) else found


def _arguments(given: Any) -> dict[str, Any]:
    if isinstance(given, str):
        try:
            parsed = from_json(given) if given.strip() else {}
        except ValueError:
            parsed = None
        given = parsed if isinstance(parsed, dict) else {TEXT: given}
    return given if isinstance(given, dict) else {} if given is None else {TEXT: given}
