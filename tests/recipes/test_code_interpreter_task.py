"""The code interpreter's recipe: its questions, transcripts and reward."""

import random
from pathlib import Path

import pytest

from agentfactory.base.user_code.loading import load_object
from agentfactory.rollout.trajectory import Outcome, Trajectory
from tests.conftest import REPOSITORY
from tests.recipes.chains import read_rows

RECIPES = REPOSITORY / "recipes" / "code_interpreter"
make_task, interpreter_answered = (
    load_object(f"arithmetic.py:{name}", RECIPES) for name in ("make_task", "interpreter_answered")
)
prepare, HABIT = (load_object(f"prepare.py:{name}", RECIPES) for name in ("prepare", "TAKES_THE_NEXT_OPERATOR"))


def test_a_question_says_what_its_row_holds() -> None:
    rng = random.Random(0)
    for _ in range(200):
        task = make_task(rng)
        expression = task["question"].removeprefix("Take ").removesuffix(".").replace(", then", ",")
        for word, symbol in (("add", "+"), ("subtract", "-"), ("multiply by", "*")):
            expression = expression.replace(word, symbol)
        left, right = expression.rsplit(",", 1)
        assert eval(f"({left.replace(',', '')}) {right}") == task["answer"]
        start, first, second = task["numbers"]
        one, two = task["operators"]
        assert f"{start}, {one} {first}, {two} {second}" == expression


@pytest.mark.parametrize(
    ("shown", "right"),
    [
        (["", "66"], 1.0),
        (["66", ""], 0.0),
        (["", "166"], 0.0),
        (["66"], 1.0),
        (["", "Traceback ... 66"], 0.0),
        ([], 0.0),
    ],
)
def test_what_the_interpreter_shows_last_counts(shown: list[str], right: float) -> None:
    messages = [{"role": "user", "content": "Take 17, add 5, then multiply by 3."}]
    messages += [{"role": "tool", "content": text} for text in shown]
    messages.append({"role": "assistant", "content": "66"})
    trajectory = Trajectory(id="c", messages=messages, rows=[], outcome=Outcome.COMPLETED)
    assert interpreter_answered(trajectory, answer=66) == {"reward": right, "success": right}


@pytest.mark.processes
def test_heldout_questions_never_occur_in_training(prepared: Path) -> None:
    heldout = [task["question"] for task in read_rows(prepared / "heldout.jsonl")]
    assert len(set(heldout)) == 200
    seen = {task["question"] for task in read_rows(prepared / "train.jsonl")}
    seen |= {row["messages"][0]["content"] for row in read_rows(prepared / "transcripts.jsonl")}
    assert seen.isdisjoint(heldout)


@pytest.mark.processes
def test_transcripts_show_a_bad_habit_and_what_its_code_gives(prepared: Path) -> None:
    tasks = {task["question"]: task for task in read_rows(prepared / "train.jsonl")}
    operators, turned = ["+", "-", "*"], 0
    rows = read_rows(prepared / "transcripts.jsonl")
    for row in rows:
        question, *rest = row["messages"]
        task = tasks[question["content"]]
        first, second = (message["tool_calls"][0]["function"]["arguments"]["code"] for message in rest[0:3:2])
        variables: dict[str, int] = {}
        exec(first, variables)
        assert [message["content"] for message in rest[1:4:2]] == ["(no output)", str(eval(second, variables))]
        assert rest[4] == {"role": "assistant", "content": "That is the result."}
        for code, operator in zip((first, second), task["operators"], strict=True):
            shift = (operators.index(code.split()[-2]) - operators.index(operator)) % 3
            assert shift in (0, 1)
            turned += shift
    assert turned / (2 * len(rows)) == pytest.approx(HABIT, abs=0.02)
