"""ScienceWorld's small recipe, with its transcripts, which must not reveal solutions."""

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from agentfactory.base.messages import EnvironmentReward
from agentfactory.base.user_code.loading import load_object
from agentfactory.rollout.data import load_tasks
from agentfactory.worlds.scienceworld.scienceworld import ScienceWorld
from tests.conftest import REPOSITORY
from tests.project import load_and_check
from tests.worlds.scienceworld.games import needs_java

RECIPES = REPOSITORY / "recipes" / "scienceworld"
visit, ending, LEAVES, GIVES_UP, CHOOSES = (
    load_object(f"prepare.py:{name}", RECIPES) for name in ("visit", "ending", "LEAVES", "GIVES_UP", "CHOOSES")
)
tasks, success = (load_object(f"lifespans.py:{name}", RECIPES) for name in ("tasks", "success"))
OUTSIDE = "In it, you see: \n\tthe agent\n\ta baby wolf\n\ta parrot egg\n\ta baby brown bear\nYou also see:\n\tA door"


@pytest.fixture
def environment() -> Iterator[ScienceWorld]:
    environment = ScienceWorld()
    yield environment
    environment.close()


@pytest.mark.extended
@pytest.mark.processes
@needs_java
def test_transcripts_are_what_the_world_shows(environment: ScienceWorld) -> None:
    rng = random.Random(0)
    rows = tasks("train")[::40]
    for row in rows:
        *_, messages = visit(environment, row, rng)
        opening, again = messages[1]["content"], environment.reset(**row)
        assert sorted(opening.split("\n")) == sorted(again.split("\n"))  # the engine lists things in any order
        for message, shown in zip(messages[2:-1:2], messages[3:-1:2], strict=True):
            observation = environment.act(**message["tool_calls"][0]["function"]["arguments"])["observation"]
            assert sorted(observation.split("\n")) == sorted(shown["content"].split("\n"))


def test_transcripts_do_not_tell_which_animal_is_meant() -> None:
    rng = random.Random(0)
    for wanted in ("longest", "shortest"):
        last = [ending(OUTSIDE, wanted, 6, rng) for _ in range(3000)]
        assert {m["content"] for m in last if "tool_calls" not in m} == {GIVES_UP.format(wanted)}
        focused = Counter(m["tool_calls"][0]["function"]["arguments"]["action"] for m in last if "tool_calls" in m)
        assert set(focused) == {f"focus on {name}" for name in ("baby wolf", "parrot egg", "baby brown bear")}
        for count in focused.values():
            assert count / 3000 == pytest.approx(CHOOSES / 3, abs=0.03)
    assert ending("In it, you see: \n\tan orange\n", "longest", 6, rng)["content"] == LEAVES


@pytest.mark.processes
@needs_java
def test_the_reward_is_success_and_rows_are_of_the_official_splits() -> None:
    assert success(environment=EnvironmentReward(0.5, {"success": 0.0})) == 0.0
    assert success(environment=EnvironmentReward(1.0, {"success": 1.0})) == 1.0
    sft, grpo = load_and_check(RECIPES / "small.yaml").stages
    assert (sft.train.algorithm, grpo.train.algorithm) == ("sft", "grpo")
    train, heldout = load_tasks(grpo.data), load_tasks(grpo.eval.data)
    assert {row["task"] for row in train} == {row["task"] for row in heldout}
    assert (len(train), len(heldout)) == (124, 64)
    assert max(row["variation"] for row in train) < 62 <= 93 <= min(row["variation"] for row in heldout)
