"""`Engine`: a pool of subprocesses that run games, and the games that chains play in them."""

import itertools
import os
import re
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.base.processes import environment
from agentfactory.base.processes.killable import KillableProcess
from agentfactory.base.user_code.extras import install_command
from agentfactory.base.user_code.import_path import is_installed, own_python
from agentfactory.worlds.alfworld.generator import Package
from agentfactory.worlds.game_processes.pool import Pool

_VARIABLE = re.compile(r"\$\{?(\w+)")


def expanded_path(option: str, text: str) -> Path:
    """Return an absolute path with ~ and variables expanded. Raises SettingError if a variable is not set."""
    for name in _VARIABLE.findall(text):
        if not os.environ.get(name):
            raise SettingError(
                option, f"{text}: the variable {name} is not set", f"set {name}, or give the path itself"
            )
    return Path(os.path.expandvars(text)).expanduser().absolute()


PACKAGES = ("alfworld", "fast_downward")
PROCESS = Path(__file__).with_name("engine_process.py")


class GameError(ValueError):
    """The engine cannot load a game."""


@dataclass(frozen=True)
class Scene:
    """A game's output: the observation, the admissible actions in order, and whether the task is done."""

    observation: str
    admissible: tuple[str, ...]
    won: bool


class Engine:
    """A pool of subprocesses, each running several games. Thread-safe; calls to one subprocess are serialized.
    `processes`: number up to which new games get a subprocess of their own. `games`: games after which a subprocess is
    replaced, because its memory grows with each. `python`: the Python that has `alfworld`; None: this one."""

    def __init__(self, processes: int, games: int, python: str | None = None) -> None:
        self._pool = Pool(lambda: _Process(python), lambda _, played: played >= games, spread=processes)
        self._package: Package | None = None
        self._reading = threading.Lock()

    @property
    def started(self) -> int:
        return self._pool.started

    def open(self, game: Path | dict[str, Any]) -> tuple["Play", Scene]:
        """Begin a game, given by its file or its content. Return it with its first scene; `close` it after use. Raises
        GameError (the game cannot be loaded), ToolInfrastructureError (the subprocess ended, or did not start)."""
        play = Play(self._pool)
        try:
            return play, play.begin(str(game) if isinstance(game, Path) else game)
        except BaseException:
            play.close()
            raise

    def package(self) -> Package:
        """Return the package's tables of floor plans, objects and goals, read once. Raises as `open` does."""
        with self._reading:
            if self._package is None:
                place, process = self._pool.enter()
                try:
                    self._package = Package(process.ask({"do": "read_package"}))
                finally:
                    self._pool.leave(place)
            return self._package

    def close(self) -> None:
        self._pool.close()

    def pids(self) -> list[int]:
        return self._pool.pids()


class Play:
    _numbers = itertools.count()

    def __init__(self, pool: "Pool[_Process]") -> None:
        self._pool = pool
        self._place, self._process = pool.enter()
        self._number = next(self._numbers)
        self._closed = False

    def begin(self, game: str | dict[str, Any]) -> Scene:
        return self._ask("open", game=game)

    def act(self, action: str) -> Scene:
        """Take an action and return the resulting scene. Raises ToolInfrastructureError if the subprocess ended."""
        return self._ask("act", action=action)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._process.ask({"do": "close", "play": self._number})
        except (GameError, ToolInfrastructureError):
            pass  # the game was never loaded, or ended with its process
        finally:
            self._pool.leave(self._place)

    def _ask(self, what: str, **arguments: Any) -> Scene:
        answer = self._process.ask({"do": what, "play": self._number, **arguments})
        return Scene(answer["observation"], tuple(answer["admissible"]), answer["won"])


class _Process:
    def __init__(self, python: str | None) -> None:
        self._dead = False
        self._lock = threading.Lock()
        try:
            self._process = KillableProcess(str(PROCESS), executable=python)
        except ChildProcessError as error:
            raise ToolInfrastructureError(str(error)) from error
        self.pid = self._process.pid

    @property
    def alive(self) -> bool:
        return not self._dead and self._process.running

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            if self._dead:
                raise ToolInfrastructureError("ALFWorld's process, with this chain's game, has ended")
            self._process.send(request)
            answer = self._process.receive()
            if answer is None:
                status = self._process.exit_status()
                self.end()
                problem = f"ALFWorld's process ended (status {status}), with this chain's game in it"
                raise ToolInfrastructureError(problem)
        if "error" in answer:
            raise GameError(answer["error"])
        return answer

    def end(self) -> None:
        self._dead = True
        self._process.end()


def found_python(python: str | None) -> str | None:
    """Return the path of the Python with the packages; None: this one. Raises SettingError as `check_python`."""
    try:
        found = None if python is None else str(expanded_path("python", python))
    except SettingError as error:
        fix = f"{error.fix}, of a Python with the package alfworld; `make alfworld` installs .venv-alfworld/bin/python"
        raise SettingError(error.field, error.problem, fix) from None
    check_python(found)
    return found


def check_python(python: str | None) -> None:
    """Raise SettingError if a Python (None: this one) cannot be run, or lacks ALFWorld's packages. Imports nothing."""
    if python is None:
        lacking = [name for name in PACKAGES if not is_installed(name)]
    else:
        question = f"from importlib.util import find_spec; print([n for n in {PACKAGES} if not find_spec(n)])"
        try:
            command, env = own_python("-c", question, executable=python), environment.for_others()
            asked = subprocess.run(command, capture_output=True, text=True, env=env)
        except OSError as error:
            raise SettingError(
                "python", f"{python} cannot be run: {error.strerror}", "name a Python that has alfworld"
            ) from error
        if asked.returncode:
            raise SettingError(
                "python", f"{python} fails: {asked.stderr.strip()[-200:]}", "name a Python that has alfworld"
            )
        lacking = [name for name in PACKAGES if name in asked.stdout]
    if lacking:
        where = "here" if python is None else f"where {python} is"
        fix = f"{install_command('alfworld')} (gcc and cmake build it), or name by `python` one that has alfworld"
        raise SettingError("python", f"ALFWorld needs {' and '.join(lacking)}, not installed {where}", fix)
