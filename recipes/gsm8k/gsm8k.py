"""Grade-school mathematics (GSM8K) with a calculator: one tool and one reward."""

import re
from typing import Literal

from agentfactory import reward, tool


@tool
def calculate(left: float, operator: Literal["+", "-", "*", "/"], right: float) -> float:
    """Work out one arithmetic operation.

    Args:
        left: First operand.
        operator: What to do with the operands.
        right: Second operand.
    """
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "/":
            return left / right


@reward
def right_answer(prediction: str, answer: str) -> dict[str, float]:
    """Return 1 if the last number of the final message is the data set's answer, which follows '####', else 0."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", prediction)
    wanted = float(answer.split("####")[-1].strip().replace(",", ""))
    right = bool(numbers) and abs(float(numbers[-1].replace(",", "")) - wanted) < 1e-6
    return {"reward": float(right), "success": float(right)}
