"""The search of the documentation's site, in a real browser: a subject's own page comes first."""

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import REPOSITORY
from tests.viewer.conftest import browser  # noqa: F401

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.extended, pytest.mark.processes]

FIRST = {
    "LoRA": "lora.html",
    "QLoRA": "lora.html",
    "staleness": "staleness.html",
    "resume": "checkpoints.html",
    "GPU": "placement.html",
    "MCP": "mcp.html",
    "reward": "rewards.html",
}


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    site: Path = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(site)]
    subprocess.run(command, cwd=REPOSITORY, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/index.html"
        server.shutdown()


def test_a_subjects_own_page_comes_first(address: str, browser: "Browser") -> None:  # noqa: F811
    found = {}
    for subject in FIRST:
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        # the page reads it once its scripts are ready, which typing would have to wait for
        page.goto(f"{address}?q={subject}")
        first = page.locator(".md-search-result__item a").first
        first.wait_for()
        found[subject] = str(first.get_attribute("href")).partition("?")[0].rpartition("/")[2]
        page.close()
    assert found == FIRST
