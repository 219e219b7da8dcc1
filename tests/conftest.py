"""What many tests start from: the quickstart, trained for a few steps by the user's own command, and a server on it."""

import gc
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

from agentfactory.launching.child_processes import Children
from tests.forked import start_engine
from tests.project import agentfactory, project  # noqa: F401 (fixtures)
from tests.trained_quickstart import train_once

REPOSITORY = Path(__file__).parent.parent
QUICKSTART = REPOSITORY / "recipes" / "quickstart"

PROCESSES = {
    *("quickstart_run", "agentfactory", "server", "servers", "served", "engine", "own_server", "untied", "tied"),
    *("adapting", "seeing_server", "hunt_url", "exported", "tracked", "site", "browser", "viewer"),
}
"""Fixtures that start processes."""

SLOW = (
    *("worlds/screens/test_screens.py", "trainers/test_accelerator.py", "placement/test_trainer_memory.py"),
    *("worlds/scienceworld/test_environment.py", "rollout/test_stop_strings.py", "rollout/test_family_exactness.py"),
    *("test_users_project.py", "test_train.py", "test_async_training.py", "launching/test_launcher.py"),
    *("rollout/test_faults.py", "test_resume.py", "test_invariance.py", "test_hygiene.py", "test_own_sync.py"),
    *("viewer/test_viewer.py", "commands/test_chat.py", "trainers/test_images.py", "rollout/test_parsers.py"),
    *("commands/test_eval.py", "trainers/test_nccl.py", "tools/test_mcp_client.py", "tools/test_third_party.py"),
    *("rollout/test_gateway_program.py", "trainers/test_sabotage.py", "tools/test_isolation.py", "test_agent.py"),
)
"""The files that take longest. They go first, so that parallel processes end together."""

TRAINED = "quickstart_run"
"""The fixture that trains the quickstart, once for all parallel processes."""


# the same examples in every run: a rare failure must not stop those who changed something else. Others by
# `make test ARGS="--hypothesis-profile default"`
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """Has pytest-xdist hand out the files in our order; by itself it begins with those of many tests.

    A shell's background jobs ignore Ctrl-C, and what `nohup` starts ignores hang-ups: so do the tests, but by a
    handler, which a child does not inherit.
    """
    config.option.loadscopereorder = False
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    # nothing that the tests' files define and import is garbage
    gc.disable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Ends with what was skipped, how often, and how to get it."""
    reasons = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", []))
    if reasons:
        terminalreporter.section("not tested here")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count} {'test' if count == 1 else 'tests'}: {reason.removeprefix('Skipped: ')}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files. A test that starts no process, by itself or by a fixture, is a unit test."""
    places = {REPOSITORY / "tests" / name: place for place, name in enumerate(SLOW)}
    # files that need the quickstart come some places later, when it is trained
    waiting = {item.path: 6 for item in items if TRAINED in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: places.get(item.path, len(SLOW)) + waiting.get(item.path, 0))
    for item in items:
        # what has a target of its own (learn_*, vllm_*, wheel_*, gpu_*) runs whole commands
        if PROCESSES & {*getattr(item, "fixturenames", ())} or not item.path.name.startswith("test_"):
            item.add_marker("processes")
        if not any(map(item.get_closest_marker, ("processes", "long"))):
            item.add_marker("unit")


def pytest_collection_finish() -> None:
    """Begin to collect garbage, and leave out what stays for ever: that takes seconds each time."""
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
    """A test, with the fixtures that it is the first to ask for, begins."""
    _started.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fails a unit test that starts a process."""
    yield
    if _started and item.get_closest_marker("unit"):
        pytest.fail(f"starts a process, so it needs @pytest.mark.processes: {_started[0]}")


@pytest.fixture(scope="session", autouse=True)
def no_command_here() -> Iterator[None]:
    """Fails a test that runs a whole command in this process. A command ends all that its process has started, and so
    it would end the servers of other tests: the fixture `agentfactory` gives it a process of its own."""
    enter, ours = Children.__enter__, os.getpid()

    def refuse(children: Children) -> Children:
        assert os.getpid() != ours, "run the command by the fixture `agentfactory`"
        return enter(children)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Children, "__enter__", refuse)
        yield


@pytest.fixture(scope="session", autouse=True)
def trained_ahead(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Begin to train the quickstart if a test needs it, beside the tests that do not."""
    needed = any(TRAINED in getattr(item, "fixturenames", ()) for item in request.session.items)
    if not needed or os.environ.get("PYTEST_XDIST_WORKER", "gw0") != "gw0":
        yield
        return
    command = [sys.executable, "-m", "tests.trained_quickstart", str(shared_folder(tmp_path_factory))]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, start_new_session=True) as training:
        # it is no process of the first test
        _started.clear()
        yield
        if training.poll() is None:
            os.killpg(training.pid, signal.SIGTERM)


@pytest.fixture(scope="session")
def quickstart_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder of a short quickstart: the model calls the tool, often well-formed, and has learned little else."""
    return train_once(shared_folder(tmp_path_factory))


def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The temporary folder that the parallel processes of a test run share."""
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
