"""`Jvms`: Java processes with ScienceWorld's engine, each of which plays several games, one call at a time."""

import os
import shutil
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.base.processes import environment
from agentfactory.base.user_code.extras import check_extra
from agentfactory.worlds.game_processes.pool import Place, Pool

T = TypeVar("T")

_START_SECONDS = 120.0
_ANSWER_SECONDS = 120.0
"""Timeout of a call; the slowest, loading a scene with its gold path, takes seconds."""
_OUT_OF_MEMORY = 3
"""Exit status of a JVM with -XX:+ExitOnOutOfMemoryError."""
_MOST_GAMES = 500
"""Games after which a process is retired, in case its engine leaks memory of old games."""
_BESIDES_HEAP_MB = 320
"""Allowed memory of a process beyond its heap (measured: 130 to 170 MiB); a larger one is retired."""


class GameLost(ToolInfrastructureError):
    """The game is lost, because its Java process has ended or the engine failed."""


def check_engine() -> None:
    """Raise SettingError with installation advice if the engine or Java is missing."""
    check_extra("scienceworld")
    java = _java()
    if shutil.which(java) is None:
        fix = "install Java 8 or newer (Debian, Ubuntu: apt install default-jre-headless), or set JAVA_HOME"
        raise SettingError("scienceworld", f"ScienceWorld's engine needs Java, and there is no program {java}", fix)


def _java() -> str:
    home = os.environ.get("JAVA_HOME")
    return str(Path(home) / "bin" / "java") if home else "java"


@dataclass(frozen=True)
class Step:
    observation: str
    score: int
    """From 0 to 100; -100 if the task has failed."""
    completed: bool
    moves: int
    """Moves so far: `wait` takes eleven, most actions one; looking and unrecognized actions take none."""


