"""Shared fixtures: the quickstart, trained for a few steps by the user's own command, and a server on it."""

import gc
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings

from agentfactory.base.processes import environment
from agentfactory.base.processes.devices import measured
from agentfactory.launching.child_processes import Children
from tests.forked import start_engine
from tests.project import agentfactory, project  # noqa: F401 (fixtures)
from tests.trained_quickstart import train_once

REPOSITORY = Path(__file__).parent.parent
QUICKSTART = REPOSITORY / "recipes" / "quickstart"

PROCESSES = {
    *("quickstart_run", "agentfactory", "server", "servers", "served", "engine", "untied", "tied"),
    *("adapting", "seeing_server", "hunt_url", "exported", "tracked", "site", "browser", "viewer"),
}
"""Fixtures that start processes."""

SLOW = (
    *("worlds/screens/test_screens.py", "trainers/test_accelerator.py", "placement/test_trainer_memory.py"),
    *("worlds/scienceworld/test_environment.py", "rollout/test_stop_strings.py", "rollout/test_family_exactness.py"),
    *("test_users_project.py", "test_train.py", "test_async_training.py", "launching/test_launcher.py"),
    *(
        "rollout/test_faults.py",
        "test_resume.py",
        "test_invariance.py",
        "test_own_algorithm.py",
        "commands/test_eval.py",
    ),
    *("viewer/test_viewer.py", "trainers/test_image_families.py", "rollout/test_parsers.py", "commands/test_eval.py"),
    *("trainers/test_nccl.py", "tools/test_mcp_client.py", "tools/test_third_party.py"),
    *("rollout/test_gateway_program.py", "trainers/test_sabotage.py", "tools/test_isolation.py", "test_agent.py"),
)
"""The slowest test files. They run first, so that parallel processes finish together."""

TRAINED = "quickstart_run"
"""The fixture that trains the quickstart, once for all parallel processes."""


# the same examples in every run, so that a rare failure does not block unrelated changes. For other examples:
# `make test ARGS="--hypothesis-profile default"`
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """Make pytest-xdist distribute files in our order; by default it begins with the files with the most tests.

    A shell's background jobs ignore Ctrl-C, and `nohup` ignores hang-ups. The tests do the same by a handler, which
    child processes do not inherit."""
    config.option.loadscopereorder = False
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    measured()  # and kept: recipes of tests that start no process ask for it, too
    # no garbage collection during imports: the test files' definitions and imports are no garbage
    gc.disable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report the skipped tests: reasons, counts, and how to run them."""
    reasons = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", []))
    if reasons:
        terminalreporter.section("not tested here")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count} {'test' if count == 1 else 'tests'}: {reason.removeprefix('Skipped: ')}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files. A test that starts no process, by itself or by a fixture, is a unit test."""
    places = {REPOSITORY / "tests" / name: place for place, name in enumerate(SLOW)}
    # files that need the quickstart come a few places later, when it is trained
    waiting = {item.path: 6 for item in items if TRAINED in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: places.get(item.path, len(SLOW)) + waiting.get(item.path, 0))
    for item in items:
        # files with their own make target (learn_*, vllm_*, wheel_*, gpu_*) run whole commands
        if PROCESSES & {*getattr(item, "fixturenames", ())} or not item.path.name.startswith("test_"):
            item.add_marker("processes")
        if not any(map(item.get_closest_marker, ("processes", "long"))):
            item.add_marker("unit")


def pytest_collection_finish() -> None:
    """Enable garbage collection, and freeze permanent objects, whose traversal would take seconds each time."""
    gc.freeze()
    gc.enable()


_started: list[str] = []
"""Processes that the running test has started."""


def _note_process(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
        _started.append(f"{event} {arguments[:2]}")


sys.addaudithook(_note_process)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Mark the start of a test, including the setup of fixtures that it uses first."""
    _started.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a unit test that starts a process."""
    yield
    if _started and item.get_closest_marker("unit"):
        pytest.fail(f"starts a process, so it needs @pytest.mark.processes: {_started[0]}")


@pytest.fixture(autouse=True)
def loggers_as_they_were() -> Iterator[None]:
    """Fail a test that leaves a handler or a level at our logger, which would change what later tests see."""
    logger = logging.getLogger("agentfactory")
    before = logger.level, list(logger.handlers)
    yield
    assert (logger.level, list(logger.handlers)) == before, "remove the handler and restore the level"


@pytest.fixture(autouse=True)
def no_named_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the variables that a recipe names, after each test: a process has one recipe."""
    monkeypatch.setenv(environment.VARIABLE, "")
    monkeypatch.delenv(environment.VARIABLE)


@pytest.fixture(scope="session", autouse=True)
def no_command_here() -> Iterator[None]:
    """Fail a test that runs a whole command in this process. A command ends all child processes, so it would end other
    tests' servers; the fixture `agentfactory` runs it in a separate process."""
    enter, ours = Children.__enter__, os.getpid()

    def refuse(children: Children) -> Children:
        assert os.getpid() != ours, "run the command by the fixture `agentfactory`"
        return enter(children)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Children, "__enter__", refuse)
        yield


@pytest.fixture(scope="session", autouse=True)
def trained_ahead(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start training the quickstart if any test needs it, in parallel with the tests that do not."""
    needed = any(TRAINED in getattr(item, "fixturenames", ()) for item in request.session.items)
    if not needed or os.environ.get("PYTEST_XDIST_WORKER", "gw0") != "gw0":
        yield
        return
    command = [sys.executable, "-m", "tests.trained_quickstart", str(shared_folder(tmp_path_factory))]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, start_new_session=True) as training:
        # it does not count as a process of the first test
        _started.clear()
        yield
        if training.poll() is None:
            os.killpg(training.pid, signal.SIGTERM)


@pytest.fixture(scope="session")
def quickstart_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a short quickstart: the model calls the tool, often correctly, and has learned little else."""
    return train_once(shared_folder(tmp_path_factory))


def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The temporary folder shared by the parallel processes of a test run."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@contextmanager
def embedded_server(model: Path, *flags: str) -> Iterator[str]:
    """The address of an embedded engine that serves `model` in float32."""
    with tempfile.NamedTemporaryFile(prefix="engine-", suffix=".log") as log:
        engine, url = start_engine(model, "--dtype", "float32", *flags, log=Path(log.name))
        try:
            yield url
        finally:
            engine.kill()


@pytest.fixture(scope="session")
def warm_start(quickstart_run: Path) -> Path:
    """The checkpoint of the short quickstart's first stage."""
    return next((quickstart_run / "sft" / "checkpoints").iterdir())


@pytest.fixture(scope="session")
def warm_server(warm_start: Path) -> Iterator[str]:
    """The address of an embedded engine on `warm_start`."""
    with embedded_server(warm_start, "--max-model-len", "1024", "--max-num-seqs", "64") as url:
        yield url
