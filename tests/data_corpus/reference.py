"""A reading and rendering of rows that shares no code with the loader: json, csv and pyarrow, then
`apply_chat_template`."""

import csv
import gzip
import io
import json
from dataclasses import dataclass
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

import pyarrow.parquet
from transformers import PreTrainedTokenizerBase

from agentfactory.rollout.token_row import Row

_CALL = {"id", "type", "index", "function", "name", "arguments"}
_TOOL = {"type", "function", "name", "description", "parameters", "inputSchema", "input_schema"}


class Unreadable(Exception):
    """Rows or a conversation that this reading does not understand, so the loader must refuse them or tell the user."""


@dataclass
class Talk:
    """A conversation. `unread` are the keys of tools and calls that no model gets."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    weights: list[float]
    unread: set[str]


def rows_of(path: Path, columns: dict[str, str]) -> list[dict[str, Any]]:
    """Return the rows of a file, with columns renamed and nested fields copied."""
    content, name = path.read_bytes(), path.name.lower()
    if name.endswith(".gz"):
        content, name = gzip.decompress(content), name[:-3]
    if name.endswith(".parquet"):
        rows = pyarrow.parquet.ParquetFile(io.BytesIO(content)).read().to_pylist()
    else:
        text = content.decode("utf-8-sig")
        if name.endswith(".jsonl"):
            lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
            rows = [json.loads(line) for line in lines if line.strip()]
        elif name.endswith(".json"):
            rows = json.loads(text)
        else:
            rows = list(csv.DictReader(io.StringIO(text, newline="")))
    return [_renamed(row, columns) for row in rows]


def _renamed(row: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    row = dict(row)
    for new, old in columns.items():
        if old in row:
            row[new] = row.pop(old)
        else:
            value: Any = row
            for key in old.split("."):
                value = value[key]
            row[new] = value
    return row


def talk_of(row: dict[str, Any]) -> Talk:
    """Return the conversation of a row as its messages and tools read in OpenAI's format, nulls included. Raise
    Unreadable."""
    messages = row.get("messages")
    if messages is None:
        messages = row.get("question")
    messages, tools = _parsed(messages), _parsed(row.get("tools") or [])
    try:
        unread: set[str] = set()
        read = _ordered([_message(message, unread) for message in messages])
        weights = [message.pop("weight", None) for message in read]
        own = [1.0 if message["role"] == "assistant" else 0.0 for message in read]
        weights = [mine if given is None else float(given) for mine, given in zip(own, weights, strict=True)]
        return Talk(read, [_tool(tool, unread) for tool in tools or []], weights, unread)
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        raise Unreadable(str(error)) from error


def _ordered(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the results of each turn in the order of its calls, if all have ids; those of one id stay in order."""
    ordered: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if message["role"] == "tool" and index > 0:
            continue
        ordered.append(message)
        calls = message.get("tool_calls") or []
        results = [*takewhile(lambda other: other["role"] == "tool", messages[index + 1 :])]
        ids = [call.get("id") for call in calls]
        if calls and None not in ids:
            free = list(enumerate(ids))
            keys = []
            for result in results:
                wanted = result.get("tool_call_id")
                place = next((place for place in free if place[1] == wanted), free[0] if free else (len(ids), None))
                keys.append(place[0])
                if place in free:
                    free.remove(place)
            results = [result for _, result in sorted(zip(keys, results, strict=True), key=lambda pair: pair[0])]
        ordered += results
    return ordered


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return json.loads(value) if value.strip() else None


def _text(content: Any) -> Any:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content


def _message(message: dict[str, Any], unread: set[str]) -> dict[str, Any]:
    read = {key: value for key, value in message.items() if key != "info"}
    read["content"] = _text(read.get("content"))
    for name in ("reasoning", "thinking"):
        if read["role"] == "assistant" and isinstance(read.get(name), str) and read.get("reasoning_content") is None:
            read["reasoning_content"] = read.pop(name)
    if calls := _parsed(read.get("tool_calls")):
        read["tool_calls"] = [_call(call, unread) for call in calls]
        read["content"] = read["content"] or ""
    else:
        read.pop("tool_calls", None)
    return read


def _call(call: dict[str, Any], unread: set[str]) -> dict[str, Any]:
    function = call if call.get("function") is None else call["function"]
    unread |= {key for each in (call, function) for key in each if each[key] is not None} - _CALL
    arguments = function.get("arguments")
    known = {"id": call["id"]} if call.get("id") is not None else {}
    arguments = _parsed(arguments) or {} if not isinstance(arguments, str) or arguments.strip() else {}
    return {**known, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tool(tool: Any, unread: set[str]) -> dict[str, Any]:
    tool = _parsed(tool)
    function = tool if tool.get("function") is None else tool["function"]
    unread |= {key for each in (tool, function) for key in each if each[key] is not None} - _TOOL
    schemas = (function.get(key) for key in ("parameters", "inputSchema", "input_schema"))
    parameters = next((schema for schema in schemas if schema is not None), {"type": "object", "properties": {}})
    described = {"name": function["name"], "description": function.get("description") or ""}
    return {"type": "function", "function": {**described, "parameters": _parsed(parameters)}}


def without_nulls(value: Any) -> Any:
    """Return a JSON value without the null fields of its objects, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def render(tokenizer: PreTrainedTokenizerBase, source: str, talk: Talk) -> tuple[str, list[tuple[str, float]]]:
    """Return a conversation's text, and its turns that are trained: each with its end-of-turn token, what follows it,
    and its weight."""

    def text(end: int, prompt: bool = False) -> str:
        return tokenizer.apply_chat_template(
            talk.messages[:end],
            tools=talk.tools or None,
            chat_template=source,
            tokenize=False,
            add_generation_prompt=prompt,
        )

    turns = []
    for number, (message, weight) in enumerate(zip(talk.messages, talk.weights, strict=True)):
        if message["role"] == "assistant" and weight:
            prompt, whole = text(number, prompt=True), text(number + 1)
            if not whole.startswith(prompt):
                raise Unreadable("the template does not continue the generation prompt")
            turns.append((whole[len(prompt) :], weight))
    return text(len(talk.messages)), turns


def trained(tokenizer: PreTrainedTokenizerBase, row: Row) -> list[tuple[str, float]]:
    """Return the texts of the runs of trained tokens in a row, each with its weight."""
    runs, place = [], 0
    for weight, group in groupby(row.weights):
        count = len(list(group))
        if weight:
            runs.append((decoded(tokenizer, row.token_ids[place : place + count]), weight))
        place += count
    return runs


def decoded(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Return the text of ids, with special tokens."""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
