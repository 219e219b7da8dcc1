"""Arithmetic in words for an agent with a code interpreter: the questions and the reward."""

import operator
import random
from typing import Any

from agentfactory import Trajectory, reward

OPERATORS = {"add": "+", "subtract": "-", "multiply by": "*"}
"""Words for an operation in a question -> Python operator."""
CALCULATE = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def make_task(rng: random.Random) -> dict[str, Any]:
    """Return a row: a `question` in two steps, its `numbers` and `operators` in order, and the `answer`."""
    numbers = [rng.randint(10, 99), rng.randint(2, 9), rng.randint(2, 9)]
    words = [rng.choice(list(OPERATORS)) for _ in range(2)]
    start, first, second = numbers
    one, two = operators = [OPERATORS[word] for word in words]
    return {
        "question": f"Take {start}, {words[0]} {first}, then {words[1]} {second}.",
        "numbers": numbers,
        "operators": operators,
        "answer": CALCULATE[two](CALCULATE[one](start, first), second),
    }


@reward
def interpreter_answered(trajectory: Trajectory, answer: int) -> dict[str, float]:
    """Return 1 if the interpreter's last output is the answer, else 0."""
    shown = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    right = float(bool(shown) and shown[-1] == str(answer))
    return {"reward": right, "success": right}
