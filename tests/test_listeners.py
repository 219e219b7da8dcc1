"""Every listening command uses loopback only, requires a key, rejects other pages in a browser, and bounds bodies.

Sockets are found by psutil in the whole process tree, not taken from the code."""

import base64
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import psutil
import pytest
from starlette.applications import Starlette

from agentfactory.base.http import http_server
from agentfactory.base.http.server_keys import key_header
from agentfactory.launching.run_folder import RunFolder
from agentfactory.recipe.load import load_recipe
from agentfactory.rollout.gateway.gateway_server import Gateway
from agentfactory.rollout.inference.inference_client import GENERATE
from agentfactory.trainers.config import ACCELERATE, PORTLESS_ENVIRONMENT, PORTLESS_OPTIONS
from agentfactory.trainers.processes import accelerator
from tests.conftest import QUICKSTART, REPOSITORY
from tests.forked import COMMAND, ENGINE, Forked, start_ranks
from tests.server_process import listening, only_loopback
from tests.waiting import wait_for
from tests.worlds.search.corpora import index_of

pytestmark = pytest.mark.processes

FLOOD_MB = 96
REFUSED = {401, 403, 421}


@dataclass(frozen=True)
class Listener:
    """A command that listens for HTTP. `route` reads or changes its state; `arguments` is given an empty folder."""

    arguments: Callable[[Path], list[str]]
    route: str
    in_browser: bool = False
    """True if the key is part of the address, before `route`; Host and Origin are then checked too."""


def _run_folder(folder: Path) -> list[str]:
    run = RunFolder.create(folder / "run", load_recipe(QUICKSTART / "grpo.yaml").to_yaml())
    return ["view", str(run.path), "--port", "0"]


LISTENERS = {
    "view": Listener(_run_folder, "api/state", in_browser=True),
    "tools serve": Listener(lambda folder: ["tools", "serve", "calculator", "--http", "0"], "/mcp"),
    "index serve": Listener(lambda folder: ["index", "serve", str(index_of(folder)), "--port", "0"], "/retrieve"),
}


def status_of(url: str, route: str, **headers: str) -> int:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    connection.request("POST", route, "{}", {"Content-Type": "application/json", **headers})
    return connection.getresponse().status


def endless_header(url: str, pid: int) -> float:
    """Return the MiB by which an endless header makes the process grow."""
    parts, before, grown = urlsplit(url), psutil.Process(pid).memory_info().rss, 0
    with socket.create_connection((parts.hostname, parts.port or 80), 10) as client, suppress(ConnectionError):
        client.sendall(f"GET / HTTP/1.1\r\nHost: {parts.netloc}\r\n".encode())
        for number in range(FLOOD_MB):
            client.sendall(f"x-{number}: ".encode() + b"a" * (1 << 20) + b"\r\n")
            grown = max(grown, psutil.Process(pid).memory_info().rss - before)
    return grown / 2**20


