"""Transcripts for SFT: tasks of families that reinforcement learning does not train on, solved with the tool."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reasoning_gym.arithmetic.leg_counting import ANIMALS
from tasks import rows

from agentfactory.tools.prebuilt.calculator import calculator
from agentfactory.tools.user_code.loading import load_object

add_call = load_object("../quickstart/transcripts.py:add_call", Path(__file__).parent)


def expression(metadata: dict[str, Any]) -> tuple[str, str]:
    """Return the thought and the calculator's expression for a task that has the expression."""
    return "", metadata["expression"]


def count_legs(metadata: dict[str, Any]) -> tuple[str, str]:
    """Return the thought and the calculator's expression for a task of leg_counting."""
    animals = metadata["animals"].items()
    thought = " ".join(f"A {animal} has {ANIMALS[animal]} legs." for animal, _ in animals)
    return thought, " + ".join(f"{count} * {ANIMALS[animal]}" for animal, count in animals)


CALCULATOR: dict[str, tuple[int, Callable[[dict[str, Any]], tuple[str, str]]]] = {
    "leg_counting": (40, count_legs),
    "chain_sum": (20, expression),
    "basic_arithmetic": (20, expression),
    "products": (20, expression),
}
"""Family -> number of transcripts, and the function from a task's metadata to thought and expression."""


def with_calculator(system_prompt: str, seed: int) -> list[dict[str, Any]]:
    """Return 100 rows of SFT in random order: `messages` with calls of `calculator`, and its description in `tools`."""
    return asyncio.run(_with_calculator(system_prompt, seed))


async def _with_calculator(system_prompt: str, seed: int) -> list[dict[str, Any]]:
    found = []
    for family, (count, solve) in CALCULATOR.items():
        for row in rows(family, count, seed):
            thought, text = solve(row["entry"]["metadata"])
            messages: list[dict[str, Any]] = [
                {"role": "system", "content": system_prompt},
                {"role": "user", "content": row["question"]},
            ]
            add_call(messages, "calculator", {"expression": text}, await calculator(text), thought)
            messages.append({"role": "assistant", "content": f"<answer>{row['entry']['answer']}</answer>"})
            found.append({"messages": messages, "tools": [calculator.spec.to_openai()]})
    random.Random(seed).shuffle(found)
    return found
