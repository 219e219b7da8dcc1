"""The instruction used for published agents, from ETO (Song et al., 2024, arXiv:2403.02502) and AgentGym."""

from agentfactory.worlds.scienceworld.published_tasks import EASY, resolved

_ROOMS = (
    "You are a helpful assistant to do some scientific experiment in an environment.\n"
    "In the environment, there are several rooms: kitchen, foundry, workshop, bathroom, outside, living room, bedroom, "
    "greenhouse, art studio, hallway\n"
    "You should explore the environment and find the items you need to complete the experiment."
)
_TELEPORT = "You can teleport to any room in one step."
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
    """Return the published instruction, which is for `easy`; for other simplifications, without what they disable.

    For `easy` it claims that containers are open, although the engine's `easy` leaves them closed: kept as published.
    """
    published = simplifications == EASY
    names = resolved(simplifications)
    without = set()
    if "noElectricalAction" in names and not published:
        without |= {"connect OBJ to OBJ", "disconnect OBJ"}
    if "teleportAction" not in names:
        without.add("teleport to LOC")
    parts = [
        _ROOMS,
        *([_TELEPORT] if "teleportAction" in names else []),
        *([_OPEN] if published or "openContainers" in names else []),
        "\nThe available actions are:",
        *(f"    {action}: {meaning}" for action, meaning in _ACTIONS.items() if action not in without),
    ]
    return "\n".join(parts)
