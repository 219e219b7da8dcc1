"""The messages that a chain starts with: the system prompt and the task."""

from collections.abc import Sequence

from agentfactory.rollout.data import Task
from agentfactory.tools.messages import Message


def opening_messages(task: Task, system_prompt: str | None) -> list[Message]:
    """Return the opening messages of a chain on `task`."""
    messages: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
    if "messages" in task:
        return messages + [dict(message) for message in task["messages"]]
    return [*messages, {"role": "user", "content": str(task["question"])}]


def add_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Return `messages` with `text` appended to the last one as a paragraph."""
    *before, last = messages
    content = last["content"]
    if isinstance(content, str):
        return [*before, {**last, "content": f"{content}\n\n{text}"}]
    return [*before, {**last, "content": [*content, {"type": "text", "text": text}]}]
