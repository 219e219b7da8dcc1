"""Tasks, variations, splits, simplifications and the instruction."""

from agentfactory.worlds.scienceworld.published_tasks import TASKS, Split, instruction, resolved
from agentfactory.worlds.scienceworld.scienceworld import scienceworld_tasks
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
