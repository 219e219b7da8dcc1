"""`Browser`: a Chromium shared by the chains of a process, each with its own context."""

import asyncio
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.base.processes import environment
from agentfactory.base.user_code.extras import check_extra

if TYPE_CHECKING:  # takes a while to import
    from playwright.async_api import Browser as Chromium
    from playwright.async_api import BrowserContext, Playwright

T = TypeVar("T")
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_CONTEXTS = 500
"""Contexts after which a Chromium is replaced, because its memory grows."""
_CARE_SECONDS = 15.0
"""Time limit for opening or closing a context. After it Chromium is asked to exit, and playwright kills it."""
_START_SECONDS = 60.0
_OPENING = max(4, os.cpu_count() or 1)
"""Chains that open their pages concurrently. With more, pages time out, because they share the processors."""
_NOWHERE = "http://127.0.0.1:9"
"""A proxy address where nothing listens."""
_USELESS_FEATURES = (
    "Translate",
    # the address bar's popup, never shown: a process per window, which takes most of the time to open one
    "WebUIOmniboxPopup",
    "WebUIOmniboxAimPopup",
)
_PLAYWRIGHT_DISABLES = (
    *("AimEnabled", "AvoidCorsURLLoaderRestartOnRedirect", "AvoidUnnecessaryBeforeUnloadCheckSync"),
    *("DestroyProfileOnBrowserClose", "HttpsFirstBalancedModeAutoEnable", "HttpsUpgrades", "LensOverlay"),
    *("MediaRouter", "NetworkTimeServiceQuerying", "OptimizationHints", "PaintHolding", "PreconnectToSearch"),
    "ThirdPartyStoragePartitioning",
)
"""Features that playwright disables by the same flag. Chromium heeds only its last occurrence, which is ours."""
_UNWANTED_FLAGS = (
    # it would disable Chromium's limit on navigation loops, and a looping page would block all chains
    "--disable-ipc-flooding-protection",
)
"""Default flags of playwright that we remove."""
_FLAGS = (
    "--disable-gpu",
    "--disable-dev-shm-usage",
    # no WebRTC traffic past the proxy
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",  # the flag's name in older versions
    # all chains share Chromium's clipboards
    "--blink-settings=middleClickPasteAllowed=false",
    f"--disable-features={','.join((*_USELESS_FEATURES, *_PLAYWRIGHT_DISABLES))}",
    # the same pixels on every machine
    "--font-render-hinting=none",
    "--disable-lcd-text",
    "--force-color-profile=srgb",
)


@dataclass
class _Running:
    playwright: "Playwright"
    chromium: "Chromium"
    made: int = 0
    open: int = 0


