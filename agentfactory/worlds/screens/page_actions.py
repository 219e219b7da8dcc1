"""`BaseScreen`: a browser page with mouse and keyboard actions, and its score."""

import asyncio
import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from PIL import Image
from pydantic import Field

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.tools.environments.environment import Environment
from agentfactory.tools.images.coordinates import ModelView
from agentfactory.tools.tool import finish, tool
from agentfactory.worlds.screens import keyboard
from agentfactory.worlds.screens.browser import Browser, find_chromium, heed
from agentfactory.worlds.screens.sites import Site, check_fields, site_of
from agentfactory.worlds.shared import Shared

if TYPE_CHECKING:  # takes a while to import
    from playwright.async_api import Dialog, Download, Page, Route

T = TypeVar("T")
Direction = Literal["up", "down", "left", "right"]
Button = Literal["left", "right", "middle"]
_MOST_TABS = 5
_USES = 100
"""Chains on our own pages that reuse a tab in succession; limited because the tab's memory grows."""
_MOST_DIALOGS = 20
_SCROLLED = 0.7
"""Fraction of the visible size to scroll by, so that consecutive views overlap."""
_STEPS = {"up": (0.0, -_SCROLLED), "down": (0.0, _SCROLLED), "left": (-_SCROLLED, 0.0), "right": (_SCROLLED, 0.0)}
_LONGEST_TEXT = 2000
_MOVED = (
    *("context was destroyed", "Cannot find context", "Not attached", "detached", "has been closed", "Timeout"),
    "Unable to capture screenshot",  # Chromium has no picture of a tab that is just being shown or closed
)
"""Parts of playwright's errors when a page navigates or its tab closes during a call."""


_ORIGIN = re.compile(r"(https?://)?[\w.*:\[\]-]+")
_browsers: Shared[Browser] = Shared()


async def _settle(page: "Page") -> None:
    await page.wait_for_load_state("load")
    await page.evaluate(keyboard.SETTLED)


