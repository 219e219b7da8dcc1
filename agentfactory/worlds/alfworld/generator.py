"""A generator of games in ALFWorld's format, from the floor plans and tables of the package `alfworld`.

Rooms have the receptacles and objects listed in ALFRED's floor plans; their numbers and the objects' positions are
random. Each game's solution follows from its construction, without a planner.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any


class TaskType(StrEnum):
    """ALFWorld's six task types, in the order of their numbers 1 to 6."""

    PLACE = "pick_and_place_simple"
    LOOK = "look_at_obj_in_light"
    CLEAN = "pick_clean_then_place_in_recep"
    HEAT = "pick_heat_then_place_in_recep"
    COOL = "pick_cool_then_place_in_recep"
    TWO = "pick_two_obj_and_place"


@dataclass(frozen=True)
class Treatment:
    """An operation on an object before it is put down: its verb, its receptacle, and the table of its objects."""

    verb: str
    station: str
    affords: str


TREATMENTS = {
    TaskType.CLEAN: Treatment("clean", "SinkBasin", "Cleanable"),
    TaskType.HEAT: Treatment("heat", "Microwave", "Heatable"),
    TaskType.COOL: Treatment("cool", "Fridge", "Coolable"),
}
_PROPERTIES = ("Cleanable", "Heatable", "Coolable", "Toggleable", "Sliceable")
_SEVERAL = ("CounterTop", "Shelf", "SideTable", "StoveBurner")
"""Receptacles of which a room may have up to three; for those that open, the floor plan gives the number."""
_FLAT = ("Desk", "SideTable", "Dresser", "Shelf", "CoffeeTable", "DiningTable")
"""Receptacles on which a lamp can stand."""
_MANGLED = {"|": "_bar_", "-": "_minus_", "+": "_plus_", ".": "_dot_", ",": "_comma_"}


class Package:
    """The package's tables of floor plans, objects and goals: see `engine_process.read_package`."""

    def __init__(self, tables: dict[str, Any]) -> None:
        self.tables = tables
        self.lamps = tables["affords"]["Toggleable"]

    def holds(self, receptacle: str, thing: str) -> bool:
        return thing in self.tables["holds"].get(receptacle, ())

    @cached_property
    def seen(self) -> list[str]:
        return [plan for plan in self.tables["floor_plans"] if plan not in self.unseen]

    @cached_property
    def unseen(self) -> list[str]:
        return [plan for plan in self.tables["floor_plans"] if plan in self.tables["unseen"]]


@dataclass
class Room:
    """A room's receptacles and their contents, as ids and types in AI2-THOR's notation."""

    floor_plan: str
    receptacles: dict[str, str]
    things: dict[str, str] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def of_type(self, kind: str) -> list[str]:
        return [name for name, its in (self.receptacles | self.things).items() if its == kind]


@dataclass(frozen=True)
class Game:
    """A game: `content` for game.tw-pddl, `trajectory` for traj_data.json, and `folder` in the published layout."""

    task_type: TaskType
    folder: str
    content: dict[str, Any]
    trajectory: dict[str, Any]

    @property
    def walkthrough(self) -> list[str]:
        return self.content["walkthrough"]


