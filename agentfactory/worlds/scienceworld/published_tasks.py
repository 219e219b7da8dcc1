"""The 30 tasks of ScienceWorld, their variations and the official splits."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from agentfactory.base.errors import SettingError, short

_ROOMS = (
    "You are a helpful assistant to do some scientific experiment in an environment.\n"
    "In the environment, there are several rooms: kitchen, foundry, workshop, bathroom, outside, living room, bedroom, "
    "greenhouse, art studio, hallway\n"
    "You should explore the environment and find the items you need to complete the experiment."
)
_OPEN = "All containers in the environment have already been opened, you can directly get items from the containers."
_ACTIONS = {
    "open OBJ": "open a container",
    "close OBJ": "close a container",
    "activate OBJ": "activate a device",
    "deactivate OBJ": "deactivate a device",
    "connect OBJ to OBJ": "connect electrical components",
    "disconnect OBJ": "disconnect electrical components",
    "use OBJ [on OBJ]": "use a device/item",
    "look around": "describe the current room",
    "examine OBJ": "describe an object in detail",
    "look at OBJ": "describe a container's contents",
    "read OBJ": "read a note or book",
    "move OBJ to OBJ": "move an object to a container",
    "pick up OBJ": "move an object to the inventory",
    "pour OBJ into OBJ": "pour a liquid into a container",
    "mix OBJ": "chemically mix a container",
    "teleport to LOC": "teleport to a specific room",
    "focus on OBJ": "signal intent on a task object",
    "wait": "task no action for 10 steps",
    "wait1": "task no action for a step",
}


def instruction(simplifications: str) -> str:
    """Return the published instruction, which is for `easy`; for other simplifications, without what they disable. For
    `easy` it claims that containers are open, although the engine's `easy` leaves them closed: kept as published."""
    published = simplifications == EASY
    names = resolved(simplifications)
    without = set()
    if "noElectricalAction" in names and not published:
        without |= {"connect OBJ to OBJ", "disconnect OBJ"}
    if "teleportAction" not in names:
        without.add("teleport to LOC")
    parts = [
        _ROOMS,
        *(["You can teleport to any room in one step."] if "teleportAction" in names else []),
        *([_OPEN] if published or "openContainers" in names else []),
        "\nThe available actions are:",
        *(f"    {action}: {meaning}" for action, meaning in _ACTIONS.items() if action not in without),
    ]
    return "\n".join(parts)


_TOPICS = (
    "boil 30, melt 30, freeze 30, change-the-state-of-matter-of 30",
    "use-thermometer 540, measure-melting-point-known-substance 436, measure-melting-point-unknown-substance 300",
    "power-component 20, power-component-renewable-vs-nonrenewable-energy 20, test-conductivity 900, "
    "test-conductivity-of-unknown-substances 600",
    "find-living-thing 300, find-non-living-thing 300, find-plant 300, find-animal 300",
    "grow-plant 126, grow-fruit 126",
    "chemistry-mix 32, chemistry-mix-paint-secondary-color 36, chemistry-mix-paint-tertiary-color 36",
    "lifespan-longest-lived 125, lifespan-shortest-lived 125, lifespan-longest-lived-then-shortest-lived 125",
    "identify-life-stages-1 14, identify-life-stages-2 10",
    "inclined-plane-determine-angle 168, inclined-plane-friction-named-surfaces 1386, "
    "inclined-plane-friction-unnamed-surfaces 162",
    "mendelian-genetics-known-plant 120, mendelian-genetics-unknown-plant 480",
)
TASKS = {
    name: (f"{topic}-{number}", int(count))
    for topic, tasks in enumerate(_TOPICS, 1)
    for number, task in enumerate(tasks.split(", "), 1)
    for name, count in [task.split()]
}
"""Name -> (number in the paper, count of variations). Copied from the engine, which takes seconds to count them."""

SIMPLIFICATIONS = ("teleportAction", "openDoors", "openContainers", "selfWateringFlowerPots", "noElectricalAction")
EASY = "easy"
"""All simplifications except `openContainers`, and in tasks on electricity except `noElectricalAction`."""


class Split(StrEnum):
    """The official splits: the first half of a task's variations, the next quarter and the rest."""

    TRAIN = "train"
    DEV = "dev"
    TEST = "test"

    def variations(self, task: str) -> range:
        """Return the numbers of a task's variations in this split."""
        _, count = TASKS[task]
        quarter = count // 4
        bounds = {Split.TRAIN: (0, 2 * quarter), Split.DEV: (2 * quarter, 3 * quarter)}
        return range(*bounds.get(self, (3 * quarter, count)))


def named(task: Any, field: str = "task") -> str:
    """Return the name of the task with this name or number. Raises SettingError if it does not exist."""
    numbers = {number: name for name, (number, _) in TASKS.items()}
    if isinstance(task, str) and (task in TASKS or task in numbers):
        return numbers.get(task, task)
    raise SettingError(field, f"got {short(task)}", f"use one of {', '.join(TASKS)}, or a number from 1-1 to 10-2")


def check_variation(task: str, variation: Any) -> int:
    """Return `variation`. Raises SettingError if the task has no such variation."""
    _, count = TASKS[task]
    if type(variation) is not int or not 0 <= variation < count:
        raise SettingError("variation", f"got {short(variation)}", f"{task} has the variations 0 to {count - 1}")
    return variation


def resolved(simplifications: Any, task: str | None = None) -> tuple[str, ...]:
    """Parse simplifications such as `easy` or `openDoors,teleportAction` for a task. Raises SettingError if a name is
    unknown, or if the task needs the electrical actions that it disables."""
    if not isinstance(simplifications, str):
        raise SettingError("simplifications", f"got {short(simplifications)}", "give names with commas between them")
    electrical = task is not None and any(word in task for word in ("power-component", "conductivity"))
    if simplifications == EASY:
        left_out = ("openContainers", "noElectricalAction") if electrical else ("openContainers",)
        return tuple(name for name in SIMPLIFICATIONS if name not in left_out)
    names = tuple(name for name in simplifications.split(",") if name)
    if unknown := [name for name in names if name not in SIMPLIFICATIONS]:
        fix = f"use {EASY}, or names out of {', '.join(SIMPLIFICATIONS)} with commas and no spaces between them"
        raise SettingError("simplifications", f"got {short(unknown[0])}", fix)
    if electrical and "noElectricalAction" in names:
        problem = f"{task} cannot be done with noElectricalAction"
        raise SettingError("simplifications", problem, "leave it out for this task")
    return tuple(name for name in SIMPLIFICATIONS if name in names)


def rows(
    split: str, question: str, tasks: Sequence[str] | None, per_task: int | None, simplifications: str
) -> list[dict[str, Any]]:
    """Return a row per variation, grouped by task. Raises SettingError."""
    if split not in tuple(Split):
        raise SettingError("split", f"got {short(split)}", f"use one of {', '.join(Split)}")
    if per_task is not None and (type(per_task) is not int or per_task < 1):
        raise SettingError("per_task", f"got {short(per_task)}", "give a whole number from 1, or null for all")
    if isinstance(tasks, str) or tasks == []:
        raise SettingError("tasks", f"got {short(tasks)}", "give a list of names, or null for all")
    names = list(TASKS) if tasks is None else [named(task, "tasks") for task in tasks]
    for name in names:
        resolved(simplifications, name)
    return [
        {"question": question, "task": name, "variation": variation, "simplifications": simplifications}
        for name in names
        for variation in Split(split).variations(name)[:per_task]
    ]
