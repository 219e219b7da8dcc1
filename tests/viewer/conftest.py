"""One Chromium for the tests of a file."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.viewer.browsing import opened

CHROMIUM = "/usr/bin/chromium"
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --host-resolver-rules=MAP~rebound.test~127.0.0.1"
)
try:
    from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright
except ImportError:
    sync_playwright = None


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    if sync_playwright is None:
        pytest.skip("playwright is not installed: pip install playwright")
    if not Path(CHROMIUM).exists():
        pytest.skip(f"there is no {CHROMIUM}: apt-get install chromium")
    with sync_playwright() as playwright:
        # `~` stands for the spaces within one flag
        flags = [flag.replace("~", " ") for flag in FLAGS.split()]
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def context(browser: "Browser") -> "BrowserContext":
    # pages of one context share the cache
    return browser.new_context(viewport={"width": 1400, "height": 1000})


@pytest.fixture
def page(context: "BrowserContext") -> "Iterator[Page]":
    with opened(context) as page:
        yield page
