"""Request parameters and message parts, normalized across protocols.

The recipe determines sampling: the trainer divides its logits by `rollout.temperature`, and the server's logprobs must
cover the whole vocabulary. Token limits and stop strings only end a turn earlier, so they are honoured. What changes
the token distribution is not applied, with a warning; what an agent relies on, such as a JSON schema, is refused."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentfactory.base.messages import Content, Message, ToolCall, ToolSpec
from agentfactory.rollout.images.parts import image_part, text_part

MOST_CHOICES = 64
GRAMMAR = (
    "a grammar changes the distribution that tokens are sampled from, so they cannot be trained; request the format in "
    "the prompt, or by a tool"
)
_IS_DEFAULT: dict[str, tuple[Any, ...]] = {
    "seed": (),
    "top_p": (1,),
    "top_k": (0, -1),
    **dict.fromkeys(("min_p", "frequency_penalty", "presence_penalty"), (0,)),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "tool_choice": ("auto", "none", {"type": "auto"}, {"type": "none"}),
    "parallel_tool_calls": (True,),
    **dict.fromkeys(("reasoning_effort", "reasoning.effort", "output_config.effort"), ()),
    **dict.fromkeys(("verbosity", "text.verbosity"), ("medium",)),
    "truncation": ("disabled",),
    "context_management": ({}, []),
    "web_search_options": (),
    "mcp_servers": ([],),
}
"""Parameters that are not applied -> values that need no warning."""


class Refusal(Exception):
    """A refused request: HTTP status, a machine-readable code, and the problem."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def too_long(longest: int, problem: str) -> Refusal:
    """Return the refusal of a conversation that does not fit `longest` tokens, in words that clients recognize."""
    limit = f"This model's maximum context length is {longest} tokens"
    return Refusal(400, "context_length_exceeded", f"{limit}; the conversation leaves no room: {problem}")


@dataclass(frozen=True)
class TurnRequest:
    """A request for the next turn of a conversation. `unmet` are parameters that are not applied, with their values."""

    messages: list[Message]
    specs: list[ToolSpec] = field(default_factory=list)
    model: str = ""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    choices: int = 1
    stream: bool = False
    unmet: dict[str, Any] = field(default_factory=dict)
    session: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that only affect the protocol's response."""
    remember: Callable[[Sequence["Reply"]], None] = lambda turns: None
    """Callback that gets the sampled turns."""


@dataclass(frozen=True)
class Reply:
    """A sampled turn for the agent. `stop` is the stop string that ended it. `prompt_tokens` is its prompt's length."""

    id: str
    text: str
    reasoning: str
    calls: list[ToolCall]
    cut: bool
    stop: str | None
    prompt_tokens: int
    tokens: int
    logprobs: list[tuple[str, float]]
    """(text, logprob) of each token; empty if not requested."""


def wrong(message: str) -> Refusal:
    """Return the refusal of a request that is invalid or unsupported, with status 400."""
    return Refusal(400, "invalid_request", message)


def foreign_key() -> Refusal:
    """Return the refusal of a key that belongs to no running chain."""
    return Refusal(401, "invalid_api_key", "this key belongs to no running chain")


def _value_of(body: Mapping[str, Any], name: str) -> Any:
    first, _, second = name.partition(".")
    value = body.get(first)
    return value if not second else value.get(second) if isinstance(value, dict) else None


