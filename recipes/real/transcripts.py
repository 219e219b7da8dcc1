"""Transcripts for SFT: tasks that reinforcement learning does not train on, solved with the tool."""

import asyncio
from pathlib import Path
from typing import Any

from word_problems import word_problems

from agentfactory.tools.prebuilt.calculator import calculator
from agentfactory.tools.user_code.loading import load_object

add_call = load_object("../quickstart/transcripts.py:add_call", Path(__file__).parent)


def with_calculator(system_prompt: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Return `count` rows of SFT: `messages` with a thought and a call of `calculator`, and its description in
    `tools`."""
    return asyncio.run(_with_calculator(system_prompt, count, seed))


async def _with_calculator(system_prompt: str, count: int, seed: int) -> list[dict[str, Any]]:
    found = []
    for question, thought, expression, answer in word_problems(count, seed):
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": system_prompt},
            {"role": "user", "content": question},
        ]
        add_call(messages, "calculator", {"expression": expression}, await calculator(expression), thought)
        messages.append({"role": "assistant", "content": f"<answer>{answer}</answer>"})
        found.append({"messages": messages, "tools": [calculator.spec.to_openai()]})
    return found
