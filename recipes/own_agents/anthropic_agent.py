"""The hunt played by a loop on Anthropic's SDK, which streams each turn."""

from typing import Any

SYSTEM = "Hunt for treasure."
TOOLS = [
    {
        "name": "move",
        "description": "Go one step.",
        "input_schema": {
            "type": "object",
            "properties": {"direction": {"type": "string", "enum": ["north", "east", "south", "west"]}},
            "required": ["direction"],
        },
    }
]


async def run(anthropic: Any, task: dict[str, Any], tools: Any) -> None:
    """Play one hunt."""
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    while True:
        async with anthropic.messages.stream(
            model="any", max_tokens=64, system=SYSTEM, messages=messages, tools=TOOLS
        ) as stream:
            answer = await stream.get_final_message()
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            return
        messages.append({"role": "assistant", "content": answer.content})
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": await tools.call(call.name, call.input)}
            for call in calls
        ]
        messages.append({"role": "user", "content": results})
