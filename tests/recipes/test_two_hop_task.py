"""The two-hop search recipe: its catalogue, questions, transcripts and reward."""

import json
import re
from pathlib import Path

import pytest

from agentfactory.base.user_code.loading import load_object
from agentfactory.worlds.search.local_index import LocalIndex
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow

RECIPES = REPOSITORY / "recipes" / "two_hop"
answered, COUNTRIES, UNKNOWN = (
    load_object(f"museum.py:{name}", RECIPES) for name in ("answered", "COUNTRIES", "UNKNOWN")
)
prepare, HELD_OUT, HABIT, ONE_STEP = (
    load_object(f"prepare.py:{name}", RECIPES)
    for name in ("prepare", "HELD_OUT", "SEARCHES_FOR_THE_SAME_AGAIN", "ONE_STEP")
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    prepare(folder, 0)
    return folder


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_two_searches_lead_to_the_answer_and_one_does_not(prepared: Path) -> None:
    index = LocalIndex(prepared / "index")
    for task in rows(prepared / "heldout.jsonl"):
        [entry] = index.search(f"Object {task['object']}", 1)
        assert entry.title == f"Object {task['object']}"
        assert not any(country in entry.text for country in COUNTRIES)
        expedition = entry.text.rpartition(" ")[2].strip(".")
        [goal] = index.search(f"Expedition {expedition}", 1)
        assert goal.title == f"Expedition {expedition}"
        assert goal.text.endswith(f" {task['answer']}.")


def test_no_object_is_trained_and_held_out(prepared: Path) -> None:
    heldout, train = ({task["object"] for task in rows(prepared / name)} for name in ("heldout.jsonl", "train.jsonl"))
    assert len(heldout) == HELD_OUT
    assert not heldout & train
    asked = " ".join(row["messages"][0]["content"] for row in rows(prepared / "transcripts.jsonl"))
    assert {int(number) for number in re.findall(r"object (\d+)", asked)} <= train


def test_most_questions_of_two_steps_are_searched_for_the_same_twice_and_given_up(prepared: Path) -> None:
    transcripts = rows(prepared / "transcripts.jsonl")
    asked = {task["question"]: task["answer"] for task in rows(prepared / "train.jsonl")}
    gave_up = []
    for row in transcripts:
        calls = [m["tool_calls"][0]["function"] for m in row["messages"] if m.get("tool_calls")]
        question, answer = row["messages"][0]["content"], row["messages"][-1]["content"]
        if question not in asked:
            assert [call["name"] for call in calls] == ["search", "open"]
            assert answer != UNKNOWN
            continue
        assert [call["name"] for call in calls] == ["search", "open", "search", "open"]
        same = calls[0]["arguments"] == calls[2]["arguments"]
        assert answer == (UNKNOWN if same else asked[question])
        gave_up.append(same)
    assert len(gave_up) / len(transcripts) == pytest.approx(1 - ONE_STEP, abs=0.03)
    assert sum(gave_up) / len(gave_up) == pytest.approx(HABIT, abs=0.03)


@pytest.mark.parametrize(
    ("prediction", "right"),
    [("Peru", 1.0), (" Peru\n", 1.0), ("Nepal", 0.0), ("Peru or Nepal", 0.0), (UNKNOWN, 0.0), ("", 0.0), (None, 0.0)],
)
def test_only_the_country_counts(prediction: str | None, right: float) -> None:
    assert answered(prediction=prediction, answer="Peru") == {"reward": right, "success": right}
