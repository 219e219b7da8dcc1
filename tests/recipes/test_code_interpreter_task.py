"""The code interpreter's recipe: its held-out questions and reward."""

from pathlib import Path

import pytest

from agentfactory.base.user_code.loading import load_object
from agentfactory.rollout.trajectory import Outcome, Trajectory
from tests.conftest import REPOSITORY
from tests.recipes.chains import read_rows

RECIPES = REPOSITORY / "recipes" / "code_interpreter"
interpreter_answered = load_object("arithmetic.py:interpreter_answered", RECIPES)
prepare = load_object("prepare.py:prepare", RECIPES)


@pytest.mark.parametrize(
    ("shown", "right"),
    [(["", "66"], 1.0), (["66", ""], 0.0), (["", "166"], 0.0), (["", "Traceback ... 66"], 0.0), ([], 0.0)],
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
