"""OpenAI's Chat Completions API: requests, responses and streams."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentfactory.base.messages import Message
from agentfactory.rollout.gateway import request_options as options
from agentfactory.rollout.gateway.request_options import GRAMMAR, Part, Readers, Refusal, Reply, TurnRequest, wrong

ROUTE = "/v1/chat/completions"
SAMPLED_ONLY = "only the sampled token's logprob is known; remove it"
_WORDS = "only text output is supported"
_REFUSED = {
    **dict.fromkeys(("functions", "function_call"), "use `tools`"),
    "audio": _WORDS,
    "top_logprobs": SAMPLED_ONLY,
}


def _image(part: Part) -> Part:
    image = part.get("image_url")
    return options.read_image(image.get("url") if isinstance(image, dict) else image)


_PARTS: Readers = {"text": options.read_text, "image_url": _image, "refusal": lambda part: None}


def read(body: Mapping[str, Any], temperature: float, stored: Any) -> TurnRequest:
    options.refuse(body, _REFUSED)
    if (body.get("response_format") or {"type": "text"}).get("type") != "text":
        raise wrong(f"response_format: {GRAMMAR}")
    if (body.get("modalities") or ["text"]) != ["text"]:
        raise wrong(f"modalities: got {str(body['modalities'])[:200]}; {_WORDS}")
    may_call = body.get("tool_choice") != "none"
    return options.turn_request(
        body,
        temperature,
        [_message(message) for message in options.messages_of(body)],
        options.read_tools(body.get("tools"), may_call, "parameters", ["function"], "function"),
        max_tokens=options.integer(body, "max_completion_tokens") or options.integer(body, "max_tokens"),
        stop=options.stops(body.get("stop")),
        choices=options.integer(body, "n", options.MOST_CHOICES) or 1,
        options={
            "logprobs": bool(body.get("logprobs")),
            "usage": bool((body.get("stream_options") or {}).get("include_usage")),
        },
    )


def _message(message: dict[str, Any]) -> Message:
    content = options.read_content(message.get("content"), _PARTS)
    match message.get("role"):
        case "system" | "developer":
            return {"role": "system", "content": content}
        case "user":
            return {"role": "user", "content": content}
        case "tool":
            return {"role": "tool", "tool_call_id": str(message.get("tool_call_id") or ""), "content": content}
        case "assistant":
            calls = [
                (str(call.get("id") or ""), call["function"]["name"], call["function"].get("arguments") or "{}")
                for call in message.get("tool_calls") or []
            ]
            text = content if isinstance(content, str) else ""
            reasoning = message.get("reasoning_content") or message.get("reasoning")
            return options.assistant(text, calls, reasoning if isinstance(reasoning, str) else "")
        case role:
            raise wrong(f"messages: got the role {role!r}; use system, developer, user, assistant or tool")


def write(turn_request: TurnRequest, turns: Sequence[Reply]) -> dict[str, Any]:
    choices = [
        {
            "index": n,
            "message": _reply_message(turn),
            "logprobs": _logprobs(turn_request, turn),
            "finish_reason": _reason(turn),
        }
        for n, turn in enumerate(turns)
    ]
    return {**_frame(turn_request, turns, "chat.completion"), "choices": choices, "usage": _usage(turns)}


def events(turn_request: TurnRequest, turns: Sequence[Reply]) -> Iterator[str]:
    frame = _frame(turn_request, turns, "chat.completion.chunk")
    frame |= {"usage": None} if turn_request.options["usage"] else {}

    def chunk(number: int, delta: dict[str, Any], **more: Any) -> str:
        choice = {"index": number, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return f"data: {json.dumps({**frame, 'choices': [choice]})}\n\n"

    for number, turn in enumerate(turns):
        yield chunk(number, {"role": "assistant", "content": ""})
        if turn.reasoning:
            yield chunk(number, {"reasoning_content": turn.reasoning})
        if turn.text:
            yield chunk(number, {"content": turn.text}, logprobs=_logprobs(turn_request, turn))
        for place, call in enumerate(_calls(turn)):
            function = call["function"]
            begun = {**call, "index": place, "function": {"name": function["name"], "arguments": ""}}
            yield chunk(number, {"tool_calls": [begun]})
            yield chunk(number, {"tool_calls": [{"index": place, "function": {"arguments": function["arguments"]}}]})
        yield chunk(number, {}, finish_reason=_reason(turn))
    if turn_request.options["usage"]:
        yield f"data: {json.dumps({**frame, 'choices': [], 'usage': _usage(turns)})}\n\n"
    yield "data: [DONE]\n\n"


def error(refusal: Refusal) -> dict[str, Any]:
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {"error": {"message": str(refusal), "type": kind, "param": None, "code": refusal.code}}


def failed(refusal: Refusal) -> str:
    return f"data: {json.dumps(error(refusal))}\n\n"


PING = ": sampling\n\n"


def _frame(turn_request: TurnRequest, turns: Sequence[Reply], kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{turns[0].id}", "object": kind, "created": int(time.time()), "model": turn_request.model}


def _reply_message(turn: Reply) -> dict[str, Any]:
    message = {"role": "assistant", "content": turn.text or (None if turn.calls else ""), "refusal": None}
    reasoning = {"reasoning_content": turn.reasoning} if turn.reasoning else {}
    return message | reasoning | ({"tool_calls": _calls(turn)} if turn.calls else {})


def _calls(turn: Reply) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for call in turn.calls
    ]


def _reason(turn: Reply) -> str:
    return "length" if turn.cut else "tool_calls" if turn.calls else "stop"


def _usage(turns: Sequence[Reply]) -> dict[str, Any]:
    prompt, sampled = turns[0].prompt_tokens, sum(turn.tokens for turn in turns)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _logprobs(turn_request: TurnRequest, turn: Reply) -> dict[str, Any] | None:
    if not turn_request.options["logprobs"]:
        return None
    return {"content": token_logprobs(turn), "refusal": None}


def token_logprobs(turn: Reply) -> list[dict[str, Any]]:
    """Return the logprobs of a turn's tokens in OpenAI's format; empty if the request did not ask for them."""
    return [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in turn.logprobs
    ]
