"""Write generated games to a folder in the published layout, which ALFWorld's own loader accepts:
`python -m agentfactory.worlds.alfworld.write_games FOLDER [--train N] [--valid_seen N] [--valid_unseen N]`.

Each game's walkthrough is played to a win before the game is written. The same command resumes an interrupted run.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from agentfactory.base.errors import SettingError
from agentfactory.base.files.disk import write_whole
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.worlds.alfworld.engine import Engine, found_python
from agentfactory.worlds.alfworld.games import COUNTS, FOLDER, GAME, TRAJECTORY, GeneratedGames, Split
from agentfactory.worlds.alfworld.generator import Game, TaskType


def main() -> None:
    """Write the games. Exits with status 2 if nothing was done, 1 if writing failed, 130 if interrupted."""
    parser = argparse.ArgumentParser("python -m agentfactory.worlds.alfworld.write_games", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder to write; usable as ALFWORLD_DATA")
    for split in Split:
        about = f"games of this split, at most {COUNTS[split]}; default: 0"
        parser.add_argument(f"--{split}", type=int, default=0, metavar="N", help=about)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the games; default: 0")
    about = "the Python that has the package alfworld, such as .venv-alfworld/bin/python; default: this one"
    parser.add_argument("--python", metavar="FILE", help=about)
    options = parser.parse_args()
    counts = {split: getattr(options, split) for split in Split}
    for split, count in counts.items():
        if not 0 <= count <= COUNTS[split]:
            parser.error(f"--{split}: got {count}; fix: give 0 to {COUNTS[split]}")
    if not any(counts.values()):
        parser.error(f"no games are requested; fix: give {' or '.join(f'--{split} N' for split in Split)}")
    if options.folder.exists() and not options.folder.is_dir():
        parser.error(f"folder: {options.folder} is a file; fix: name a folder")
    try:
        python = found_python(options.python)
    except SettingError as error:
        parser.error(str(error.at(field="--python")))
    cores = os.cpu_count() or 1
    engine = Engine(cores, 200, python)
    try:
        for number, file in enumerate(write_games(engine, options.folder, counts, options.seed, cores), 1):
            print(f"\r{number} of {sum(counts.values())}: {file.parent}", end="", flush=True)
        print()
    except KeyboardInterrupt:
        print("\ninterrupted; the same command resumes", file=sys.stderr)
        sys.exit(130)
    except (ToolInfrastructureError, ValueError, OSError) as error:
        sys.exit(f"\nfailed: {error}; the same command resumes")
    finally:
        engine.close()


def write_games(
    engine: Engine, folder: Path, counts: dict[Split, int], seed: int = 0, at_once: int = 1
) -> Iterator[Path]:
    """Yield the file of each written game, from `at_once` threads. Raises ValueError if one is not won."""
    games = GeneratedGames(seed, engine.package())

    def write(name: str) -> Path:
        game, (split, number) = games.game(name), name.split("/")
        place = folder / FOLDER / split / game.folder / f"trial_{number}"
        if not (place / GAME).exists():
            check(engine, game)
            place.mkdir(parents=True, exist_ok=True)
            write_whole(place / TRAJECTORY, json.dumps(game.trajectory, indent=1).encode())
            # written last, because a game counts only if this file exists
            write_whole(place / GAME, json.dumps(game.content).encode())
        return place / GAME

    names = [name for split, count in counts.items() for name, _ in islice(games.names(split, list(TaskType)), count)]
    with ThreadPoolExecutor(at_once) as threads:
        yield from threads.map(write, names)


def check(engine: Engine, game: Game, on_scene: Callable[[str], None] = lambda observation: None) -> None:
    """Play a game's walkthrough; `on_scene` gets each observation. Raises ValueError if an action is not admissible, or
    if the game is not won exactly by the last one."""
    play, scene = engine.open(game.content)
    try:
        for action in game.walkthrough:
            on_scene(scene.observation)
            if scene.won or action not in scene.admissible:
                raise ValueError(f"{game.folder}: {action!r} comes after the win, or is not admissible")
            scene = play.act(action)
        on_scene(scene.observation)
        if not scene.won:
            raise ValueError(f"{game.folder} is not won by its walkthrough")
    finally:
        play.close()


if __name__ == "__main__":
    main()