def make_game(package: Package, task_type: TaskType, floor_plans: list[str], seed: str) -> Game:
    """Generate a game of a type in one of the floor plans, deterministically from the arguments."""
    rng = random.Random(seed)
    while True:
        room = _furnish(package, rng.choice(floor_plans), rng)
        goals = _goals(package, room, task_type)
        if goals:
            break
    target, destination = rng.choice(goals)
    _fill(package, room, task_type, target, destination, rng)
    lamp = next((kind for kind in room.things.values() if kind in package.lamps), "")
    goal = package.tables["goals"][task_type]
    names = {"obj": target, "recep": destination, "toggle": lamp, "mrecep": ""}
    text = rng.choice(goal["templates"]).format(**{key: name.lower() for key, name in names.items()})
    content = {
        "pddl_domain": package.tables["domain"],
        "grammar": package.tables["grammar"].replace("UNKNOWN GOAL", text),
        "pddl_problem": _problem(package, room) + goal["pddl"].format(**names).replace("#", "-"),
        "solvable": True,
        "walkthrough": _solve(package, room, task_type, target, destination),
    }
    looks, scene = task_type is TaskType.LOOK, int(room.floor_plan.removeprefix("FloorPlan"))
    trajectory = {
        "task_type": task_type.value,
        "task_id": seed,
        "pddl_params": {
            "object_target": target,
            "parent_target": "" if looks else destination,
            "toggle_target": lamp if looks else "",
            "mrecep_target": "",
            "object_sliced": False,
        },
        "scene": {"floor_plan": room.floor_plan, "scene_num": scene},
    }
    folder = f"{task_type}-{target}-None-{lamp if looks else destination}-{scene}"
    return Game(task_type, folder, content, trajectory)


def _furnish(package: Package, floor_plan: str, rng: random.Random) -> Room:
    plan = package.tables["floor_plans"][floor_plan]
    # a sink's basin holds and cleans objects: Sink|+00.00|+00.89|-02.00|SinkBasin
    parts = {name: name.split("|") for name in plan["openable"]}
    receptacles = {name: part[-1] if part[-1].endswith("Basin") else part[0] for name, part in parts.items()}
    listed = [
        kind for kind in plan["objects"] if kind in package.tables["receptacles"] and kind in package.tables["holds"]
    ]
    for kind in listed:
        if kind not in receptacles.values():
            for number in range(rng.choice((1, 1, 2, 3)) if kind in _SEVERAL else 1):
                basin = f"|{kind}" if kind.endswith("Basin") else ""
                receptacles[f"{kind.removesuffix('Basin')}|{number + 1}{basin}"] = kind
    return Room(floor_plan, receptacles)


def _portable(package: Package, room: Room) -> list[str]:
    """Return the object types that the floor plan lists and the room's receptacles can hold."""
    listed = package.tables["floor_plans"][room.floor_plan]["objects"]
    kinds = set(room.receptacles.values())
    return [
        thing for thing in listed if thing not in package.lamps and any(package.holds(kind, thing) for kind in kinds)
    ]


def _goals(package: Package, room: Room, task_type: TaskType) -> list[tuple[str, str]]:
    """Return the (object, destination) types for which the task is possible and not done from the start, because the
    object can lie elsewhere. For LOOK the destination is an arbitrary receptacle without meaning."""
    kinds = sorted(set(room.receptacles.values()))
    treatment = TREATMENTS.get(task_type)
    if treatment is not None and treatment.station not in kinds:
        return []
    if task_type is TaskType.LOOK and not _lamps(package, room):
        return []
    goals = []
    for thing in _portable(package, room):
        holders = [kind for kind in kinds if package.holds(kind, thing)]
        if treatment is not None and thing not in package.tables["affords"][treatment.affords]:
            continue
        goals += [
            (thing, kind) for kind in holders if len(holders) > 1 and (not treatment or kind != treatment.station)
        ]
    return goals


def _lamps(package: Package, room: Room) -> list[str]:
    listed = package.tables["floor_plans"][room.floor_plan]["objects"]
    return [lamp for lamp in package.lamps if lamp in listed] if set(room.receptacles.values()) & {*_FLAT} else []


def _fill(package: Package, room: Room, task_type: TaskType, target: str, destination: str, rng: random.Random) -> None:
    """Put objects into the room, the target objects outside their destination."""
    for thing in _portable(package, room):
        wanted = thing == target
        count = 2 if wanted and task_type is TaskType.TWO else rng.choice((1, 1, 2))
        places = [
            name
            for name, kind in room.receptacles.items()
            if package.holds(kind, thing) and not (wanted and kind == destination)
        ]
        for number in range(count):
            name = f"{thing}|{number + 1}"
            room.things[name], room.places[name] = thing, rng.choice(places)
    for lamp in _lamps(package, room)[:1]:
        name = f"{lamp}|1"
        flat = [place for place, kind in room.receptacles.items() if kind in _FLAT]
        room.things[name], room.places[name] = lamp, rng.choice(flat)


