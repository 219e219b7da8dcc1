"""The messages that a chain starts with: the system prompt and the task."""

from collections.abc import Sequence

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import Message, text_of
from agentfactory.rollout.config import RolloutConfig
from agentfactory.rollout.data import Task

MOST_CHARACTERS = 64
"""Characters per token beyond which a text is too long without counting: only runs of spaces have longer tokens."""


def opening_messages(task: Task, system_prompt: str | None) -> list[Message]:
    messages: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
    if "messages" in task:
        return messages + [dict(message) for message in task["messages"]]
    return [*messages, {"role": "user", "content": str(task["question"])}]


def characters_of(task: Task) -> int:
    return sum(len(text_of(message.get("content") or "")) for message in opening_messages(task, None))


def check_lengths(tasks: Sequence[Task], config: RolloutConfig, section: str) -> None:
    """Raise SettingError if a row of `section` is so long that no tokenizer can fit it into rollout.max_total_tokens.
    Rendering a hundred megabytes for each of its chains would block all others."""
    most = config.max_total_tokens * MOST_CHARACTERS
    for number, task in enumerate(tasks, 1):
        if (length := characters_of(task)) > most:
            setting = f"rollout.max_total_tokens={config.max_total_tokens}"
            problem = f"row {number} has {length:,} characters, which cannot fit into {setting}"
            raise SettingError(section, problem, "shorten the row, or leave it out")


def check_texts(tasks: Sequence[Task], section: str) -> None:
    """Raise SettingError if a row of `section` shows the model neither text nor images."""
    for number, task in enumerate(tasks, 1):
        texts = (text_of(message.get("content") or "") for message in opening_messages(task, None))
        if not task.get("images") and not any(text.strip() for text in texts):
            name = "question" if "messages" not in task else "messages"
            problem = f"row {number}: {name} has no text, and no environment gives one"
            raise SettingError(section, problem, "write the task there, or leave the row out")


def add_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Return `messages` with `text` appended to the last one as a paragraph."""
    *before, last = messages
    content = last["content"]
    if isinstance(content, str):
        return [*before, {**last, "content": f"{content}\n\n{text}"}]
    return [*before, {**last, "content": [*content, {"type": "text", "text": text}]}]