class Browser:
    """A shared Chromium that opens contexts. It starts with the first context, and is replaced if it has exited or
    after 500. Pages reach only the origins in `allowed`: all other connections go to a proxy address where nothing
    listens. `executable`: path of the program. `allowed`: patterns such as `https://en.wikipedia.org`, `*.example.org`
    or `localhost:8000`. A chain holds the semaphore `opening` from its call of `context` until its page is open."""

    def __init__(self, executable: str, allowed: Sequence[str]) -> None:
        self._executable = executable
        self._allowed = tuple(allowed)
        self._playwright: Playwright | None = None
        self._running: _Running | None = None
        self._work: set[asyncio.Future[Any]] = set()
        self._starting = asyncio.Lock()
        self.opening = asyncio.Semaphore(_OPENING)

    async def context(self, **settings: Any) -> tuple["BrowserContext", Callable[[], Awaitable[None]]]:
        """Return a new context and a function that closes it; nothing if cancelled. Raises ToolInfrastructureError."""
        opening = self._begin(self._open(settings))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            self._begin(_close_unused(opening))
            raise

    async def close(self) -> None:
        while self._work:
            await asyncio.wait(self._work)
        if self._running is not None:
            await self._end(self._running)
        if self._playwright is not None:
            await self._playwright.stop()
        self._playwright = None

    def _begin(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run `work` to its end even if its chain is cancelled: playwright would leave it half done."""
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    async def _open(self, settings: dict[str, Any]) -> tuple["BrowserContext", Callable[[], Awaitable[None]]]:
        for _ in range(2):  # retry if Chromium or playwright's process turns out to have exited
            running = await self._take()
            try:
                async with asyncio.timeout(_CARE_SECONDS):
                    context = await running.chromium.new_context(**settings)
            except BaseException as error:
                running.open -= 1
                if not isinstance(error, TimeoutError) and not _is_lost(error):
                    raise
                await self._end(running)
                if isinstance(error, TimeoutError):
                    break
            else:
                return context, partial(self._shut, context, running)
        raise ToolInfrastructureError("Chromium does not answer")

    async def _shut(self, context: "BrowserContext", running: _Running) -> None:
        await asyncio.shield(self._begin(self._close(context, running)))

    async def _take(self) -> _Running:
        """Return the Chromium that takes the next context, starting one if necessary."""
        async with self._starting:
            running = self._running
            if running is None or running.made >= _CONTEXTS or not running.chromium.is_connected():
                self._running = None
                if running is not None and not running.open:
                    await self._end(running)
                running = self._running = await self._start()
            running.made += 1
            running.open += 1
            return running

    async def _start(self) -> _Running:
        from playwright.async_api import Error, async_playwright

        if self._playwright is None:
            self._playwright = await async_playwright().start()
        playwright = self._playwright
        try:
            chromium = await playwright.chromium.launch(
                executable_path=self._executable,
                env={**environment.for_others()},
                # Chromium's own sandbox cannot run as root
                chromium_sandbox=os.getuid() != 0,
                args=[*_FLAGS, f"--host-resolver-rules={_named(self._allowed)}"],
                ignore_default_args=list(_UNWANTED_FLAGS),
                # without <-loopback>, connections to this machine would bypass the proxy
                proxy={"server": _NOWHERE, "bypass": ",".join(("<-loopback>", *self._allowed))},
                handle_sigint=False,
                handle_sigterm=False,
                handle_sighup=False,
                timeout=1000 * _START_SECONDS,
            )
        except Error as error:
            raise ToolInfrastructureError(f"{self._executable} does not start: {error.message[:2000]}") from error
        return _Running(playwright, chromium)

    async def _close(self, context: "BrowserContext", running: _Running) -> None:
        running.open -= 1
        try:
            async with asyncio.timeout(_CARE_SECONDS):
                await context.close()
        except TimeoutError:
            # a page hangs; this Chromium's other chains fail at their next call
            await self._end(running)
        except Exception as error:
            if not _is_lost(error):
                raise
        if running is not self._running and not running.open:
            await self._end(running)

    async def _end(self, running: _Running) -> None:
        """Close a Chromium. If it stays connected, playwright's process hangs or is gone: stop that, too."""
        from playwright.async_api import Error

        if self._running is running:
            self._running = None
        with suppress(Error, TimeoutError):  # it has exited, or is being killed
            async with asyncio.timeout(_CARE_SECONDS):
                await running.chromium.close()
        if running.chromium.is_connected() and self._playwright is running.playwright:
            self._playwright = None
            await running.playwright.stop()


def _named(allowed: Sequence[str]) -> str:
    """Return Chromium's resolver rules for allowed hosts: WebRTC would leak other names to their DNS servers."""
    hosts = [re.sub(r"^https?://|:\d+$", "", origin).strip("[]") for origin in allowed]
    known = ("127.0.0.1", *(f"*{host}" if host.startswith(".") else host for host in hosts))
    return ", ".join(("MAP * ~NOTFOUND", *(f"EXCLUDE {host}" for host in known)))


async def _close_unused(opening: "asyncio.Future[tuple[BrowserContext, Callable[[], Awaitable[None]]]]") -> None:
    from playwright.async_api import Error

    with suppress(Error, ToolInfrastructureError):
        _, close = await opening
        await close()


async def heed(answer: Awaitable[Any]) -> None:
    """Await an answer to a page's event, without errors of a page that is gone, which others would get."""
    from playwright.async_api import Error

    with suppress(Error):
        await answer


def _is_lost(error: BaseException) -> bool:
    from playwright.async_api import Error

    return isinstance(error, Error) and any(
        word in error.message for word in ("closed", "crashed", "disconnected", "detached")
    )


def find_chromium(executable: str | None) -> str:
    """Return the path of Chromium. Raises SettingError, without a field, if it or playwright is missing."""
    check_extra("screens")
    names = _NAMES if executable is None else (executable,)
    for name in names:
        if found := shutil.which(name):
            return found
    wanted = f"there is no program {executable}" if executable else f"none of {', '.join(_NAMES)} is on the PATH"
    raise SettingError("", wanted, "apt install chromium, or name another Chromium by the option `executable`")
