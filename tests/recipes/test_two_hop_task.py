"""The two-hop search recipe: its catalogue, questions, transcripts and reward."""

import re
from pathlib import Path

import pytest

from agentfactory.base.user_code.loading import load_object
from agentfactory.worlds.search.local_index import LocalIndex
from tests.conftest import REPOSITORY
from tests.recipes.chains import read_rows

pytestmark = pytest.mark.slow

RECIPES = REPOSITORY / "recipes" / "two_hop"
answered, COUNTRIES, UNKNOWN = (
    load_object(f"museum.py:{name}", RECIPES) for name in ("answered", "COUNTRIES", "UNKNOWN")
)
prepare, HELD_OUT = (load_object(f"prepare.py:{name}", RECIPES) for name in ("prepare", "HELD_OUT"))


def test_two_searches_lead_to_the_answer_and_one_does_not(prepared: Path) -> None:
    index = LocalIndex(prepared / "index")
    for task in read_rows(prepared / "heldout.jsonl"):
        [entry] = index.search(f"Object {task['object']}", 1)
        assert entry.title == f"Object {task['object']}"
        assert not any(country in entry.text for country in COUNTRIES)
        expedition = entry.text.rpartition(" ")[2].strip(".")
        [goal] = index.search(f"Expedition {expedition}", 1)
        assert goal.title == f"Expedition {expedition}"
        assert goal.text.endswith(f" {task['answer']}.")


def test_no_object_is_trained_and_held_out(prepared: Path) -> None:
    heldout, train = (
        {task["object"] for task in read_rows(prepared / name)} for name in ("heldout.jsonl", "train.jsonl")
    )
    assert len(heldout) == HELD_OUT
    assert not heldout & train
    asked = " ".join(row["messages"][0]["content"] for row in read_rows(prepared / "transcripts.jsonl"))
    assert {int(number) for number in re.findall(r"object (\d+)", asked)} <= train


@pytest.mark.parametrize(
    ("prediction", "right"),
    [("Peru", 1.0), (" Peru\n", 1.0), ("Nepal", 0.0), ("Peru or Nepal", 0.0), (UNKNOWN, 0.0), ("", 0.0), (None, 0.0)],
)
def test_only_the_country_counts(prediction: str | None, right: float) -> None:
    assert answered(prediction=prediction, answer="Peru") == {"reward": right, "success": right}