def _problem(package: Package, room: Room) -> str:
    tables = package.tables
    locations = {name: f"loc|{number}" for number, name in enumerate(room.receptacles, 1)}
    things, kinds = sorted(set(room.things.values())), sorted(set(room.receptacles.values()))
    objects = {"agent1": "agent", "loc|0": "location", **dict.fromkeys(locations.values(), "location")}
    objects |= {f"{kind}Type": "otype" for kind in things} | dict.fromkeys(room.things, "object")
    objects |= {f"{kind}Type": "rtype" for kind in kinds} | dict.fromkeys(room.receptacles, "receptacle")
    facts: list[tuple[str, ...]] = [("atLocation", "agent1", "loc|0")]
    for name, kind in room.receptacles.items():
        facts += [("receptacleType", name, f"{kind}Type"), ("receptacleAtLocation", name, locations[name])]
        facts += [("openable", name)] if kind in tables["openable"] else []
    facts += [
        ("canContain", f"{kind}Type", f"{thing}Type")
        for kind in kinds
        for thing in things
        if package.holds(kind, thing)
    ]
    for name, kind in room.things.items():
        place = room.places[name]
        facts += [("objectType", name, f"{kind}Type"), ("inReceptacle", name, place)]
        facts += [("objectAtLocation", name, locations[place])]
        facts += [("pickupable", name)] if kind not in package.lamps else []
        facts += [("isReceptacleObject", name)] if kind in tables["movable"] else []
        facts += [(means.lower(), name) for means in _PROPERTIES if kind in tables["affords"][means]]
    lines = ["(define (problem room)", "(:domain alfred)", "(:objects"]
    lines += [f"{_mangled(name)} - {kind}" for name, kind in objects.items()]
    lines += [")", "(:init", *(f"({' '.join(map(_mangled, fact))})" for fact in facts), "(= (total-cost) 0)", ")"]
    return "\n".join(lines)


def _solve(package: Package, room: Room, task_type: TaskType, target: str, destination: str) -> list[str]:
    called = _display_names(room)
    actions: list[str] = []
    opened = set()
    here = ""

    def go_to(place: str, opens: bool = True) -> None:
        nonlocal here
        if place != here:
            actions.append(f"go to {called[place]}")
            here = place
        if opens and room.receptacles[place] in package.tables["openable"] and place not in opened:
            actions.append(f"open {called[place]}")
            opened.add(place)

    wanted = room.of_type(target)
    if task_type is not TaskType.TWO:
        wanted = wanted[:1]
    end = room.of_type(destination)[0]
    for thing in wanted:
        go_to(room.places[thing])
        actions.append(f"take {called[thing]} from {called[here]}")
        if treatment := TREATMENTS.get(task_type):
            go_to(room.of_type(treatment.station)[0], opens=False)
            actions.append(f"{treatment.verb} {called[thing]} with {called[here]}")
        if task_type is TaskType.LOOK:
            lamp = next(name for name, kind in room.things.items() if kind in package.lamps)
            go_to(room.places[lamp])
            actions.append(f"use {called[lamp]}")
        else:
            go_to(end)
            actions.append(f"move {called[thing]} to {called[here]}")
    return actions


def _mangled(name: str) -> str:
    return "".join(_MANGLED.get(letter, letter) for letter in name)


def _display_names(room: Room) -> dict[str, str]:
    """Return id -> the engine's display name: type and number, counting down in the order of the mangled ids."""
    mangled = {_mangled(name).lower(): name for name in (*room.receptacles, *room.things)}
    kinds = {name: key.split("_bar_")[0] + ("basin" if "basin" in key else "") for key, name in mangled.items()}
    left = Counter(kinds.values())
    shown = {}
    for key in sorted(mangled):
        kind = kinds[mangled[key]]
        shown[mangled[key]] = f"{kind} {left[kind]}"
        left[kind] -= 1
    return shown
