"""`Browser`: a Chromium that the chains of a process share, each in a context of its own."""

import asyncio
import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentfactory.tools.errors import SettingError
from agentfactory.tools.messages import ToolInfrastructureError

if TYPE_CHECKING:  # takes a while to import
    from playwright.async_api import Browser as Chromium
    from playwright.async_api import BrowserContext, Playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_CONTEXTS = 500
"""Contexts after which a Chromium, whose memory grows, is replaced by another one."""
_CARE_SECONDS = 15.0
"""How long Chromium may take to open or close a context; then it is told to end, and playwright kills it."""
_START_SECONDS = 60.0
_OPENING = max(4, os.cpu_count() or 1)
"""Chains that open their page at the same time. More would share the processors, and their pages' time would run out
while others are opened."""
_NOWHERE = "http://127.0.0.1:9"
"""A proxy that does not exist."""
_USELESS_FEATURES = (
    "Translate",
    # the address bar's popup, which nobody sees: a process for each window, with most of the time of opening one
    "WebUIOmniboxPopup",
    "WebUIOmniboxAimPopup",
)
_PLAYWRIGHT_DISABLES = (
    *("AimEnabled", "AvoidCorsURLLoaderRestartOnRedirect", "AvoidUnnecessaryBeforeUnloadCheckSync"),
    *("DestroyProfileOnBrowserClose", "HttpsFirstBalancedModeAutoEnable", "HttpsUpgrades", "LensOverlay"),
    *("MediaRouter", "NetworkTimeServiceQuerying", "OptimizationHints", "PaintHolding", "PreconnectToSearch"),
    "ThirdPartyStoragePartitioning",
)
"""Features that playwright disables by a flag, of which Chromium only heeds the last one: ours."""
_FLAGS = (
    "--disable-gpu",
    "--disable-dev-shm-usage",
    # what does not go through the proxy goes nowhere
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    f"--disable-features={','.join((*_USELESS_FEATURES, *_PLAYWRIGHT_DISABLES))}",
    # the same pixels on every machine
    "--font-render-hinting=none",
    "--disable-lcd-text",
    "--force-color-profile=srgb",
)


@dataclass
class _Running:
    chromium: "Chromium"
    made: int = 0
    open: int = 0


class Browser:
    """Opens contexts of Chromium. The first context starts it; another one is started if it has ended, and after 500
    contexts.

    Pages reach the origins in `allowed` and nothing else: all other connections go to a proxy that does not exist.

    Args:
        executable: path of the program.
        allowed: patterns such as `https://en.wikipedia.org`, `*.example.org` or `localhost:8000`.

    A chain holds `opening` from `context` on until its page is open.
    """

    def __init__(self, executable: str, allowed: Sequence[str]) -> None:
        self._executable = executable
        self._allowed = tuple(allowed)
        self._playwright: Playwright | None = None
        self._running: _Running | None = None
        self._starting = asyncio.Lock()
        self.opening = asyncio.Semaphore(_OPENING)

    async def context(self, **settings: Any) -> tuple["BrowserContext", Callable[[], Any]]:
        """Return a new context, and what closes it.

        Raises:
            ToolInfrastructureError: Chromium does not start.
        """
        async with self._starting:
            running = self._running
            if running is None or running.made >= _CONTEXTS or not running.chromium.is_connected():
                before, self._running = running, None
                if before is not None and not before.open:
                    await _end(before)
                running = self._running = await self._start()
            running.made += 1
            running.open += 1
        try:
            async with asyncio.timeout(_CARE_SECONDS):
                context = await running.chromium.new_context(**settings)
        except BaseException as error:
            running.open -= 1
            if isinstance(error, TimeoutError) or _is_lost(error):
                await _end(running)
                raise ToolInfrastructureError("Chromium does not answer") from error
            raise
        return context, lambda: self._close(context, running)

    async def close(self) -> None:
        """End Chromium."""
        if self._running is not None:
            await _end(self._running)
        if self._playwright is not None:
            await self._playwright.stop()
        self._running = self._playwright = None

    async def _start(self) -> _Running:
        from playwright.async_api import Error, async_playwright

        if self._playwright is None:
            self._playwright = await async_playwright().start()
        try:
            chromium = await self._playwright.chromium.launch(
                executable_path=self._executable,
                # Chromium's own sandbox does not run as root
                chromium_sandbox=os.getuid() != 0,
                args=list(_FLAGS),
                # without <-loopback>, servers of this machine are reached without a proxy
                proxy={"server": _NOWHERE, "bypass": ",".join(("<-loopback>", *self._allowed))},
                handle_sigint=False,
                handle_sigterm=False,
                handle_sighup=False,
                timeout=1000 * _START_SECONDS,
            )
        except Error as error:
            raise ToolInfrastructureError(f"{self._executable} does not start: {error.message[:2000]}") from error
        return _Running(chromium)

    async def _close(self, context: "BrowserContext", running: _Running) -> None:
        running.open -= 1
        try:
            async with asyncio.timeout(_CARE_SECONDS):
                await context.close()
        except TimeoutError:
            # a page that hangs; its chains are told by their next call
            await _end(running)
        except Exception as error:
            if not _is_lost(error):
                raise
        if running is not self._running and not running.open:
            await _end(running)


async def _end(running: _Running) -> None:
    from playwright.async_api import Error

    with suppress(Error, TimeoutError):  # it has ended, or is being killed
        async with asyncio.timeout(_CARE_SECONDS):
            await running.chromium.close()


def _is_lost(error: BaseException) -> bool:
    """Return whether a page, or all of Chromium, is gone."""
    from playwright.async_api import Error

    return isinstance(error, Error) and any(
        word in error.message for word in ("closed", "crashed", "disconnected", "detached")
    )


def find_chromium(executable: str | None) -> str:
    """Return the path of Chromium.

    Raises:
        SettingError: there is none, or no playwright. It names no field: the machine lacks it.
    """
    if importlib.util.find_spec("playwright") is None:
        raise SettingError("", "playwright is not installed", "pip install 'agentfactory[screens]'")
    names = _NAMES if executable is None else (executable,)
    for name in names:
        if found := shutil.which(name):
            return found
    wanted = f"there is no program {executable}" if executable else f"there is none of {', '.join(_NAMES)} on the PATH"
    raise SettingError("", wanted, "apt install chromium, or name another Chromium by the option `executable`")
