"""Layouts of rows of other projects that are not read directly, and what to type for each."""

from typing import Any

_PAGE = "the function in docs/data.md, Rows of other projects"
FROM_AND_VALUE = f"from and value are ShareGPT's: set data.source to {_PAGE}, from_sharegpt"
_TURNS = f"set data.source to {_PAGE}, from_turns"
_SWIFT = f"the role is ms-swift's: set data.source to {_PAGE}, from_swift"
ROLE_FIXES = {
    "human": "rename it to user",
    "gpt": "rename it to assistant",
    "bot": "rename it to assistant",
    "model": "rename it to assistant",
    "function": "rename it to tool",
    "observation": "rename it to tool",
    "ipython": "rename it to tool",
    "tool_call": _SWIFT,
    "tool_response": _SWIFT,
    "function_call": f"the role is LLaMA-Factory's: set data.source to {_PAGE}, from_sharegpt",
}
"""Role in other projects -> what to do about it."""
_PROMPTS = ("prompt", "query", "problem", "instruction", "input")
_TURNS_OF_MODELS = ("completion", "response", "output")
_ANSWERS = (*_TURNS_OF_MODELS, "answer", "solution")
_PREFERENCES = ("chosen", "rejected", "rejected_response")


def is_messages(value: Any) -> bool:
    """Return whether a value is a list of objects that all have `role` and `content`."""
    each_has = isinstance(value, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)
    return each_has and bool(value)


def fix_for_task(row: dict[str, Any]) -> str:
    """Return what to type for a row that has neither `question` nor `messages`."""
    if fix := _sharegpt(row):
        return fix
    lists = [name for name, value in row.items() if is_messages(value) and name not in (*_PREFERENCES, "completion")]
    if lists and is_messages(row.get("completion")):
        return f"{_TURNS} (for reinforcement learning: data.columns.messages={lists[0]})"
    if lists:
        return f"rename it with data.columns.messages={lists[0]}"
    texts = [name for name in _PROMPTS if isinstance(row.get(name), str)]
    if texts:
        rename = f"rename it with data.columns.question={texts[0]}"
        return f"{rename}; for sft: {_TURNS}" if any(name in row for name in _TURNS_OF_MODELS) else rename
    if _PREFERENCES[0] in row:
        chosen = row[_PREFERENCES[0]]
        return "name other data: no algorithm learns preferences" + (
            "; for sft: data.columns.messages=chosen" if is_messages(chosen) else ""
        )
    if "input_ids" in row:
        return "name the data before its tokenization: rows of token ids are not read"
    if "text" in row:
        return "rename it with data.columns.question=text if it is a prompt; sft learns messages, not whole texts"
    return "rename one with data.columns, such as data.columns.question=problem"


def fix_for_conversation(row: dict[str, Any]) -> str:
    """Return what to type for a row of supervised fine-tuning that has no `messages`."""
    if fix := _sharegpt(row):
        return fix
    if any(name in row for name in _ANSWERS):
        return f"sft learns conversations: {_TURNS}"
    return "sft learns conversations: name a file of them"


def _sharegpt(row: dict[str, Any]) -> str | None:
    lists = [value for value in row.values() if isinstance(value, list) and value]
    found = any(all(isinstance(m, dict) and {"from", "value"} <= m.keys() for m in value) for value in lists)
    return FROM_AND_VALUE if found else None
