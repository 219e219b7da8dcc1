"""Messages, calls and tools of rows in the OpenAI format, checked and brought to our form; fixes for other layouts."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from agentfactory.base.errors import short
from agentfactory.base.messages import Message, ToolSpec, is_finite_number, text_of
from agentfactory.rollout.data import nulls
from agentfactory.rollout.data.nulls import Nulls, count_nulls, drop_from_message
from agentfactory.tools.calls.argument_check import ArgumentCheck, UncheckedError

_PAGE = "the function in docs/data.md, Rows of other projects"
FROM_AND_VALUE = f"from and value are ShareGPT's: set data.source to {_PAGE}, from_sharegpt"
_TURNS = f"set data.source to {_PAGE}, from_turns"
_SWIFT = f"the role is ms-swift's: set data.source to {_PAGE}, from_swift"
ROLE_FIXES = {
    "human": "rename it to user",
    **dict.fromkeys(("gpt", "bot", "model"), "rename it to assistant"),
    **dict.fromkeys(("function", "observation", "ipython"), "rename it to tool"),
    **dict.fromkeys(("tool_call", "tool_response"), _SWIFT),
    "function_call": f"the role is LLaMA-Factory's: set data.source to {_PAGE}, from_sharegpt",
}
_TURNS_OF_MODELS = ("completion", "response", "output")
_ANSWERS = (*_TURNS_OF_MODELS, "answer", "solution")
_PREFERENCES = ("chosen", "rejected", "rejected_response")


def is_messages(value: Any) -> bool:
    """Return whether a value is a list of objects that all have `role` and `content`."""
    return _is_list_of(value, "role", "content")


def _is_list_of(value: Any, *keys: str) -> bool:
    return isinstance(value, list) and bool(value) and all(_has_keys(each, *keys) for each in value)


def _has_keys(value: Any, *keys: str) -> bool:
    return isinstance(value, dict) and value.keys() >= set(keys)


def fix_for_task(row: dict[str, Any]) -> str:
    """Return the fix for a row that has neither `question` nor `messages`."""
    if any(_is_list_of(value, "from", "value") for value in row.values()):
        return FROM_AND_VALUE
    lists = [name for name, value in row.items() if is_messages(value) and name not in (*_PREFERENCES, "completion")]
    if lists and is_messages(row.get("completion")):
        return f"{_TURNS} (for reinforcement learning: data.columns.messages={lists[0]})"
    if lists:
        return f"rename it with data.columns.messages={lists[0]}"
    prompts = ("prompt", "query", "problem", "instruction", "input")
    texts = [name for name in prompts if isinstance(row.get(name), str)]
    if texts:
        rename = f"rename it with data.columns.question={texts[0]}"
        return f"{rename}; for sft: {_TURNS}" if any(name in row for name in _TURNS_OF_MODELS) else rename
    if "chosen" in row:
        sft = "; for sft: data.columns.messages=chosen" if is_messages(row["chosen"]) else ""
        return f"name other data: no algorithm learns preferences{sft}"
    if "input_ids" in row:
        return "name the data before its tokenization: rows of token ids are not read"
    if "text" in row:
        return "rename it with data.columns.question=text if it is a prompt; sft learns messages, not whole texts"
    return "rename one with data.columns, such as data.columns.question=problem"


def fix_for_conversation(row: dict[str, Any]) -> str:
    """Return the fix for a row of supervised fine-tuning that has no `messages`."""
    if any(_is_list_of(value, "from", "value") for value in row.values()):
        return FROM_AND_VALUE
    fix = _TURNS if any(name in row for name in _ANSWERS) else "name a file of them"
    return f"sft learns conversations: {fix}"


_ROLES = ("system", "developer", "user", "assistant", "tool")
_FIELDS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "weight", "info"}
_TOOL_KEYS = {"type", "function", "name", "description", "parameters"}
_CALL_KEYS = {"id", "type", "index", "function", "name", "arguments"}
_OF_THE_LOSS = ("loss", "loss_mask", "loss_weight", "mask", "train", "trainable", "training")
_REFUSED = {
    "function_call": "write tool_calls: [{function: {name: ..., arguments: {...}}}]",
    **dict.fromkeys(_OF_THE_LOSS, "write weight: 1 or 0"),
}
"""Other projects' fields that change the learned messages -> fix."""
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
HALF = "half of a surrogate pair, which is no character; remove it"
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass
class Findings:
    """The losses of a row: nulls, fields that only a template may read, and keys of tools and calls no model sees."""

    nulls: Nulls = field(default_factory=Nulls)
    fields: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)
    call_keys: set[str] = field(default_factory=set)


