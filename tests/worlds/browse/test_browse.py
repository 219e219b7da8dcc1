"""The tool `browse` on a corpus of local pages, alone and through the toolset, as chains use it."""

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentfactory.base.messages import CallError, ToolCall, ToolInfrastructureError, ToolResult
from agentfactory.tools.sessions.tool_session import ToolSession
from agentfactory.worlds.browse.browse import Browse
from tests.worlds.browse.site import PAGES, PRIVATE, Handler, Site, site, status
from tests.worlds.opening import Open, tools_of

pytestmark = pytest.mark.processes
LONG = "".join(f"<p>Paragraph {number} of a long page.</p>" for number in range(1000))
LONG += "<p>The needle is <b>here</b>, and <a href='/karsund.html'>Karsund</a> is there.</p>"


async def in_windows_1252(request: web.Request) -> web.Response:
    text = (PAGES / "people/halvard.html").read_text(encoding="utf-8")
    return web.Response(body=text.encode("cp1252"), content_type="text/html")


@asynccontextmanager
async def atlas(**further: Handler | str) -> AsyncIterator[Site]:
    files = [path for path in PAGES.rglob("*") if path.is_file()]
    routes: dict[str, Any] = {f"/{path.relative_to(PAGES)}": path for path in files}
    routes |= {"/long": LONG, "/people/halvard.html": in_windows_1252}
    routes |= {f"/{name}": route for name, route in further.items()}
    async with site(routes, PRIVATE) as served:
        yield served


@pytest.fixture
def browsers(opened: Open) -> Callable[..., Browse]:
    return lambda served, **options: opened(Browse, allow_hosts=[f"127.0.0.1:{served.port}"], **options)


async def test_a_walk_through_the_atlas(browsers: Callable[..., Browse]) -> None:
    async with atlas() as served:
        address = f"http://127.0.0.1:{served.port}"
        browser = browsers(served)
        opened = await browser.browse(f"{address}/index.html")
        assert opened["opened"] == f"{address}/index.html"
        seen = f"{address}/index.html\nAtlas of the Sund (page 1 of 1)\n\n# Atlas of the Sund"
        assert opened["observation"].startswith(seen)
        assert "[Karsund][1]" in opened["observation"]
        assert "built by [Halvard Øye][1]" in " ".join((await browser.follow(1))["observation"].split())
        halvard = await browser.follow(1)
        assert "Halvard Øye (1851–1923)" in halvard["observation"]  # from a page in Windows-1252
        assert "born in [Veidnes][1]" in halvard["observation"]
        assert (await browser.find_on_page("LIGHTHOUSE of")).startswith('"LIGHTHOUSE of" occurs once:\npage 1: ')
        assert (await browser.back())["opened"] == f"{address}/karsund.html"
        assert (await browser.back())["opened"] == f"{address}/index.html"
        with pytest.raises(ValueError, match="there is no page before this one"):
            await browser.back()


async def test_a_long_page_is_read_in_windows(browsers: Callable[..., Browse]) -> None:
    async with atlas() as served:
        browser = browsers(served, window_characters=1000)
        first = (await browser.browse(f"http://127.0.0.1:{served.port}/long"))["observation"]
        count = int(re.search(r"\(page 1 of (\d+)\)", first).group(1))  # type: ignore[union-attr]
        assert count > 20
        assert len(await browser.page(2)) < 1100
        assert f"page {count}: ... " in await browser.find_on_page("needle is **here**")
        assert "needle" in await browser.page(count)
        await browser.follow(1)
        back = (await browser.back())["observation"]
        assert f"(page {count} of {count})" in back  # where the model was
        with pytest.raises(ValueError, match=f"there is no page {count + 1}: this document has pages 1 to {count}"):
            await browser.page(count + 1)


async def test_pages_of_another_runs_cache(tmp_path: Path, browsers: Callable[..., Browse], opened: Open) -> None:
    cache = str(tmp_path / "cache")
    async with atlas() as served:
        address = f"http://127.0.0.1:{served.port}/karsund.html"
        first = Browse(allow_hosts=[f"127.0.0.1:{served.port}"], cache=cache)
        shown = await first.browse(address)
        await first.close()
        second = browsers(served, cache=cache)
        assert await second.browse(address) == shown
        assert second.gauges() == {"cache_hits": 1.0, "cache_misses": 0.0}
        assert served.requests.count("/karsund.html") == 1
        strict = opened(Browse, cache=cache)  # as in a recipe that does not allow this host
        with pytest.raises(Exception, match="not in the public internet"):
            await strict.browse(address)


async def ask(session: ToolSession, name: str, **arguments: Any) -> ToolResult:
    return await session.call(ToolCall("0", name, arguments))


async def test_chains_through_the_toolset(tmp_path: Path) -> None:
    async with (
        atlas(down=status(500)) as served,
        tools_of("browse", allow_hosts=[f"127.0.0.1:{served.port}"], cache=str(tmp_path)) as tools,
    ):
        address = f"http://127.0.0.1:{served.port}"
        assert [spec.name for spec in tools.specs] == ["browse", "follow", "page", "find_on_page", "back"]
        async with tools.chain("a", {"question": "q"}) as one, tools.chain("b", {"question": "q"}) as two:
            first = await ask(one, "browse", url=f"{address}/index.html")
            assert first.error is None
            assert first.info == {"opened": f"{address}/index.html"}
            assert (await ask(two, "page", number=1)).error is CallError.TOOL_ERROR  # nothing is open there
            refused = await ask(two, "browse", url="http://127.0.0.1:1/")
            assert refused.error is CallError.TOOL_ERROR
            assert refused.content == "PageError: '127.0.0.1' is not in the public internet, so it is not opened."
            assert (await ask(two, "browse", url=f"{address}/index.html")).content == first.content
            gauges = await tools.gauges()
            assert gauges["environments/it/cache_hits"] == 1.0
            assert gauges["environments/it/cache_misses"] == 1.0
            with pytest.raises(ToolInfrastructureError, match="cannot serve it now"):
                await ask(two, "browse", url=f"{address}/down")
