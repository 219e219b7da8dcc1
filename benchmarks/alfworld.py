"""ALFWorld's engine in our process, compared with unmodified TextWorld, which translates each game four times and
parses the texts of all actions at each step.

Both play the walkthroughs of the same generated games, one after another, in a dedicated process; each game is begun
twice, as by two chains of a group. The environment variable AGENTFACTORY_ALFWORLD_PYTHON, or --python, names the Python
that has the package `alfworld`; default: this one.

The last line is JSON: `begin`, `begin_again` and `step` are ratios of CPU time, ours to TextWorld's;
`begin_seconds` and `step_ms` are ours per game and per step, and `process_mb` its resident memory.

    python benchmarks/alfworld.py [--quick]
"""

import argparse
import json
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil

from agentfactory.base.processes.killable import KillableProcess
from agentfactory.worlds.alfworld.engine import PROCESS, check_python
from agentfactory.worlds.alfworld.games import GeneratedGames
from agentfactory.worlds.alfworld.generator import Game, Package

AS_IT_IS = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("engine_process", {str(PROCESS)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.remember = lambda: None
module.main()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="6 games")
    parser.add_argument("--python", default=os.environ.get("AGENTFACTORY_ALFWORLD_PYTHON"))
    options = parser.parse_args()
    check_python(options.python)
    count = 6 if options.quick else 24
    ours, megabytes, steps = measure(count, options.python, str(PROCESS))
    theirs, _, _ = measure(count, options.python, "-c", AS_IT_IS)
    ratios = {what: ours[what] / theirs[what] for what in ("begin", "begin_again", "step")}
    figures = {"begin_seconds": ours["begin"] / count, "step_ms": ours["step"] / steps * 1000}
    print(f"{count} games, {steps} steps")
    print(json.dumps({name: float(f"{value:.3g}") for name, value in (ratios | figures).items()} | megabytes))


def measure(count: int, python: str | None, *arguments: str) -> tuple[Counter[str], dict[str, float], int]:
    """Play `count` games in a process. Return the CPU seconds by kind of request, the memory, and the number of
    steps."""
    process = KillableProcess(*arguments, executable=python)
    try:
        measured = psutil.Process(process.pid)
        seconds: Counter[str] = Counter()

        def ask(what: str, request: dict[str, Any]) -> dict[str, Any]:
            before = measured.cpu_times()
            process.send(request)
            answer = process.receive()
            assert answer is not None
            assert "error" not in answer, answer
            after = measured.cpu_times()
            seconds[what] += after.user + after.system - before.user - before.system  # type: ignore[assignment]
            return answer

        games = GeneratedGames(0, Package(ask("package", {"do": "read_package"})))
        played = [games.game(f"train/{number:06d}") for number in range(count)]
        play(games.game("valid_seen/000000"), ask)  # imports
        seconds.clear()
        for game in played:
            play(game, ask)
        return seconds, {"process_mb": measured.memory_info().rss >> 20}, sum(len(game.walkthrough) for game in played)
    finally:
        process.end()


def play(game: Game, ask: Callable[[str, dict[str, Any]], dict[str, Any]]) -> None:
    """Begin a game twice and play it once."""
    for number, what in enumerate(("begin", "begin_again")):
        ask(what, {"do": "open", "play": number, "game": game.content})
    answer: dict[str, Any] = {}
    for action in game.walkthrough:
        answer = ask("step", {"do": "act", "play": 0, "action": action})
    assert answer["won"]
    for number in (0, 1):
        ask("close", {"do": "close", "play": number})


if __name__ == "__main__":
    main()