def messages_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the `messages` of a request. Raise Refusal unless they are a list with at least one object."""
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise wrong("messages: give a list with at least one message")
    for message in given:
        if not isinstance(message, dict):
            raise wrong(f"messages: got {str(message)[:200]}; use objects with a role")
    return given


def turn_request(
    body: Mapping[str, Any],
    temperature: float,
    messages: list[Message],
    tools: tuple[list[ToolSpec], dict[str, Any]],
    **fields: Any,
) -> TurnRequest:
    """Return the request for a turn with the fields that all protocols have; `tools` are as `read_tools` returns."""
    specs, left_out = tools
    values = {name: _value_of(body, name) for name in _IS_DEFAULT}
    told = {name: value for name, value in values.items() if value is not None and value not in _IS_DEFAULT[name]}
    if (requested := body.get("temperature")) is not None and requested != temperature:
        told = {"temperature": requested, **told}
    named = str(body.get("model") or "")
    return TurnRequest(messages, specs, named, stream=bool(body.get("stream")), unmet=told | left_out, **fields)


def refuse(body: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    """Raise Refusal if a parameter with a reason in `reasons` is set."""
    for name, reason in reasons.items():
        if body.get(name):
            raise wrong(f"{name}: got {str(body[name])[:200]}; {reason}")


def integer(body: Mapping[str, Any], name: str, most: int | None = None) -> int | None:
    """Return a positive integer of at most `most`, or None if it is not given. Raise Refusal if it is invalid."""
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or value < 1 or (most is not None and value > most):
        raise wrong(f"{name}: got {value!r}; use a whole number from 1{'' if most is None else f' to {most}'}")
    return value


_MOST_STOPS, _STOP_CHARACTERS = 64, 10_000
"""Limits on stop strings, because each sampled token is compared with all of them."""


def stops(value: Any) -> tuple[str, ...]:
    """Return the stop strings in `value`: a text, a list of texts, or None. Raise Refusal if it is invalid."""
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise wrong(f"stop: got {value!r:.200}; use a text, or a list of texts")
    if len(found) > _MOST_STOPS or sum(map(len, found)) > _STOP_CHARACTERS:
        problem = f"stop: got {len(found)} texts of {sum(map(len, found))} characters"
        raise wrong(f"{problem}; use at most {_MOST_STOPS}, of {_STOP_CHARACTERS} together")
    for text in found:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise wrong(f"stop: got {text!r}, which cannot be encoded as UTF-8: {error}") from None
    return tuple(text for text in found if text)


def read_tools(
    tools: Any, may_call: bool, schema: str, kinds: Sequence[str | None], key: str | None = None
) -> tuple[list[ToolSpec], dict[str, Any]]:
    """Return the functions among a request's tools (of the types `kinds`), none unless the model `may_call` them, and
    the other tools as unmet parameters. `key` holds a tool's function (None: it is the tool itself), and `schema` its
    JSON schema. Raise Refusal if they are invalid."""
    if not isinstance(tools, list | None):
        raise wrong(f"tools: got {str(tools)[:200]}; use a list")
    specs = []
    for tool in tools or []:
        if may_call and tool.get("type") in kinds:
            given = tool if key is None else tool[key]
            if not isinstance(name := given.get("name"), str):
                raise wrong(f"tools: {str(given)[:200]} has no name")
            parameters = given.get(schema) or {"type": "object", "properties": {}}
            specs.append(ToolSpec(name, given.get("description") or "", parameters))
    left_out = [tool for tool in tools or [] if tool.get("type") not in kinds]
    return specs, {"tools": left_out} if left_out else {}


Part = dict[str, Any]
Readers = Mapping[Any, Callable[[Part], Part | None]]
"""Type of a part in a protocol -> the conversion to our part; None drops it."""


def read_content(content: Any, readers: Readers) -> Content:
    """Convert message content to our format: text if it has no images. Raise Refusal if it is invalid."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong(f"content: got {str(content)[:200]}; use a text, or a list of parts")
    parts: list[Part] = []
    for given in content:
        if isinstance(given, str):
            parts.append(text_part(given))
            continue
        if not isinstance(given, dict):
            raise wrong(f"content: got the part {str(given)[:200]}; use an object with a type")
        if (read := readers.get(given.get("type"))) is None:
            raise wrong(f"content: parts of type {given.get('type')!r} are not supported; send text or images")
        if (part := read(given)) is not None:
            parts.append(part)
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def read_text(part: Mapping[str, Any]) -> Part:
    """Return a text part. Raise Refusal if it has no text."""
    if not isinstance(text := part.get("text"), str):
        raise wrong(f"content: {str(part)[:200]} has no text")
    return text_part(text)


def read_image(url: Any) -> Part:
    """Return an image part for a `data:` address. Raise Refusal for other addresses, which are never fetched."""
    if not isinstance(url, str) or not url.startswith("data:"):
        raise wrong(f"image: {str(url)[:200]} is not fetched; send the image itself, as a data: address")
    return image_part(url)


def assistant(text: str, calls: list[tuple[str, str, Any]], reasoning: str = "") -> Message:
    """Return an assistant message. `calls` are (id, name, arguments), arguments as a value or as JSON text."""
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": key, "type": "function", "function": {"name": name, "arguments": _value(arguments)}}
            for key, name, arguments in calls
        ]
    return message


def _value(arguments: Any) -> Any:
    """Return arguments as chat templates expect them; text that is not a JSON object stays text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments, strict=False) if arguments else {}
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
