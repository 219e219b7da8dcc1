"""Tasks, variations, splits, simplifications and the instruction."""

from typing import Any

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.worlds.scienceworld.published_tasks import TASKS, Split, check_variation, instruction, named, resolved
from agentfactory.worlds.scienceworld.scienceworld import in_brief, scienceworld_tasks
from tests.worlds.scienceworld.games import needs_java


def test_splits_are_half_a_quarter_and_the_rest() -> None:
    splits = [Split(split).variations("boil") for split in ("train", "dev", "test")]
    assert splits == [range(0, 14), range(14, 21), range(21, 30)]
    for name, (_, count) in TASKS.items():
        together = [number for split in Split for number in split.variations(name)]
        assert together == list(range(count)), name


@needs_java
def test_rows_name_task_variation_and_simplifications() -> None:
    rows = scienceworld_tasks("test", tasks=["4-4", "boil"], per_task=2)
    found = [(row["task"], row["variation"]) for row in rows]
    assert found == [("find-animal", 225), ("find-animal", 226), ("boil", 21), ("boil", 22)]
    assert {row["question"] for row in rows} == {instruction("easy")}
    sizes = [len(scienceworld_tasks(split)) for split in Split]
    assert sizes == [3592, 1796, 1819]
    assert len(scienceworld_tasks("test", per_task=10)) == 271


@needs_java
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "eval"}, "split: got 'eval'; fix: use one of train, dev, test"),
        ({"split": "test", "tasks": ["boil", "11-1"]}, "tasks: got '11-1'; fix: use one of boil, melt, "),
        ({"split": "test", "tasks": "boil"}, "tasks: got 'boil'; fix: give a list of names"),
        ({"split": "test", "per_task": 0}, "per_task: got 0; fix: give a whole number from 1"),
        ({"split": "test", "simplifications": "easier"}, "simplifications: got 'easier'; fix: use easy, or names out"),
        (
            {"split": "test", "simplifications": "noElectricalAction"},
            "simplifications: power-component cannot be done with noElectricalAction",
        ),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        scienceworld_tasks(**options)


def test_tasks_have_names_and_numbers() -> None:
    assert named("10-2") == named("mendelian-genetics-unknown-plant") == "mendelian-genetics-unknown-plant"
    task: Any
    for task in ("", "Boil", 1, None, ["boil"]):
        with pytest.raises(SettingError, match="task: got"):
            named(task)
    for variation in (-1, 30, "3", 1.0, True, None):
        with pytest.raises(SettingError, match=r"variation: got .*fix: boil has the variations 0 to 29"):
            check_variation("boil", variation)


def test_easy_depends_on_the_task() -> None:
    assert resolved("easy", "boil") == ("teleportAction", "openDoors", "selfWateringFlowerPots", "noElectricalAction")
    assert resolved("easy", "test-conductivity") == ("teleportAction", "openDoors", "selfWateringFlowerPots")
    assert resolved("", "boil") == ()
    assert resolved("openContainers,openDoors", "boil") == ("openDoors", "openContainers")


def test_the_instruction_of_other_simplifications_lacks_what_they_lack() -> None:
    published, bare = instruction("easy"), instruction("")
    assert published.count("\n") == 25
    assert "You can teleport to any room" in published
    assert "teleport" not in bare
    assert "have already been opened" in published
    assert "have already been opened" not in bare
    assert "connect OBJ" in published
    assert "connect OBJ" in bare
    assert "connect OBJ" not in instruction("noElectricalAction")
    assert "have already been opened" in instruction("openContainers")


def test_actions_with_two_objects_are_told_in_brief() -> None:
    actions = ["close door", "move cup to table", "move cup to sink", "use axe on door", "use stove", "pour a into b"]
    brief = ["close door", "move OBJ to OBJ", "use OBJ on OBJ", "use stove", "pour OBJ into OBJ"]
    assert in_brief(actions) == brief
