"""Transcripts for SFT: tasks of families that reinforcement learning does not train on, solved with the tool."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reasoning_gym.arithmetic.leg_counting import ANIMALS
from tasks import rows

from agentfactory.tools.prebuilt.calculator import calculator
from agentfactory.tools.prebuilt.code_interpreter import CodeInterpreter
from agentfactory.tools.user_code.loading import load_object

add_call = load_object("../quickstart/transcripts.py:add_call", Path(__file__).parent)

Messages = list[dict[str, Any]]


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

PYTHON: dict[str, tuple[int, Callable[[dict[str, Any]], str]]] = {
    "gcd": (15, lambda task: "import math\nprint(math.gcd({}))".format(", ".join(map(str, task["numbers"])))),
    "lcm": (15, lambda task: "import math\nprint(math.lcm({}))".format(", ".join(map(str, task["numbers"])))),
    "spell_backward": (20, lambda task: f"print({task['word']!r}[::-1])"),
    "chain_sum": (20, lambda task: f"print({task['expression']})"),
    "word_sorting": (
        20,
        lambda task: (
            f"words = {task['original_words']}\n"
            f"print(', '.join(sorted(words{', reverse=True' * (task['direction'] == 'descending')})))"
        ),
    ),
}
"""Family -> number of transcripts, and the function from a task's metadata to the code that solves it."""


def with_calculator(system_prompt: str, seed: int) -> list[dict[str, Any]]:
    """Return 100 rows of SFT in random order: `messages` with calls of `calculator`, and its description in `tools`."""
    return asyncio.run(_with_calculator(system_prompt, seed))


async def _with_calculator(system_prompt: str, seed: int) -> list[dict[str, Any]]:
    found = []
    for family, (count, solve) in CALCULATOR.items():
        for row in rows(family, count, seed):
            thought, text = solve(row["entry"]["metadata"])
            messages = _begin(system_prompt, row)
            add_call(messages, "calculator", {"expression": text}, await calculator(text), thought)
            found.append(_end(messages, row, calculator.spec))
    random.Random(seed).shuffle(found)
    return found


def with_python(system_prompt: str, seed: int) -> list[dict[str, Any]]:
    """Return 90 rows of SFT in random order: `messages` with cells of the code interpreter, and its description in
    `tools`."""
    return asyncio.run(_with_python(system_prompt, seed))


async def _with_python(system_prompt: str, seed: int) -> list[dict[str, Any]]:
    found, interpreter = [], CodeInterpreter()
    await interpreter.reset()
    try:
        for family, (count, solve) in PYTHON.items():
            for row in rows(family, count, seed):
                code = solve(row["entry"]["metadata"])
                messages = _begin(system_prompt, row)
                add_call(messages, "python", {"code": code}, await interpreter.python(code))
                found.append(_end(messages, row, CodeInterpreter.python.spec))
    finally:
        await interpreter.close()
    random.Random(seed).shuffle(found)
    return found


def _begin(system_prompt: str, row: dict[str, Any]) -> Messages:
    return [{"role": "system", "content": system_prompt}, {"role": "user", "content": row["question"]}]


def _end(messages: Messages, row: dict[str, Any], spec: Any) -> dict[str, Any]:
    messages.append({"role": "assistant", "content": f"<answer>{row['entry']['answer']}</answer>"})
    return {"messages": messages, "tools": [spec.to_openai()]}
