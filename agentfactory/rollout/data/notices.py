"""Notices to the user of parts of rows that the model does not get."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isnan
from typing import Any

from agentfactory.base.messages import ToolSpec
from agentfactory.base.run_notices import notify
from agentfactory.rollout.data.conversations import Findings
from agentfactory.rollout.data.nulls import Nulls, drop_from_history

logger = logging.getLogger(__name__)

_NOT_FOR_CHAINS = {
    "tools": "chains have the recipe's tools and mcp_servers",
    "system": "put it into messages, or set rollout.system_prompt",
    "history": "put it into messages",
    "chat_template_kwargs": "set rollout.reasoning or model.chat_template",
    "enable_thinking": "set rollout.reasoning",
}


def tell_findings(found: Sequence[Findings], section: str, columnar: bool) -> None:
    """Notify the user of parts of the rows' conversations that were dropped, or that no model may read."""
    dropped = "dropped from messages, calls and tools, because the tools do not allow them"
    tell_nulls(section, "dropped", dropped, [each.nulls.dropped for each in found])
    if columnar:
        allowed = "kept in calls, because the tools allow them; in a table, they may be missing arguments"
        tell_nulls(section, "allowed", allowed, [each.nulls.allowed for each in found])
    for attribute, topic, having, readers in (
        ("keys", "keys of tools", "tools have", "models do not get"),
        ("call_keys", "keys of calls", "calls have", "models do not get"),
        ("fields", "fields of messages", "messages have the fields", "only a chat template may read"),
    ):
        if names := sorted({name for each in found for name in getattr(each, attribute)}):
            text = f"{section}: {having} {', '.join(names)}, which {readers}"
            notify(logger, f"{topic} of {section}", text, times=0)


def tell_nulls(section: str, topic: str, text: str, counts: Sequence[int]) -> None:
    """Notify the user of nulls in the rows of `section`, of which each has one of `counts`; not if there are none."""
    if any(counts):
        first = next(number for number, count in enumerate(counts, 1) if count)
        nulls = f"{sum(counts)} null{'s' if sum(counts) > 1 else ''}"
        notify(logger, f"nulls of {section}, {topic}", f"{section}: {nulls} {text} (first in row {first})", times=0)


def tell_null_fields(tasks: Sequence[dict[str, Any]], section: str, needed: Mapping[str, str]) -> None:
    """Warn about needed fields that are null or NaN, as tables have it where a row lacks a field, in some rows only."""
    for name, who in needed.items():
        values = [(number, task.get(name)) for number, task in enumerate(tasks, 1)]
        nulls = [number for number, value in values if value is None or (isinstance(value, float) and isnan(value))]
        if nulls and len(nulls) < len(tasks):
            text = f"{section}: the field {name}, which {who} needs, is null or NaN in {len(nulls)} of {len(tasks)}"
            notify(logger, f"nulls of {section} in {name}", f"{text} rows, first in row {nulls[0]}", times=0)


def tell_null_arguments(tasks: Sequence[dict[str, Any]], section: str, specs: Sequence[ToolSpec]) -> None:
    """Notify the user of nulls in the calls of the rows' messages; `specs` are the chains' tools."""
    found = [Nulls() for _ in tasks]
    for task, nulls in zip(tasks, found, strict=True):
        drop_from_history(task, specs, nulls)
    text = "dropped from calls in messages, because the tools do not allow them"
    tell_nulls(section, "dropped from calls", text, [nulls.dropped for nulls in found])
    text = "kept in calls in messages, because no tool has that name"
    tell_nulls(section, "kept in calls", text, [nulls.kept for nulls in found])


def tell_unread_fields(tasks: Sequence[dict[str, Any]], section: str, takes: Callable[[str], bool]) -> None:
    """Notify the user of fields of other projects' rows that the model does not get, and no reward or reset `takes`."""
    for name, instead in _NOT_FOR_CHAINS.items():
        count = sum(bool(task.get(name)) for task in tasks)
        if count and not takes(name):
            text = f"{section}: the model does not get the field {name} of {count} of {len(tasks)} rows; {instead}"
            notify(logger, f"field {name} of {section}", text, times=0)


def tell_answered_rows(tasks: Sequence[dict[str, Any]], section: str) -> None:
    ended = [n for n, task in enumerate(tasks, 1) if (task.get("messages") or [{}])[-1].get("role") == "assistant"]
    if ended:
        text = f"{section}: the messages of row {ended[0]} ({len(ended)} of {len(tasks)} rows) end with the assistant"
        notify(logger, f"answered rows of {section}", f"{text}, and the model answers once more", times=0)


def tell_shared_tasks(training: Sequence[dict[str, Any]], held_out: Sequence[dict[str, Any]], section: str) -> None:
    text_of = partial(json.dumps, sort_keys=True, default=repr)
    known = {hash(text_of(task)) for task in training}
    shared = [number for number, task in enumerate(held_out, 1) if hash(text_of(task)) in known]
    if shared:
        text = f"{section}: {len(shared)} of {len(held_out)} rows are also training tasks, the first is row {shared[0]}"
        fix = "use other rows or seeds to measure what the agent has learned beyond them"
        notify(logger, f"training tasks in {section}", f"{text}; {fix}", times=0)
