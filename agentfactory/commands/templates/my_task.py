"""The task: word problems that a calculator solves. Change the tool, the reward and the rows, and it is yours."""

from typing import Literal

from agentfactory import Trajectory, reward, tool


@tool
def calculate(left: int, operation: Literal["add", "subtract", "multiply"], right: int) -> int:
    """Work out one operation.

    Args:
        left: First number.
        operation: What to do with the numbers.
        right: Second number.
    """
    match operation:
        case "add":
            return left + right
        case "subtract":
            return left - right
        case "multiply":
            return left * right


@reward
def right_result(trajectory: Trajectory, answer: int) -> dict[str, float]:
    """1 when what the calculator said last is the answer, a field of the task's row.

    A reward that judges what the model wrote takes `prediction`, the text of its last message.
    """
    results = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    right = float(bool(results) and results[-1] == str(answer))
    return {"reward": right, "success": right}
