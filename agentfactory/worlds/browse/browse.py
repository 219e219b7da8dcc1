"""`Browse`: tools to read web pages as text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentfactory.base.user_code.extras import check_extra
from agentfactory.tools.environments.environment import Environment
from agentfactory.tools.tool import tool
from agentfactory.worlds.browse.web_pages import Pages
from agentfactory.worlds.browse.window import WINDOW_CHARACTERS, Page
from agentfactory.worlds.shared import Shared

_shared: Shared[Pages] = Shared()


class Browse(Environment):
    """An environment with tools to open pages, follow links and find text. It has no reward: set `rewards:` in the
    recipe.

    Pages are shown as markdown, in windows; links have the form `[label][3]`. The info of a result that opens a page
    has `opened`, the page's address.

    Args:
        allow_hosts: hosts in private networks that may be opened: HOST, or HOST:PORT. All others there are refused.
        window_characters: length of a window in characters.
        cache: folder of the page cache, shared by all workers and steps; null: no cache.
        robots: whether to obey a site's robots.txt.

    Raises:
        SettingError: an entry of `allow_hosts` is not a host, or the extra `browse` is not installed.
        ValueError: `window_characters` is out of range.
    """

    def __init__(
        self,
        allow_hosts: Sequence[str] = (),
        window_characters: int = WINDOW_CHARACTERS,
        cache: str | None = None,
        robots: bool = True,
    ) -> None:
        check_extra("browse")
        if window_characters < 1:
            raise ValueError(f"window_characters: got {window_characters}; it has to be at least 1")
        folder = None if cache is None else Path(cache).expanduser().resolve()
        self._key = (tuple(allow_hosts), robots, folder)
        self._pages = _shared.acquire(self._key, lambda: Pages(tuple(allow_hosts), robots, folder))
        self._size = window_characters
        self._begin()

    def _begin(self) -> None:
        self._page: Page | None = None
        self._url, self._number = "", 1
        self._visited: list[tuple[str, int]] = []

    async def reset(self, **task: Any) -> None:
        self._begin()

    @tool
    async def browse(self, url: str) -> dict[str, Any]:
        """Open a web page, and read its beginning. Links in the text are numbered, as in [label][3].

        Args:
            url: The address of the page, such as https://en.wikipedia.org/wiki/Oslo.
        """
        return await self._go(url)

    @tool
    async def follow(self, link: int) -> dict[str, Any]:
        """Open the page to which a link of the current page leads.

        Args:
            link: The number of the link: 3 for [label][3].
        """
        links = self._current().links
        if not 1 <= link <= len(links):
            there_are = f"they are 1 to {len(links)}" if links else "it has none"
            raise ValueError(f"this page has no link {link}: {there_are}")
        return await self._go(links[link - 1])

    @tool
    async def page(self, number: int) -> str:
        """Read another part of the current page, which is long.

        Args:
            number: The number of the part: 2 for page 2 of 7.
        """
        shown = self._current().window(number)
        self._number = number
        return shown

    @tool
    async def find_on_page(self, text: str) -> str:
        """Find a text on the current page, in all its parts.

        Args:
            text: The words to find, as they stand there.
        """
        return self._current().find(text)

    @tool
    async def back(self) -> dict[str, Any]:
        """Go back to the page before."""
        if not self._visited:
            raise ValueError("there is no page before this one" if self._page else "no page is open: browse one first")
        url, number = self._visited[-1]
        shown = await self._show(url, number)
        del self._visited[-1]
        return shown

    def gauges(self) -> dict[str, float]:
        return self._pages.gauges()

    async def close(self) -> None:
        pages = _shared.release(self._key)
        if pages is not None:
            await pages.close()

    async def _go(self, address: str) -> dict[str, Any]:
        came_from = (self._url, self._number)
        shown = await self._show(address, 1)
        if came_from[0]:
            self._visited.append(came_from)
        return shown

    async def _show(self, address: str, number: int) -> dict[str, Any]:
        found = await self._pages.open(address)
        page = Page(found.text.title, found.text.text, found.text.links, self._size)
        number = min(number, page.count)
        self._page, self._url, self._number = page, found.url, number
        return {"observation": f"{found.url}\n{page.window(number)}", "opened": found.url}

    def _current(self) -> Page:
        if self._page is None:
            raise ValueError("no page is open: browse one first")
        return self._page