class Jvm:
    """A Java process. It ends when this process ends, in whatever way. The engine keeps part of a game's state in
    global variables: the random generator, the next object's number, and the simplifications. They are swapped when a
    call is for another game than the last, so games do not share them. `heap_mb`: maximum heap size in MiB; the process
    needs about 150 MiB in addition. Raises GameLost if the process did not start."""

    def __init__(self, heap_mb: int) -> None:
        from py4j.java_gateway import GatewayParameters, JavaGateway, find_jar_path
        from scienceworld.constants import BASEPATH, JAR_PATH

        self._heap_mb = heap_mb
        self._lock = threading.Lock()
        self._present: Game | None = None
        self._forgotten: deque[Game] = deque()
        self._ended = False
        # neither the JIT's last tier nor parallel garbage collection makes the engine faster
        options = [f"-Xmx{heap_mb}m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:+ExitOnOutOfMemoryError"]
        # the engine lists things in the order of their identity hashes, which Java otherwise draws anew for each object
        options += ["-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2"]
        classes = ["-classpath", os.pathsep.join((find_jar_path(), JAR_PATH))]
        server = ["py4j.GatewayServer", "--die-on-broken-pipe", "--enable-auth", "0"]
        with tempfile.TemporaryFile() as said:
            try:
                # a separate session, so that Ctrl-C in a terminal does not reach it
                self._process = subprocess.Popen(
                    [_java(), *options, *classes, *server],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=said,
                    cwd=BASEPATH,  # reads a file of types there
                    env=environment.for_others(),
                    start_new_session=True,
                )
            except OSError as error:
                raise GameLost(f"Java does not start: {error}") from error
            assert self._process.stdout is not None
            watch = threading.Timer(_START_SECONDS, self._process.kill)
            watch.start()
            port, token = self._process.stdout.readline(), self._process.stdout.readline()
            watch.cancel()
            if not token:
                self.end()
                said.seek(0)
                raise GameLost(f"Java does not start: {said.read().decode(errors='replace').strip() or self.loss}")
        address = GatewayParameters(
            port=int(port),
            auth_token=token.decode().strip(),
            read_timeout=_ANSWER_SECONDS,
            # memory management would call the JVM from whichever thread collects garbage, and block it
            enable_memory_management=False,
        )
        self._gateway = JavaGateway(gateway_parameters=address)
        self._classes = self._gateway.jvm
        with self._calling():
            self._prepare()

    def _prepare(self) -> None:
        java, nowhere = self._classes.java, "/dev/null"
        # discard the engine's output, which nothing reads
        java.lang.System.setOut(java.io.PrintStream(nowhere))
        # it would write newly seen types to a file in the current folder, which all processes share
        self._field("util.UniqueTypeID$", "FILENAME_IDS").set(self._object("util.UniqueTypeID"), nowhere)
        self._random, self._random_field = self._object("scala.util.Random"), self._field("scala.util.Random", "self")
        self._numbers = self._classes.util.UniqueIdentifier
        self._simplifier = self._classes.main.scala.scienceworld.runtime.SimplifierProcessor

    def _object(self, name: str) -> Any:
        return self._field(f"{name}$", "MODULE$").get(None)

    def _field(self, of: str, name: str) -> Any:
        field = self._classes.java.lang.Class.forName(of).getDeclaredField(name)
        field.setAccessible(True)
        return field

    @property
    def alive(self) -> bool:
        return not self._ended and self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def loss(self) -> str:
        status = self._process.poll()
        if status == _OUT_OF_MEMORY:
            return f"Java needed more than {self._heap_mb} MiB; raise heap_mb, or lower games_per_jvm"
        return "the Java process was ended" if status is None else f"the Java process ended with status {status}"

    def resident_mb(self) -> int:
        """Return the resident memory in MiB; 0 if the process has ended."""
        try:
            return psutil.Process(self.pid).memory_info().rss >> 20
        except psutil.NoSuchProcess:
            return 0

    def end(self) -> None:
        """Kill the process; its games are lost."""
        self._ended = True
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def call(self, game: "Game", function: Callable[[], T]) -> T:
        """Return the result of `function`, which calls the engine for a game. Raises GameLost if the process has ended,
        or was killed because it did not answer, or the engine failed."""
        with self._lock, self._calling():
            while self._forgotten:
                left = self._forgotten.popleft()
                if self._present is left:
                    self._present = None
                for one in (left.engine, left.random):
                    if one is not None:
                        self._gateway.detach(one)
            if self._present is not game:
                self._exchange(game)
            return function()

    def forget(self, game: "Game") -> None:
        """Free a game's objects in the JVM at the next call, without waiting."""
        self._forgotten.append(game)

    def _exchange(self, game: "Game") -> None:
        if self._present is not None:
            self._present.next_number = self._numbers.count()
        self._present = None  # until the swap is complete
        self._random_field.set(self._random, game.random)
        # Scala's name for the setter
        getattr(self._numbers, "count_$eq")(game.next_number)
        self._simplifier.parseSimplificationStr(",".join(game.simplifications))
        self._present = game

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Convert a call's failures to GameLost. A process that does not answer is killed."""
        from py4j.protocol import Py4JError, Py4JJavaError

        if self._ended:
            raise GameLost(self.loss)
        try:
            yield
        except Py4JJavaError as error:
            raise GameLost(f"ScienceWorld's engine failed: {error.java_exception.toString()}") from None
        except (Py4JError, OSError) as error:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)  # reaps a process that has just ended, for its exit status
            silent = self._process.poll() is None
            self.end()
            told = f"Java did not answer within {_ANSWER_SECONDS:g} s" if silent else self.loss
            raise GameLost(told) from error

    def generator(self) -> Any:
        """Return a new random generator. Raises GameLost."""
        with self._lock, self._calling():
            return self._classes.java.util.Random()

    def interface(self) -> Any:
        """Return a new interface to the engine. Use within `call`."""
        return self._classes.scienceworld.runtime.pythonapi.PythonInterface()

    def lines(self, texts: Any) -> list[str]:
        """Return a Java list of strings in one round trip instead of one per string. Use within `call`."""
        joined = self._classes.java.lang.String.join("\n", texts)
        self._gateway.detach(texts)
        return joined.split("\n") if joined else []


