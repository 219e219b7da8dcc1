"""Transcripts for SFT: tasks that reinforcement learning does not train on, solved with the tool."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentfactory.base.user_code.loading import load_object
from agentfactory.tools.prebuilt.calculator import calculator
from agentfactory.tools.prebuilt.code_interpreter import CodeInterpreter

HERE = Path(__file__).parent
add_call = load_object("../quickstart/transcripts.py:add_call", HERE)
rows, word_problems = (load_object(name, HERE) for name in ("tasks.py:rows", "word_problems.py:word_problems"))

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
"""Family of reasoning-gym -> number of transcripts, and the function from a task's metadata to the code that solves
it."""


async def with_calculator(system_prompt: str, seed: int) -> list[dict[str, Any]]:
    """Return 100 rows of SFT: `messages` with a thought and a call of `calculator`, and its description in `tools`."""
    found = []
    for question, thought, expression, answer in word_problems(100, seed):
        messages = _begin(system_prompt, question)
        add_call(messages, "calculator", {"expression": expression}, await calculator(expression), thought)
        found.append(_end(messages, answer, calculator.spec))
    return found


async def with_python(system_prompt: str, seed: int) -> list[dict[str, Any]]:
    """Return 90 rows of SFT in random order: `messages` with a cell of the code interpreter, and its description in
    `tools`."""
    found, interpreter = [], CodeInterpreter()
    await interpreter.reset()
    try:
        for family, (count, solve) in PYTHON.items():
            for row in rows(family, count, seed):
                code, messages = solve(row["metadata"]), _begin(system_prompt, row["question"])
                add_call(messages, "python", {"code": code}, await interpreter.python(code))
                found.append(_end(messages, row["answer"], CodeInterpreter.python.spec))
    finally:
        await interpreter.close()
    random.Random(seed).shuffle(found)
    return found


def _begin(system_prompt: str, question: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system_prompt}, {"role": "user", "content": question}]


def _end(messages: list[dict[str, Any]], answer: Any, spec: Any) -> dict[str, Any]:
    messages.append({"role": "assistant", "content": f"<answer>{answer}</answer>"})
    return {"messages": messages, "tools": [spec.to_openai()]}
