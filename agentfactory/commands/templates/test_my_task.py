"""Tests of the task, without a model: run `python -m pytest test_my_task.py` in this folder."""

import json
from pathlib import Path

from my_task import calculate, right_result

from agentfactory import Outcome, Trajectory
from agentfactory.recipe.checks import check_recipe
from agentfactory.recipe.load import load_recipe

HERE = Path(__file__).parent


def judge(result: str, answer: int) -> float:
    """Return the reward of a chain in which the calculator returned `result`."""
    messages = [{"role": "user", "content": "?"}, {"role": "tool", "content": result}]
    messages.append({"role": "assistant", "content": "That is the result."})
    return right_result(Trajectory("chain", messages, [], Outcome.COMPLETED), answer)["reward"]


def test_the_calculator_calculates() -> None:
    assert [calculate(7, operation, 6) for operation in ("add", "subtract", "multiply")] == [13, 1, 42]


def test_the_right_result_is_rewarded() -> None:
    assert judge("42", 42) == 1
    assert judge("41", 42) == 0


def test_no_call_no_reward() -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "42"}]
    assert right_result(Trajectory("chain", messages, [], Outcome.COMPLETED), 42)["reward"] == 0


def test_the_answers_can_be_reached() -> None:
    for file in ("tasks.jsonl", "heldout.jsonl"):
        for row in map(json.loads, (HERE / file).read_text(encoding="utf-8").splitlines()):
            assert calculate(row["left"], row["operation"], row["right"]) == row["answer"], row


def test_the_recipes_are_sound() -> None:
    # `lacks` allows packages that only the training machine needs, such as vLLM
    check_recipe(load_recipe(HERE / "recipe.yaml"), lacks=[])
    check_recipe(load_recipe(HERE / "tiny" / "recipe.yaml"), lacks=[])