Tools = Mapping[str, ToolSpec]
"""The tools that a row describes, by name, which its calls are checked against."""


def _fault(tools: Tools, name: str, arguments: dict[str, Any]) -> str | None:
    """Return why tools refuse a call; None if they do not, or if the schema cannot be checked."""
    if name not in tools:
        return f"there is no tool {name!r} among the row's tools ({', '.join(tools)})"
    try:
        problem = _check(json.dumps(tools[name].parameters)).fault(arguments)
    except UncheckedError:
        return None
    shown = problem and problem.removeprefix("the arguments: ")[:300]
    return shown and f"the row's tool {name!r} refuses these arguments: {shown}"


@lru_cache(256)
def _check(schema: str) -> ArgumentCheck:
    return ArgumentCheck(json.loads(schema))


def parse_json_column(value: Any, column: str) -> Any:
    """Return the value of a column that may be JSON text, as in CSV files; None for blank text."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError(f"{column}: got {short(value)}, which is not JSON") from None


def specs_of(tools: Any, findings: Findings | None = None, columnar: bool = False) -> list[ToolSpec]:
    """Return the tools of a row: a list in the OpenAI format, or its JSON text. Raise ValueError for anything else."""
    tools = parse_json_column(tools, "tools")
    if tools is None:
        return []
    _require(isinstance(tools, list), "tools", tools, "not a list of {type: function, function: {name: ...}}")
    findings = findings or Findings()
    specs = [_spec(tool, f"tools.{number}", findings, columnar) for number, tool in enumerate(tools)]
    names = [spec.name for spec in specs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"tools: two of them have the name {twice[0]!r}")
    return specs


def _spec(tool: Any, place: str, findings: Findings, columnar: bool) -> ToolSpec:
    tool = parse_json_column(tool, place)
    given = _function_of(tool)
    form = "{type: function, function: {name: ..., description: ..., parameters: ...}}"
    _require(_is_named(given), place, tool, f"which is not in the OpenAI format: {form}")
    given = drop_from_message(given, findings.nulls)
    beside = {} if tool.get("function") is None else {key: value for key, value in tool.items() if value is not None}
    _require(beside.get("type", "function") == "function", f"{place}.type", beside.get("type"), "not function")
    for other in ("input_schema", "inputSchema"):  # of Anthropic and MCP
        if other in given and "parameters" not in given:
            given["parameters"] = given.pop(other)
    parameters = parse_json_column(given.get("parameters", _NO_PARAMETERS), f"{place}.parameters")
    _require(isinstance(parameters, dict), f"{place}.parameters", parameters, "not a JSON Schema of type object")
    description = given.get("description", "")
    _require(isinstance(description, str), f"{place}.description", description, "not text")
    if has_half_surrogate(given):
        raise ValueError(f"{place}: it has {HALF}")
    findings.keys |= {*given, *beside} - _TOOL_KEYS
    if count_nulls(parameters):
        parameters = nulls.drop_from_schema(parameters, findings.nulls, columnar)
    return ToolSpec(given["name"], description, parameters)


def clean_messages(messages: Any, tools: Tools, findings: Findings) -> list[Message]:
    """Return messages in the OpenAI format with call arguments as objects, without padding nulls. Raise ValueError with
    the message and the field for anything else, and for a call that `tools` refuse, except of weight 0."""
    if isinstance(messages, str) and messages.lstrip().startswith("["):
        messages = parse_json_column(messages, "messages")
    is_list = isinstance(messages, list) and bool(messages)
    _require(is_list, "messages", messages, "not a list of {role: ..., content: ...}")
    cleaned = [_message(message, f"messages.{number}", tools, findings) for number, message in enumerate(messages)]
    return _in_the_order_of_calls(cleaned)


def _in_the_order_of_calls(messages: Sequence[Message]) -> list[Message]:
    """Return messages with the results of each turn in the order of its calls, since many chat templates write no ids.
    Raise ValueError unless the calls of each turn but the last are followed by their results, one for each."""
    places: list[tuple[int, int]] = []
    """Per message, the number of its turn, and of its call in the turn."""
    waiting: dict[int, dict[str, Any]] = {}
    made: int | None = None
    named = False
    for number, message in enumerate(messages):
        place = f"messages.{number}"
        if message["role"] == "tool":
            given = message.get("tool_call_id")
            if not waiting and (given is not None or made is None):
                raise ValueError(f"{place}: it is the result of no call; remove it, or add the call to the turn before")
            if not waiting:  # tells a model that its call was malformed
                places.append((number, 0))
                continue
            ids = {index: call.get("id") for index, call in waiting.items()}
            if given is not None and None not in ids.values() and given not in ids.values():
                known = ", ".join(map(repr, ids.values()))
                raise ValueError(f"{place}.tool_call_id: got {given!r}, but the calls without a result are {known}")
            index = next((index for index, own in ids.items() if own == given), min(ids))
            called = waiting.pop(index)["function"]["name"]
            if message.get("name", called) != called:
                raise ValueError(f"{place}.name: got {message['name']!r}, but the call is of {called!r}")
            places.append((made or 0, index + 1 if named else number))
            continue
        if waiting:
            left = f"{len(waiting)} of the calls in messages.{made} have no result before {place}"
            raise ValueError(f"{left}; add messages of the role tool, or remove the calls")
        made = number if message["role"] == "assistant" else None
        waiting = dict(enumerate(message.get("tool_calls", ())))
        named = all("id" in call for call in waiting.values())
        places.append((number, 0))
    return [message for _, message in sorted(zip(places, messages, strict=True), key=lambda pair: pair[0])]


def _message(message: Any, place: str, tools: Tools, findings: Findings) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        hint = f"; {FROM_AND_VALUE}" if _has_keys(message, "from", "value") else ""
        raise ValueError(f"{place}: got {short(message)}, not {{role: ..., content: ...}}{hint}")
    role = message["role"]
    if role not in _ROLES:
        known = role.strip().lower() in _ROLES
        fix = f"; {ROLE_FIXES[role]}" if role in ROLE_FIXES else f"; rename it to {role.strip().lower()}" * known
        raise ValueError(f"{place}.role: got {short(role)}, not one of {', '.join(_ROLES)}{fix}")
    message = drop_from_message(message, findings.nulls)
    if role == "developer":  # OpenAI's newer name, which few chat templates know
        message["role"] = "system"
    for name, fix in _REFUSED.items():
        if name in message:
            raise ValueError(f"{place}.{name}: got {short(message[name])}, which is not read; {fix}")
    for name in ("reasoning", "thinking"):
        if role == "assistant" and isinstance(message.get(name), str) and "reasoning_content" not in message:
            message["reasoning_content"] = message.pop(name)
    reasoning, weight = message.get("reasoning_content", ""), message.get("weight", 1)
    _require(isinstance(reasoning, str), f"{place}.reasoning_content", reasoning, "not text")
    is_weight = is_finite_number(weight) and weight >= 0
    _require(is_weight, f"{place}.weight", weight, "not a number of at least 0")
    for name in ("name", "tool_call_id"):
        _require(isinstance(message.get(name, ""), str | int), f"{place}.{name}", message.get(name), "not text")
    calls = parse_json_column(message.pop("tool_calls", None), f"{place}.tool_calls")
    if calls not in (None, []):
        if role != "assistant":
            problem = f"a message of the role {role!r} has calls; only an assistant makes them"
            raise ValueError(f"{place}.tool_calls: {problem}")
        message["tool_calls"] = _calls(calls, f"{place}.tool_calls", tools, bool(weight), findings)
    content = message.get("content")
    if content is None and "tool_calls" in message:
        content = message["content"] = ""
    if role == "assistant" and is_text_parts(content):
        # models write text: their own turns have no parts
        content = message["content"] = text_of(content)
    _require(isinstance(content, str | list), f"{place}.content", content, "not text or a list of parts")
    if has_half_surrogate([content, reasoning]):
        raise ValueError(f"{place}: it has {HALF}")
    findings.fields |= message.keys() - _FIELDS
    return message


def _require(fits: bool, place: str, value: Any, wrong: str) -> None:
    if not fits:
        raise ValueError(f"{place}: got {short(value)}, {wrong}")


def is_text_parts(content: Any) -> bool:
    return isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    )


def _calls(calls: Any, place: str, tools: Tools, learned: bool, findings: Findings) -> list[dict[str, Any]]:
    _require(isinstance(calls, list), place, calls, "not a list of {function: {name: ..., arguments: ...}}")
    cleaned = []
    for number, given in enumerate(calls):
        call = _call(given, f"{place}.{number}", findings)
        call = nulls.drop_from_call(call, tools, findings.nulls)
        function = call["function"]
        if tools and learned and (fault := _fault(tools, function["name"], function["arguments"])):
            raise ValueError(f"{place}.{number}: {fault}")
        cleaned.append(call)
    return cleaned


def _function_of(entry: Any) -> Any:
    """Return the object with the name of a call or a tool, which may have no level `function`."""
    nested = entry.get("function") if isinstance(entry, dict) else None
    return entry if nested is None else nested


def _is_named(function: Any) -> bool:
    return isinstance(function, dict) and isinstance(function.get("name"), str) and bool(function["name"])


def _call(call: Any, place: str, findings: Findings) -> dict[str, Any]:
    """Return a call with its arguments as an object; they may be JSON text, as in OpenAI's API."""
    given = _function_of(call)
    _require(_is_named(given), place, call, "not {function: {name: ..., arguments: ...}}")
    _require(call.get("type") in (None, "function"), f"{place}.type", call.get("type"), "not function")
    known = {} if call.get("id") is None else {"id": call["id"]}
    _require(isinstance(known.get("id", ""), str | int), f"{place}.id", call.get("id"), "not text")
    arguments = given.get("arguments")
    others = {key for each in (call, given) for key, value in each.items() if value is not None} - _CALL_KEYS
    if arguments is None and others:
        problem = f"got {short(given)}, which has no arguments but {', '.join(sorted(map(repr, others)))}"
        raise ValueError(f"{place}.function: {problem}; rename the field with the arguments to arguments")
    findings.call_keys |= others
    if isinstance(arguments, str) and arguments.strip():
        arguments = parse_json_column(arguments, f"{place}.function.arguments")
        if arguments is None:
            raise ValueError(f"{place}.function.arguments: got the text 'null', not an object of named arguments")
    elif arguments is None or arguments == "":
        # a column has null for an object without fields, and some servers write a call without arguments as empty text
        arguments = {}
    _require(isinstance(arguments, dict), f"{place}.function.arguments", arguments, "not an object of named arguments")
    try:
        text = json.dumps(arguments, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}.function.arguments: got {short(arguments)}, which is not JSON: {error}") from None
    if has_half_surrogate([text, given["name"]]):
        raise ValueError(f"{place}: it has {HALF}")
    findings.nulls.dropped += sum(value is None for value in call.values())
    return {**known, "type": "function", "function": {"name": given["name"], "arguments": arguments}}


def has_half_surrogate(value: Any) -> bool:
    """Return whether a text in a value, at any depth, has half of a surrogate pair, which is no character."""
    if isinstance(value, str):
        return not value.isascii() and _SURROGATE.search(value) is not None
    if isinstance(value, dict):
        return any(map(has_half_surrogate, value)) or any(map(has_half_surrogate, value.values()))
    return isinstance(value, list) and any(map(has_half_surrogate, value))