class Game:
    """A game of one task variation: the same actions have the same results, because the engine seeds its generator with
    the variation's number. Thread-safe; calls to one process are serialized. `gold`: also compute the gold path, which
    doubles the loading time. All methods except `close` raise GameLost, too."""

    def __init__(
        self, jvm: Jvm, task: str, variation: int, simplifications: tuple[str, ...], gold: bool = False
    ) -> None:
        self.jvm = jvm
        self.simplifications = simplifications
        self.next_number = 0
        self.random = jvm.generator()
        self.engine: Any = None
        try:
            # as the game's own call, because it consumes random numbers and object numbers
            self.engine = self._call(jvm.interface)
            fault = self._call(lambda: self.engine.load(task, variation, ",".join(simplifications), gold))
            if fault:
                raise GameLost(f"{task}, variation {variation}: {fault}")
        except BaseException:
            self.close()
            raise

    def _call(self, function: Callable[[], T]) -> T:
        return self.jvm.call(self, function)

    def description(self) -> str:
        return self._call(self.engine.getTaskDescription)

    def look(self) -> str:
        """Return the observation of the room; costs no move."""
        return self._call(self.engine.freeActionLook)

    def step(self, action: str) -> Step:
        def step() -> Step:
            observation, engine = self.engine.step(action), self.engine
            score = round(100 * engine.getScore())
            return Step(observation, score, engine.getCompleted() or score < 0, engine.getNumMoves())

        return self._call(step)

    def valid_actions(self) -> list[str]:
        """Return the valid actions: up to thousands, which can take a tenth of a second."""
        return self._call(lambda: self.jvm.lines(self.engine.getValidActionObjectCombinations()))

    def gold_path(self) -> list[str]:
        """Return actions that reach the score 100, if the game was created with `gold`."""
        return self._call(lambda: self.jvm.lines(self.engine.getGoldActionSequence()))

    def close(self) -> None:
        """Release the game without waiting for the process."""
        self.jvm.forget(self)


class Jvms:
    """A pool of Java processes with a heap of `heap_mb` for `games_per_jvm` games each. See Pool."""

    def __init__(self, heap_mb: int, games_per_jvm: int) -> None:
        def is_worn(jvm: Jvm, played: int) -> bool:
            return played >= _MOST_GAMES or jvm.resident_mb() > heap_mb + _BESIDES_HEAP_MB

        self._pool = Pool(lambda: Jvm(heap_mb), is_worn, games_per_jvm)
        self.pids, self.close = self._pool.pids, self._pool.close

    def play(self, task: str, variation: int, simplifications: tuple[str, ...], gold: bool = False) -> "Play":
        """Begin a game. Raises GameLost, or ToolInfrastructureError if the pool was closed."""
        place, jvm = self._pool.enter()
        try:
            return Play(self._pool, place, Game(jvm, task, variation, simplifications, gold))
        except BaseException:
            self._pool.leave(place)
            raise

    def gauges(self) -> dict[str, float]:
        """Return the numbers of processes and of their games, and of processes lost and replaced since the start."""
        pool = self._pool
        counts = {"jvms": len(pool.pids()), "games": pool.games(), "jvms_lost": pool.lost}
        return {name: float(count) for name, count in (counts | {"jvms_replaced": pool.replaced}).items()}


class Play:
    """A game and its place in the pool."""

    def __init__(self, pool: Pool[Jvm], place: Place[Jvm], game: Game) -> None:
        self._pool, self._place = pool, place
        self.game = game

    def end(self) -> None:
        self.game.close()
        self._pool.leave(self._place)
