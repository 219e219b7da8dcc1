"""A viewer, its answers, and pages of a real browser."""

import http.client
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from starlette.testclient import TestClient

from agentfactory.base.http import http_server
from agentfactory.commands.main import main
from agentfactory.viewer.access import PrivatePath
from agentfactory.viewer.app import make_app
from agentfactory.viewer.runs.follower import Follower
from tests.waiting import wait_for

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page


@contextmanager
def viewing(*runs: Path) -> Iterator[str]:
    """The address of a viewer of these runs, in threads of this process."""
    follower, key = Follower(runs), "key"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        server = http_server._server(PrivatePath(make_app(follower, port), key), "none")
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        follower.start()
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}/{key}/"
        finally:
            server.should_exit = True
            thread.join()
            follower.close()


@contextmanager
def command(*runs: Path) -> Iterator[str]:
    """The address of a viewer of these runs: the command, as a process."""
    arguments = [sys.executable, "-m", "agentfactory", "view", *map(str, runs), "--port", "0"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        try:
            said = process.stdout.readline()
            yield re.search(r"http://\S+", said)[0]
        finally:
            process.terminate()


@contextmanager
def opened(context: "BrowserContext") -> "Iterator[Page]":
    """A page, none of whose scripts may fail."""
    page = context.new_page()
    page.set_default_timeout(30_000)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    yield page
    page.close()
    assert faults == []


def view(arguments: Sequence[str]) -> int:
    return main(["view", *arguments])


def asking(*runs: Path) -> tuple[Follower, TestClient]:
    """What was read of these runs, and who asks the page's server about them: without a process and a thread."""
    follower = Follower(runs)
    follower.read_all()
    return follower, TestClient(make_app(follower, 8765), base_url="http://127.0.0.1:8765")


def chain_page(client: TestClient, row: dict[str, Any] | None = None) -> Any:
    """What the page gets of a listed chain: of the first one, unless `row` says which."""
    row = row or client.get("/api/trajectories").json()["rows"][0]
    return client.get("/api/trajectory", params={name: row[name] for name in ("run", "file", "byte", "place")}).json()


def trajectory(row: dict[str, Any], options: str = "") -> str:
    return f"#/trajectory/{row['run']}/{quote(row['file'], '')}/{row['byte']}/{row['place']}{options}"


def ask(url: str, path: str, **headers: str) -> tuple[int, bytes]:
    """A plain request, without the normalisation that clients do."""
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(url).port, timeout=20)
    connection.putrequest("GET", urlsplit(url).path.rstrip("/") + path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, answer.read()


def api(url: str, path: str) -> Any:
    """An answer; a search for text goes on with each request, until it is complete."""

    def answer() -> Any:
        status, body = ask(url, path)
        assert status == 200, body
        found = json.loads(body)
        return None if found.get("unsearched") else found

    return wait_for(answer)


def when_read(url: str) -> dict[str, Any]:
    """The state of a viewer when it has read all chains of its runs."""

    def state() -> Any:
        found = api(url, "/api/state")
        # before the first look at the folders the total is 0
        return 0 < found["progress"]["total"] == found["progress"]["read"] and found

    return wait_for(state)


def run_id(url: str, label: str) -> str:
    return next(run["id"] for run in api(url, "/api/state")["runs"] if run["label"] == label)
