"""The hunt played by a loop on OpenAI's SDK."""

from typing import Any

SYSTEM = "Find the treasure."


async def run(client: Any, task: dict[str, Any], tools: Any) -> None:
    """Play one hunt."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["question"]}]
    while True:
        answer = await client.chat.completions.create(model="any", messages=messages, tools=tools.definitions)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            content = await tools.call(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