class BaseScreen(Environment):
    """The base of both screens: the page, its screenshot, and the actions that take no coordinates."""

    def __init__(
        self,
        width: int = 640,
        height: int = 480,
        scale: float = 1.0,
        seconds: float = 10.0,
        allowed: Sequence[str] = (),
        executable: str | None = None,
    ) -> None:
        for name, side in (("width", width), ("height", height)):
            if not 32 <= side <= 8192:
                raise SettingError(name, f"got {side}", "give a number of pixels from 32 to 8192")
        if not 0.25 <= scale <= 4:
            raise SettingError("scale", f"got {scale}", "give a number from 0.25 to 4")
        if not 0 < seconds <= 600:
            raise SettingError("seconds", f"got {seconds}", "give a number above 0, up to 600")
        for place, origin in enumerate([allowed] if isinstance(allowed, str) else allowed):
            if isinstance(allowed, str) or not _ORIGIN.fullmatch(origin):
                name = "allowed" if isinstance(allowed, str) else f"allowed.{place}"
                fix = "list origins, such as [https://en.wikipedia.org, '*.example.org', localhost:8000]"
                raise SettingError(name, f"got {origin!r}", fix)
        self._width, self._height, self._scale, self._seconds = width, height, scale, seconds
        self._key = (find_chromium(executable), tuple(allowed))
        self._view = ModelView()
        self._browser: Browser | None = None
        self._shut: Callable[[], Awaitable[None]] | None = None
        self._site: Site | None = None
        self._pages: list[Page] = []
        self._notes: list[str] = []
        self._mouse = (0.0, 0.0)
        self._keyboard = keyboard.Keyboard()
        self._acting = False
        """True while an action runs on the page, or if one did not finish."""
        self._uses = 0
        self._dialogs = 0
        self._fault: str | None = None
        self._closing: asyncio.Future[None] | None = None
        self._state = {"done": False, "score": 0.0}

    @classmethod
    def check_machine(cls, *args: Any, **options: Any) -> None:
        """Raise SettingError if an option is out of range, or if playwright or Chromium is missing."""
        known = inspect.signature(BaseScreen).parameters  # a subclass may have more
        BaseScreen(**{name: value for name, value in options.items() if name in known})  # starts nothing

    @classmethod
    def check_data_row(cls, row: dict[str, Any], has_rewards: bool) -> None:
        """Raise ValueError if the row names no page, or a `url` without the `check` that the only reward needs."""
        if cls.reset is not BaseScreen.reset:  # a subclass may find the page by other fields
            return
        fields = ("page", "miniwob", "url", "check", "seed")
        check_fields(**{name: row[name] for name in fields if name in row})
        if row.get("url") is None or row.get("check") or has_rewards or cls.reward is not BaseScreen.reward:
            return
        raise ValueError(
            "url without `check`, so its chains always earn 0; give the row JavaScript for a score from 0 to 1: "
            '{"check": "document.querySelector(\'#done\') ? 1 : 0"}, or name a reward in the recipe\'s `rewards:`'
        )

    async def reset(
        self,
        page: str | None = None,
        miniwob: str | None = None,
        url: str | None = None,
        check: str | None = None,
        seed: int = 0,
        model_view: dict[str, Any] | None = None,
        **task: Any,
    ) -> list[Any]:
        """Open the page; return its instruction and the first screenshot. `page`: name of one of our own pages.
        `miniwob`: name of a MiniWoB++ page. `url`: any address that `allowed` permits. `check`: JavaScript expression
        for the score, from 0 to 1, of a `url`. `seed`: seed of a page's contents. `model_view`: the model's coordinate
        convention. `task`: other fields of the row. Raises ValueError (the row names no page, or an unknown one),
        ToolInfrastructureError (Chromium does not start, or the page does not open)."""
        self._view = ModelView.of(model_view)
        site = site_of(page, miniwob, url, check, seed)
        if not (site.is_ours and self._may_be_used_again()):
            await self._shut_tabs()
        self._site, self._notes, self._dialogs, self._keyboard = site, [], 0, keyboard.Keyboard()
        self._state = {"done": False, "score": 0.0}
        if self._browser is None:
            self._browser = _browsers.acquire(self._shared, lambda: Browser(*self._key))
        async with self._browser.opening:
            if not self._pages:
                await self._open_tab(self._browser, site)
            async with self._care():
                await self._move(self._width / 2, self._height / 2)
                response = await self._page.goto(site.address)
                if response is not None and not response.ok:
                    raise ToolInfrastructureError(f"url: {site.address} answers with status {response.status}")
            begun = await self._see(lambda page: page.evaluate(site.begin))
            instruction = None if begun is None else str(begun)
            self._uses += 1
        return [*([instruction] if instruction else []), *await self._look()]

    @tool
    async def type(self, text: str) -> Any:
        """Type text where the cursor is, or choose from an open menu by name.

        Args:
            text: The text.
        """
        async with self._care():
            frame, _ = await keyboard.frame_with(self._page, keyboard.FOCUSED)
            chosen = await frame.evaluate(keyboard.CHOOSE, text)
            if chosen is False:
                self._notes.append("The menu has no such entry.")
            if chosen is None:
                await self._page.keyboard.type(text[:_LONGEST_TEXT])
                if len(text) > _LONGEST_TEXT:
                    self._notes.append(f"Only the first {_LONGEST_TEXT} characters were typed.")
        return await self._after()

    @tool
    async def key(self, keys: str) -> Any:
        """Press a key, or several at a time.

        Args:
            keys: Such as Enter, Tab, Backspace, ArrowDown or Control+A.
        """
        async with self._care():
            await self._keyboard.press(self._page, keys)
        return await self._after()

    @tool
    async def wait(self, seconds: Annotated[float, Field(gt=0, le=10)] = 1.0) -> Any:
        """Wait, and look again.

        Args:
            seconds: How long.
        """
        await asyncio.sleep(seconds)
        return await self._after()

    @tool
    async def back(self) -> Any:
        """Go back to the page before, or close a tab that was opened."""
        async with self._care():
            if len(self._pages) > 1:
                await self._page.close()
            elif await self._may_go_back():
                await self._page.go_back()
            else:
                self._notes.append("There is no page before this one.")
        return await self._after()

    @tool
    async def done(self, answer: str = "") -> Any:
        """Say that the task is done.

        Args:
            answer: What was asked for, if anything.
        """
        await self._judge()
        return finish({"observation": answer or "Done.", "score": self._state["score"]})

    def reward(self) -> dict[str, float]:
        """Return `reward`, the page's score from 0 to 1, and `success`, 1.0 if the score is 1. Raises ValueError if the
        final value of `check` is outside 0 to 1; earlier values do not matter."""
        score = float(self._state["score"])
        if not 0 <= score <= 1:
            raise ValueError(f"check: its value is {score:g}; make it a number from 0 to 1")
        return {"reward": score, "success": float(score >= 1)}

    async def release(self) -> None:
        """Close the chain's tabs and storage; a tab on one of our own pages stays open for the next chain."""
        if not self._may_be_used_again():
            await self._shut_tabs()

    async def close(self) -> None:
        """Close the instance's tabs; the last instance closes Chromium."""
        await self._shut_tabs()
        if self._browser is not None:
            self._browser = None
            last = _browsers.release(self._shared)
            if last is not None:
                await last.close()

    @property
    def _shared(self) -> tuple[Any, ...]:
        return (*self._key, id(asyncio.get_running_loop()))

    @property
    def _page(self) -> "Page":
        if not self._pages:
            raise ToolInfrastructureError("the page has closed itself")
        return self._pages[-1]

    def _may_be_used_again(self) -> bool:
        """Return whether the next chain on one of our own pages may reuse this chain's tab."""
        if self._site is None or not self._site.is_ours or self._fault is not None or self._acting:
            return False
        return self._uses < _USES and len(self._pages) == 1 and not self._page.is_closed()

    async def _shut_tabs(self) -> None:
        shut, self._shut = self._shut, None
        try:
            if shut is not None:
                await shut()
        finally:  # faults of these tabs must not affect the next chain
            self._site = self._fault = None
            self._pages, self._acting, self._uses = [], False, 0

    async def _open_tab(self, browser: Browser, site: Site) -> None:
        context, self._shut = await browser.context(
            viewport={"width": self._width, "height": self._height},
            device_scale_factor=self._scale,
            accept_downloads=False,
            service_workers="block",
            locale="en-US",
            timezone_id="UTC",
            reduced_motion="reduce",
        )
        context.set_default_timeout(1000 * self._seconds)
        context.on("page", self._opened)
        async with self._care():
            await context.add_init_script(keyboard.REFUSE_PASTES)
            if site.files is not None:
                await context.route(f"{site.origin}/**", self._serve)
            await context.new_page()

    async def _may_go_back(self) -> bool:
        """Return whether the history has an earlier page of this chain, other than the tab's initial empty page."""
        if self._site is None or self._site.is_ours:
            return False
        session = await self._page.context.new_cdp_session(self._page)
        history = await session.send("Page.getNavigationHistory")
        await session.detach()
        index = history["currentIndex"]
        return index > 0 and history["entries"][index - 1]["url"] != "about:blank"

    async def _press(self, x: float, y: float, count: int = 1, button: Button = "left") -> Any:
        async with self._care():
            frame, place = await keyboard.frame_with(self._page, keyboard.AT, (x, y))
            menu = await frame.evaluate(keyboard.OPTIONS_AT, place) if button == "left" else None
            await self._move(x, y)
            if menu is None:
                await self._page.mouse.click(x, y, click_count=count, button=button)
            else:
                entries = ", ".join(map(repr, menu))
                self._notes.append(f"A menu is open, of which you choose by typing: {entries}.")
        return await self._after((x, y))

    async def _point_at(self, place: tuple[float, float]) -> Any:
        async with self._care():
            await self._move(*place)
        return await self._after(place)

    async def _drag(self, start: tuple[float, float] | None, end: tuple[float, float]) -> Any:
        """Drag from `start` (default: the cursor) to `end`, in CSS pixels."""
        async with self._care():
            if start is not None:
                await self._move(*start)
            await self._page.mouse.down()
            await self._page.mouse.move(*end, steps=5)
            await self._page.mouse.up()
            self._mouse = end
        return await self._after(*([end] if start is None else [start, end]))

    async def _look_towards(self, direction: Direction, place: tuple[float, float] | None) -> Any:
        """Scroll the element under the point (default: the cursor) by 70 % of its visible size."""
        across, down = _STEPS[direction]
        async with self._care():
            width, height = await self._page.evaluate(keyboard.SCROLLS_AT, [*(place or self._mouse), across != 0])
        return await self._wheel(across * width, down * height, place)

    async def _wheel(self, across: float, down: float, place: tuple[float, float] | None) -> Any:
        async with self._care():
            if place is not None:
                await self._move(*place)
            await self._page.mouse.wheel(across, down)
        return await self._after(*([] if place is None else [place]))

    async def _move(self, x: float, y: float) -> None:
        await self._page.mouse.move(x, y)
        self._mouse = (x, y)

    async def _after(self, *places: tuple[float, float]) -> Any:
        """Return the observation after an action; end the chain if the task is done."""
        await self._see(_settle)
        await self._judge()
        shown = await self._look()
        result: dict[str, Any] = {"observation": shown}
        if places:
            result["places"] = [[round(side * self._scale, 2) for side in place] for place in places]
            result["size"] = [round(side * self._scale) for side in (self._width, self._height)]
        if self._state["done"]:
            result["score"] = self._state["score"]
        return finish(result) if self._state["done"] else result

    async def _judge(self) -> None:
        if self._site is None or not self._pages:
            return
        script, named = f"() => ({self._site.state})", "check" if self._site.files is None else "the page"
        self._state = await self._see(lambda _: self._pages[0].evaluate(script), named)

    async def _look(self) -> list[Any]:
        # a screenshot that begins during a navigation may never finish
        content = await self._see(
            lambda page: page.screenshot(animations="disabled", scale="device", timeout=500 * self._seconds)
        )
        picture = await asyncio.to_thread(lambda: Image.open(BytesIO(content)).convert("RGB"))
        shown = self._view.shown(await self._drawn(picture))
        notes, self._notes, self._dialogs = self._notes, [], 0
        return [" ".join(notes), shown] if notes else [shown]

    async def _drawn(self, picture: Image.Image) -> Image.Image:
        return picture

    async def _see(self, look: "Callable[[Page], Awaitable[T]]", what: str = "the page") -> T:
        from playwright.async_api import Error

        async with self._care(what):
            while True:
                try:
                    return await look(self._page)
                except Error as error:
                    if not any(words in error.message for words in _MOVED):
                        raise
                await asyncio.sleep(0.05)
                self._check()

    @asynccontextmanager
    async def _care(self, what: str = "the page") -> AsyncIterator[None]:
        """Limit the time of the block, and raise its failures as ToolInfrastructureError naming `what`."""
        self._check()
        self._acting = True
        try:
            async with asyncio.timeout(self._seconds):
                yield
            self._acting = False
        except TimeoutError:
            self._check()
            raise ToolInfrastructureError(f"the page did not answer within {self._seconds:g} s") from None
        except ValueError:
            self._acting = False
            raise
        except ToolInfrastructureError:
            raise
        except Exception as error:
            self._check()
            if self._site is not None and "ERR_PROXY_CONNECTION_FAILED" in str(error):
                told = f"{self._site.origin} cannot be reached: `allowed` does not name it"
                raise ToolInfrastructureError(told) from error
            reason = str(error).partition("\n")[0]  # the rest is Playwright's own call log
            raise ToolInfrastructureError(f"{what} failed: {reason[:500]}") from error
        self._check()

    def _check(self) -> None:
        if self._fault is not None:
            raise ToolInfrastructureError(self._fault)

    def _opened(self, page: "Page") -> None:
        if len(self._pages) >= _MOST_TABS:
            self._tell_once("A further tab was not opened.")
            self._closing = asyncio.ensure_future(heed(page.close()))
            return
        if self._pages:
            self._tell_once("A new tab was opened.")
        self._pages.append(page)
        page.on("close", self._closed)
        page.on("crash", self._crashed)
        page.on("dialog", self._answer)
        page.on("download", self._refuse)

    def _closed(self, page: "Page") -> None:
        if page in self._pages:
            self._pages.remove(page)

    def _crashed(self, page: "Page") -> None:
        self._fault = "the page crashed"

    async def _answer(self, dialog: "Dialog") -> None:
        """Accept alerts and unload prompts; dismiss dialogs that ask for input."""
        self._dialogs += 1
        if self._dialogs > _MOST_DIALOGS:
            self._fault = f"the page opened more than {_MOST_DIALOGS} dialogs"
            return
        accepted = dialog.type in ("alert", "beforeunload")
        self._notes.append(f"A dialog said {dialog.message[:200]!r}; it was {'closed' if accepted else 'refused'}.")
        await heed(dialog.accept() if accepted else dialog.dismiss())

    def _refuse(self, download: "Download") -> None:
        self._tell_once("A download was refused.")

    def _tell_once(self, note: str) -> None:
        if note not in self._notes:
            self._notes.append(note)

    async def _serve(self, route: "Route") -> None:
        site = self._site
        if site is None or site.files is None:  # the chain has ended
            return
        name = route.request.url.removeprefix(site.origin + "/").split("?")[0].split("#")[0]
        path = (site.files / name).resolve()
        if path.is_relative_to(site.files.resolve()) and path.is_file():
            await heed(route.fulfill(path=path))
        else:
            await heed(route.fulfill(status=404, body=""))