def flooded(url: str, route: str, pid: int, headers: dict[str, str]) -> tuple[int, float]:
    """Return the status of an endless body, and the MiB by which it made the process grow."""
    parts, before = urlsplit(url), psutil.Process(pid).memory_info().rss
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"POST {route} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n{lines}"
    grown = 0
    with socket.create_connection((parts.hostname, parts.port or 80), 10) as client:
        client.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        with suppress(ConnectionError):
            for _ in range(FLOOD_MB):
                client.sendall(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
                grown = max(grown, psutil.Process(pid).memory_info().rss - before)
        answer = b""
        with suppress(ConnectionError):
            answer = client.recv(64)
    return int(answer.split()[1]) if answer else 0, grown / 2**20


@pytest.fixture(params=[*LISTENERS, "engine"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Listener, int]]:
    if request.param == "engine":
        url = request.getfixturevalue("warm_server")
        (pid,) = {
            each.pid
            for each in psutil.net_connections("inet")
            if each.laddr.port == urlsplit(url).port and each.status == "LISTEN"
        }
        yield url, Listener(lambda _: [], GENERATE), pid
        return
    listener, log = LISTENERS[request.param], tmp_path / "log"
    process = Forked(COMMAND, *listener.arguments(tmp_path), log=log)
    try:
        found = wait_for(lambda: log.exists() and re.search(r"http://\S+(?=\s)", log.read_text()))
        yield found[0], listener, process.pid
    finally:
        process.kill()


def refuses_quietly(url: str, route: str, log: Path) -> None:
    """Assert that clients without the key keep no connection, and that non-HTTP data does not fill the log."""
    before = log.stat().st_size
    parts = urlsplit(url)
    head = f"POST {route} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
    broken = ["GET / HTTP/9.9\r\n\r\n", "\x16\x03\x01\r\n\r\n", f"{head}Transfer-Encoding: chunked\r\n\r\nzz\r\n"]
    for sent in [*broken * 20, f"{head.replace(parts.path, '/')}Content-Length: 0\r\n\r\n"]:
        with socket.create_connection((parts.hostname, parts.port or 80), 10) as client:
            client.sendall(sent.encode())
            with suppress(ConnectionError):
                while client.recv(1 << 16):
                    pass
    assert log.stat().st_size - before < 20_000


def test_a_server_answers_its_own_user_only(served: tuple[str, Listener, int], tmp_path: Path) -> None:
    url, listener, pid = served
    route = urlsplit(url).path + listener.route if listener.in_browser else listener.route
    wait_for(lambda: listening(pid))
    assert only_loopback(pid)
    ours = key_header(url)
    assert status_of(url, route, **ours) not in REFUSED
    if listener.in_browser:
        # from another site's page that has obtained the key, or by DNS rebinding
        for foreign in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            assert status_of(url, route, **foreign) == 403, foreign
        for key in ("", "/wrong", urlsplit(url).path[:-2]):
            wrong = f"{key}/{listener.route}"
            assert status_of(url, wrong) == 403, wrong
    else:
        user = base64.b64encode(b"x:wrong").decode()
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {user}"}):
            assert status_of(url, route, **headers) == 401, headers
        if route != GENERATE:  # whose clients send headers
            as_password = base64.b64encode(f":{ours['Authorization'].split()[1]}".encode()).decode()
            assert status_of(url, route, Authorization=f"Basic {as_password}") not in REFUSED
    for headers in ({}, ours):
        status, grown = flooded(url, route, pid, headers)
        assert status in {0, 400, 401, 405, 413}, status
        assert grown < FLOOD_MB / 2, f"{grown:.0f} MiB"
    assert endless_header(url, pid) < FLOOD_MB / 8
    if (tmp_path / "log").exists():
        refuses_quietly(url, route, tmp_path / "log")


@pytest.mark.parametrize("command", ["view", "engine"])
def test_idle_connections_leave_a_server_the_files_that_it_needs(
    command: str, warm_start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    if command == "view":
        process = Forked(COMMAND, *_run_folder(tmp_path), log=log, open_files=200)
    else:
        process = Forked(ENGINE, str(warm_start), "--port", "0", log=log, open_files=200)
    idle: list[socket.socket] = []
    try:
        ready = re.compile(r"^(?!listening).*?(http://\S+).*\n", re.MULTILINE)
        url = wait_for(lambda: log.exists() and ready.search(log.read_text()))[1]
        parts, said = urlsplit(url), log.read_text()
        wait_for(lambda: listening(process.pid))
        for _ in range(150):
            idle.append(socket.create_connection((parts.hostname, parts.port or 80), 10))
        # half of 200 are accepted, and the others are closed immediately
        wait_for(lambda: sum(map(_is_closed, idle)) == 50)
        assert psutil.Process(process.pid).num_fds() < 170
        for client in idle:
            client.close()
        route = f"{parts.path}api/state" if command == "view" else "/health"
        wait_for(lambda: _answers(url, route))
        assert log.read_text() == said
    finally:
        process.kill()


def _is_closed(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def _answers(url: str, route: str) -> bool:
    with suppress(ConnectionError, http.client.HTTPException):
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
        connection.request("GET", route)
        return connection.getresponse().status == 200
    return False


def test_a_connection_without_a_request_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it sends a header byte by byte, before or after a request."""
    monkeypatch.setattr(http_server, "HEADER_SECONDS", 0.5)
    listener = socket.create_server(("127.0.0.1", 0))
    server = Thread(target=http_server.serve_http, args=(Starlette(), listener), daemon=True)
    server.start()
    address = listener.getsockname()
    whole = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    for before in (b"", whole):
        with socket.create_connection(address) as client:
            client.sendall(before)
            if before:
                assert client.recv(1 << 16).startswith(b"HTTP/1.1 404")
            client.sendall(b"GET / HTTP/1.1\r\n")

            def is_closed(client: socket.socket = client) -> bool:
                with suppress(ConnectionError):
                    client.sendall(b"x")
                return _is_closed(client)

            wait_for(is_closed)


async def test_the_gateway_listens_on_loopback() -> None:
    """For its keys and bounds see tests/rollout/test_gateway_hostile.py."""
    before = listening(os.getpid())
    async with Gateway() as gateway:
        (address,) = [each for each in listening(os.getpid()) if each not in before]
    assert (address.ip, address.port) == ("127.0.0.1", urlsplit(gateway.url).port)


def recipe_of(strategy: str, folder: Path) -> Path:
    file = folder / "recipe.json"
    train = {"steps": 1, "processes": 2, "strategy": strategy}
    file.write_text(json.dumps({"model": {"path": "none", "dtype": "float32"}, "train": train}))
    return file


@pytest.mark.parametrize("launcher", ["torchrun", "none"])
def test_ranks_of_a_machine_listen_on_loopback(launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the launcher's rendezvous name their store is a file; without it, a loopback port."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    if launcher == "torchrun":
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    ranks = start_ranks("tests.test_listeners", str(recipe_of("ddp", tmp_path)), log=tmp_path / "log", strategy="ddp")
    assert [rank.wait() for rank in ranks] == [0, 0], (tmp_path / "log").read_text()
    said = sorted(map(json.loads, (tmp_path / "log").read_text().splitlines()), key=lambda line: line["rank"])
    assert [line["gloo"] for line in said] == ["lo", "lo"]
    assert all(line["at"] and {ip for ip, _ in line["at"]} == {"127.0.0.1"} for line in said), said
    at_port = [["127.0.0.1", int(line["port"])] in line["at"] for line in said]
    assert at_port == [launcher == "none", False]
    # if both leave at once, neither of torch's destructors may find that it is the last, and the next launch removes it
    left = [file.name.partition("-")[0] for file in tmp_path.glob("agentfactory-ranks-*/*")]
    assert left in ([], [str(os.getpid())])


def test_the_next_launch_removes_the_files_of_ended_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = accelerator._store_file().with_name(f"{os.getpid()}-0-0")
    ended.touch()
    assert accelerator._store_file().parent.is_dir()
    assert not ended.exists()


@pytest.mark.extended
def test_the_launcher_of_the_plan_listens_nowhere(tmp_path: Path) -> None:
    file = recipe_of("fsdp2", tmp_path)
    options = ["--config_file", str(ACCELERATE / "fsdp2.yaml"), "--num_processes", "2"]
    options += ["--main_process_port", "0", *PORTLESS_OPTIONS, "-m", "tests.test_listeners", str(file)]
    given = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PET_RDZV_ENDPOINT": str(tmp_path / "store")}
    environment = {**os.environ, **PORTLESS_ENVIRONMENT, **given, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "accelerate.commands.launch", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(said) == 2
    assert all(line["launcher"] == [] and {ip for ip, _ in line["at"]} == {"127.0.0.1"} for line in said), said


def main() -> int:
    """A rank: join the others, and print where this process and its launcher listen."""
    import torch.distributed
    from accelerate.utils import gather_object

    from agentfactory.trainers.config import TrainRecipe
    from agentfactory.trainers.processes.accelerator import make_accelerator

    make_accelerator(TrainRecipe.model_validate_json(Path(sys.argv[1]).read_text()))
    gather_object([1])
    at = [(each.ip, each.port) for each in listening(os.getpid())]
    launcher = [each.laddr for each in psutil.Process(os.getppid()).net_connections("inet")]
    names = {"rank": "RANK", "port": "MASTER_PORT", "gloo": "GLOO_SOCKET_IFNAME"}
    line = {"at": at, "launcher": launcher, **{name: os.environ[variable] for name, variable in names.items()}}
    # whole lines, because both ranks write at the same time
    os.write(1, f"{json.dumps(line)}\n".encode())
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    main()
    os._exit(0)
