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

_VARIABLE = re.compile(r"\$\{?(\w+)")


def expanded_path(option: str, text: str) -> Path:
    """Return an absolute path with ~ and variables expanded; links are not resolved. Raises SettingError if a variable
    is not set."""
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
    `processes`: maximum number of subprocesses that take new games. They start on demand. `games`: games after which a
    subprocess is replaced, because its memory grows with each. `python`: the Python that has the package `alfworld`;
    None: this one."""

    def __init__(self, processes: int, games: int, python: str | None = None) -> None:
        self._limit, self._games, self._python = processes, games, python
        self._processes: list[_Process] = []
        self._lock = threading.Lock()
        self._package: Package | None = None
        self._reading = threading.Lock()
        self.started = 0
        """Subprocesses started so far."""

    def open(self, game: Path | dict[str, Any]) -> tuple["Play", Scene]:
        """Begin a game, given by its file or its content. Return it with its first scene; `close` it after use. Raises
        GameError (the game cannot be loaded), ToolInfrastructureError (the subprocess ended, or did not start)."""
        process = self._place()
        play = Play(process, self._leave)
        try:
            return play, play.begin(str(game) if isinstance(game, Path) else game)
        except BaseException:
            play.close()
            raise

    def package(self) -> Package:
        """Return the package's tables of floor plans, objects and goals, which are read once. Raises
        ToolInfrastructureError as `open` does."""
        with self._reading:
            if self._package is None:
                process = self._place()
                try:
                    self._package = Package(process.ask({"do": "read_package"}))
                finally:
                    self._leave(process)
            return self._package

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            ending, self._processes = self._processes, []
        for process in ending:
            process.end()

    def pids(self) -> list[int]:
        """Return the ids of the running processes."""
        with self._lock:
            return [process.pid for process in self._processes if process.pid]

    def _place(self) -> "_Process":
        """Return the process for the next game: the one with the fewest games, or a new one."""
        with self._lock:
            self._processes = [process for process in self._processes if not process.gone]
            taking = [process for process in self._processes if process.given < self._games]
            process = min(taking, key=lambda process: process.plays, default=None)
            if process is None or (process.plays and len(taking) < self._limit):
                process = _Process(self._python)
                self._processes.append(process)
                self.started += 1
            process.given += 1
            process.plays += 1
            return process

    def _leave(self, process: "_Process") -> None:
        with self._lock:
            process.plays -= 1
            worn = process.plays == 0 and process.given >= self._games
            if worn and process in self._processes:
                self._processes.remove(process)
        if worn:
            process.end()


class Play:
    """One game that is being played."""

    _numbers = itertools.count()

    def __init__(self, process: "_Process", leave: Any) -> None:
        self._process, self._leave = process, leave
        self._number = next(self._numbers)
        self._closed = False

    def begin(self, game: str | dict[str, Any]) -> Scene:
        """Load the game. Raises the errors of `Engine.open`."""
        return self._ask("open", game=game)

    def act(self, action: str) -> Scene:
        """Take an action and return the resulting scene. Raises ToolInfrastructureError if the subprocess ended."""
        return self._ask("act", action=action)

    def close(self) -> None:
        """End the game. May be called again."""
        if self._closed:
            return
        self._closed = True
        try:
            self._process.ask({"do": "close", "play": self._number})
        except (GameError, ToolInfrastructureError):
            pass  # the game was never loaded, or ended with its process
        finally:
            self._leave(self._process)

    def _ask(self, what: str, **arguments: Any) -> Scene:
        answer = self._process.ask({"do": what, "play": self._number, **arguments})
        return Scene(answer["observation"], tuple(answer["admissible"]), answer["won"])


class _Process:
    """A subprocess, started by its first request."""

    def __init__(self, python: str | None) -> None:
        self.given = 0
        """Games given to it since its start."""
        self.plays = 0
        """Games currently being played in it."""
        self.dead = False
        self._python = python
        self._process: KillableProcess | None = None
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def gone(self) -> bool:
        """True if it can take no more games."""
        return self.dead or (self._process is not None and not self._process.running)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer. Raises GameError, ToolInfrastructureError."""
        with self._lock:
            if self.dead:
                raise ToolInfrastructureError("ALFWorld's process, with this chain's game, has ended")
            try:
                if self._process is None:
                    self._process = KillableProcess(str(PROCESS), executable=self._python)
                self._process.send(request)
                answer = self._process.receive()
            except ChildProcessError as error:
                self.dead = True
                raise ToolInfrastructureError(str(error)) from error
            if answer is None:
                self.dead = True
                status = self._process.exit_status()
                self._process.end()
                problem = f"ALFWorld's process ended (status {status}), with this chain's game in it"
                raise ToolInfrastructureError(problem)
        if "error" in answer:
            raise GameError(answer["error"])
        return answer

    def end(self) -> None:
        """Kill the process."""
        self.dead = True
        if self._process is not None:
            self._process.end()


def found_python(python: str | None) -> str | None:
    """Return the absolute path of the Python with the packages; None: this one. Raises SettingError as `check_python`
    does, or if a variable in `python` is not set."""
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
