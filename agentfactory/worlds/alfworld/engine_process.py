"""The subprocess that runs ALFWorld's games: TextWorld with its planner, parts of which are GPL.

It imports nothing from AgentFactory, so it can run in a Python environment with only `alfworld` installed. It reads
requests on stdin and answers each with a line of JSON:

- {"do": "open", "play": N, "game": PATH or content}: `observation`, `admissible` (actions), `won`
- {"do": "act", "play": N, "action": TEXT}: the same, after the action
- {"do": "close", "play": N}: nothing
- {"do": "read_package"}: the tables of the package `alfworld` for floor plans, objects and goals

A failed request is answered by `error`. The kernel's alarm kills the process if a request takes too long, and the
process exits when its parent is gone.
"""

import contextlib
import copy
import faulthandler
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

REQUEST_SECONDS = 120.0
GAMES_REMEMBERED = 16
_POLL_SECONDS = 0.5

# on import the package creates this folder, by default in the user's home; nothing here uses it
os.environ["ALFWORLD_DATA"] = tempfile.gettempdir()


class Engine:
    """The games being played in this process, by number."""

    def __init__(self) -> None:
        import fast_downward

        self._plays: dict[int, Any] = {}
        self._libraries: list[Any] = []
        """Unused copies of the planner's library. Each game needs its own copy, into which it loads its problem. Copies
        are reused because they are large, and because unloading one can crash the process."""
        load = fast_downward.load_lib
        fast_downward.load_lib = lambda: self._libraries.pop() if self._libraries else load()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "open":
                return self._open(request["play"], request["game"])
            case "act":
                state, _, _ = self._plays[request["play"]].step(request["action"])
                return _shown(state)
            case "close":
                self._libraries.append(self._plays.pop(request["play"]).unwrapped.downward_lib)
                return {}
            case "read_package":
                return read_package()
        raise ValueError(f"no such request: {request['do']!r}")

    def _open(self, play: int, game: str | dict[str, Any]) -> dict[str, Any]:
        import textworld
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
        from textworld.envs import PddlEnv

        # without "walkthrough" and "policy_commands", which need a planner search of up to minutes
        infos = textworld.EnvInfos(won=True, admissible_commands=True)
        environment = AlfredDemangler(PddlEnv(infos), shuffle=False)
        try:
            environment.load(game)
            state = environment.reset()
        except Exception:
            self._libraries.append(environment.unwrapped.downward_lib)
            raise
        self._plays[play] = environment
        return _shown(state)


def _shown(state: Any) -> dict[str, Any]:
    return {"observation": state.feedback, "admissible": state["admissible_commands"], "won": bool(state["won"])}


def read_package() -> dict[str, Any]:
    """Return the tables for generating games: `domain` and `grammar`, `floor_plans` (with the `objects` and `openable`
    receptacles of each), `holds` (receptacle -> objects), `affords` (action -> objects), and `goals`."""
    import alfworld.gen
    from alfworld.gen import constants, goal_library
    from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH

    layouts = Path(alfworld.gen.__file__).parent / "layouts"
    plans = {}
    for file in layouts.glob("*-objects.json"):
        name = file.name.removesuffix("-objects.json")
        openable = json.loads((layouts / f"{name}-openable.json").read_text())
        plans[name] = {"objects": sorted(set(json.loads(file.read_text()))), "openable": sorted(openable)}
    return {
        "domain": Path(ALFRED_PDDL_PATH).read_text(),
        "grammar": Path(ALFRED_TWL2_PATH).read_text(),
        "floor_plans": dict(sorted(plans.items(), key=lambda plan: int(re.sub(r"\D", "", plan[0])))),
        "unseen": [f"FloorPlan{number}" for number in constants.TEST_SCENE_NUMBERS],
        "receptacles": sorted(set(constants.RECEPTACLES) - constants.MOVABLE_RECEPTACLES_SET),
        "movable": sorted(constants.MOVABLE_RECEPTACLES_SET),
        "openable": sorted(constants.OPENABLE_CLASS_SET),
        "holds": {receptacle: sorted(held) for receptacle, held in constants.VAL_RECEPTACLE_OBJECTS.items()},
        "affords": {action: sorted(things) for action, things in constants.VAL_ACTION_OBJECTS.items()},
        "goals": {name: {"pddl": g["pddl"], "templates": g["templates"]} for name, g in goal_library.gdict.items()},
    }


def remember() -> None:
    """Cache TextWorld's parsed texts and its last translated problems. Without this it translates each problem again
    for its planner, again on reset, and parses the texts of all actions at every step."""
    import fast_downward
    import textworld.logic
    from textworld.envs.pddl import logic, textgen

    parse, read, query = (
        textgen._parse_and_convert,
        logic._parse_and_convert,
        textworld.logic.Rule.parse_conjunctive_query,
    )
    translate = fast_downward.pddl2sas
    parsed = lru_cache(maxsize=10_000)(lambda text, rule: parse(text, rule_name=rule))
    # a copy, because symbols get their contexts later
    textgen._parse_and_convert = lambda text, rule_name, **_: copy.deepcopy(parsed(text, rule_name))
    textworld.logic.Rule.parse_conjunctive_query = lru_cache(maxsize=10_000)(query)
    logic._parse_and_convert = lru_cache(maxsize=GAMES_REMEMBERED)(read)
    translated = lru_cache(maxsize=GAMES_REMEMBERED)(lambda domain, problem: translate(domain, problem))
    fast_downward.pddl2sas = lambda domain, problem, **_: translated(domain, problem)


def end_with_parent() -> None:
    """Exit this process when its parent is gone, even during a request."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    faulthandler.enable()  # the planner's library is C++
    end_with_parent()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # other output must not mix with replies
    remember()
    engine = Engine()
    print(json.dumps({"ready": True}), file=replies)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, REQUEST_SECONDS)
        try:
            answer = engine.answer(request)
        except Exception as error:  # boundary: a broken game file makes any of TextWorld's parsers fail
            answer = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), file=replies)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        main()
