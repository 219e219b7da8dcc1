"""Fetching from real servers on loopback: the guard after resolution and at redirects, limits, robots.txt, failures."""

import asyncio
import gzip
import zlib
from collections.abc import Callable
from functools import partial

import pytest
from aiohttp import web

from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.worlds.browse.documents import PageError
from agentfactory.worlds.browse.fetch import Fetcher
from tests.worlds.browse.site import PRIVATE, PUBLIC, NameServer, redirect, site, status
from tests.worlds.opening import Open

Opener = Callable[..., Fetcher]


@pytest.fixture
def names(public_address: None) -> NameServer:
    server = NameServer()
    server.names["site.test"] = [[PUBLIC]]
    return server


@pytest.fixture
def opened(names: NameServer, opened: Open) -> Opener:
    return partial(opened, Fetcher, resolver=names)


async def refused(fetcher: Fetcher, address: str) -> str:
    with pytest.raises(PageError) as error:
        await fetcher.fetch(address)
    return str(error.value)


async def test_a_page_with_its_type_and_charset(opened: Opener) -> None:
    async def page(request: web.Request) -> web.Response:
        assert request.headers["User-Agent"].startswith("AgentFactory/")
        return web.Response(body="<p>Ærø".encode("cp1252"), content_type="text/html", charset="windows-1252")

    async with site({"/a": page, "/b": redirect("/a?x=1#part")}) as served:
        fetcher = opened()
        document = await fetcher.fetch(f"http://site.test:{served.port}/b")
    assert document.url == f"http://site.test:{served.port}/a?x=1"
    assert (document.type, document.charset) == ("text/html", "windows-1252")
    assert document.content == "<p>Ærø".encode("cp1252")


@pytest.mark.parametrize("addresses", [[PRIVATE], [PUBLIC, PRIVATE], ["::1"], ["::ffff:127.0.0.1"], ["fe80::1%lo"]])
async def test_a_name_of_a_private_address_is_refused(opened: Opener, names: NameServer, addresses: list[str]) -> None:
    names.names["inside.test"] = [addresses]
    async with site({"/": "secret"}, PRIVATE) as secret:
        told = await refused(opened(), f"http://inside.test:{secret.port}/")
        assert "not in the public internet" in told
        assert secret.requests == []


async def test_a_name_that_changes_after_the_check_changes_nothing(opened: Opener, names: NameServer) -> None:
    async with site({"/": "public"}) as served, site({"/": "secret"}, PRIVATE) as secret:
        names.names["flips.test"] = [[PUBLIC], [PRIVATE]]
        fetcher = opened(robots=False)
        document = await fetcher.fetch(f"http://flips.test:{served.port}/")
        assert document.content == b"public"
        assert names.asked.count("flips.test") == 1  # the connection used the checked address
        # the next connection, to the server in the private network, resolves again
        assert "not in the public internet" in await refused(fetcher, f"http://flips.test:{secret.port}/")
        assert secret.requests == []


async def test_redirects_are_checked_like_addresses(opened: Opener, names: NameServer) -> None:
    names.names["inside.test"] = [[PRIVATE]]
    async with site({"/": "secret"}, PRIVATE) as secret:
        port = secret.port
        targets = [
            *(f"http://127.0.0.1:{port}/", f"http://2130706433:{port}/", f"http://0x7f000001:{port}/"),
            *(f"http://017700000001:{port}/", f"http://[::ffff:127.0.0.1]:{port}/"),
            *(f"http://[64:ff9b::7f00:1]:{port}/", f"http://inside.test:{port}/", f"//127.0.0.1:{port}/"),
            *("file:///etc/passwd", "http://user:password@site.test/", "http://[::1"),
        ]
        routes = {f"/{number}": redirect(target) for number, target in enumerate(targets)}
        async with site(routes) as served:
            for number in range(len(targets)):
                await refused(opened(), f"http://site.test:{served.port}/{number}")
        assert secret.requests == []


async def test_redirects_of_robots_txt_are_checked_too(opened: Opener) -> None:
    async with site({"/robots.txt": "secret"}, PRIVATE) as secret:
        routes = {"/": "page", "/robots.txt": redirect(f"http://127.0.0.1:{secret.port}/robots.txt")}
        async with site(routes) as served:
            await refused(opened(), f"http://site.test:{served.port}/")
            assert served.requests == ["/robots.txt"]
        assert secret.requests == []


async def test_redirects_end(opened: Opener) -> None:
    async with site({"/": redirect("/")}) as served:
        assert "5 redirects" in await refused(opened(robots=False), f"http://site.test:{served.port}/")
        assert len(served.requests) == 6


async def test_a_host_that_the_recipe_allows(opened: Opener, names: NameServer) -> None:
    async with site({"/": "inside"}, PRIVATE) as served:
        fetcher = opened(allow_hosts=(f"127.0.0.1:{served.port}", f"inside.test:{served.port}"))
        names.names["inside.test"] = [[PRIVATE]]
        for host in ("127.0.0.1", "inside.test"):
            assert (await fetcher.fetch(f"http://{host}:{served.port}/")).content == b"inside"
        names.names["other.test"] = [[PRIVATE]]
        await refused(fetcher, f"http://other.test:{served.port}/")


async def test_proxies_of_the_environment_are_not_used(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    async with site({"/": "page"}) as served, site({}, PRIVATE) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        fetcher = opened()
        assert (await fetcher.fetch(f"http://site.test:{served.port}/")).content == b"page"
        assert proxy.requests == []


@pytest.mark.parametrize("encoding", ["identity", "gzip", "deflate"])
async def test_size_is_limited_after_decompression(opened: Opener, encoding: str) -> None:
    content = bytes(3 << 20)
    packed = {"identity": content, "gzip": gzip.compress(content), "deflate": zlib.compress(content)}[encoding]

    async def page(request: web.Request) -> web.Response:
        return web.Response(body=packed, content_type="text/plain", headers={"Content-Encoding": encoding})

    async with site({"/": page}) as served:
        address = f"http://site.test:{served.port}/"
        assert "larger than 1,024 KiB" in await refused(opened(max_bytes=1 << 20), address)
        fetcher = opened(max_bytes=3 << 20)
        assert (await fetcher.fetch(address)).content == content


async def test_an_endless_page_ends_at_the_limit(opened: Opener) -> None:
    sent = 0

    async def page(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        while True:
            await response.write(bytes(1 << 16))
            sent += 1 << 16

    async with site({"/": page}) as served:
        await refused(opened(max_bytes=1 << 20), f"http://site.test:{served.port}/")
    assert sent < 32 << 20


async def test_time_is_limited(opened: Opener) -> None:
    async def page(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        await asyncio.Event().wait()
        return response

    async with site({"/": page}) as served:
        told = await refused(opened(seconds=0.3), f"http://site.test:{served.port}/")
        assert told == "site.test did not answer within 0.3 s."


@pytest.mark.parametrize("kind", ["image/png", "application/octet-stream"])
async def test_other_types_are_refused(opened: Opener, kind: str) -> None:
    async def page(request: web.Request) -> web.Response:
        return web.Response(body=b"x", content_type=kind)

    async with site({"/": page}) as served:
        assert kind in await refused(opened(), f"http://site.test:{served.port}/")


async def test_what_the_model_reads_of_failures(opened: Opener) -> None:
    routes = {f"/{code}": status(code) for code in (403, 410, 418, 429, 503)}
    async with site(routes) as served:
        say = {"404": "There is no page", "410": "There is no page", "403": "does not give access", "418": "status 418"}
        for path, part in {**say, "429": "cannot serve it now (429)", "503": "cannot serve it now (503)"}.items():
            assert part in await refused(opened(), f"http://site.test:{served.port}/{path}")
        port = served.port
    assert await refused(opened(), f"http://nowhere.test:{port}/") == "There is no host nowhere.test."
    assert "does not answer" in await refused(opened(), f"http://site.test:{port}/")


async def test_an_allowed_host_that_fails_is_a_failure_of_the_infrastructure(opened: Opener) -> None:
    async with site({"/": status(503)}, PRIVATE) as served:
        fetcher = opened(allow_hosts=(f"127.0.0.1:{served.port}",), robots=False)
        with pytest.raises(ToolInfrastructureError, match="cannot serve it now"):
            await fetcher.fetch(f"http://127.0.0.1:{served.port}/")
        assert "There is no page" in await refused(fetcher, f"http://127.0.0.1:{served.port}/nothing")
    with pytest.raises(ToolInfrastructureError, match="does not answer"):
        await fetcher.fetch(f"http://127.0.0.1:{served.port}/")


RULES = """
User-agent: *
Disallow: /

User-agent: AgentFactory
Disallow: /private/
Disallow: /*.cgi$
Allow: /private/open
"""


async def test_robots_txt_is_obeyed_and_asked_for_once(opened: Opener) -> None:
    async with site({"/robots.txt": RULES, "/": "x", "/a": "x", "/private/open": "x"}) as served:
        address = f"http://site.test:{served.port}"
        fetcher = opened()
        await asyncio.gather(*(fetcher.fetch(f"{address}{path}") for path in ("/", "/a", "/private/open", "/a", "/")))
        for path in ("/private/x", "/x.cgi"):
            assert "robots.txt" in await refused(fetcher, address + path)
        assert served.requests.count("/robots.txt") == 1
        assert "/private/x" not in served.requests
        careless = opened(robots=False)
        assert "There is no page" in await refused(careless, f"{address}/private/x")


async def test_the_recipes_own_hosts_serve_all_chains_at_once(opened: Opener) -> None:
    together = asyncio.Barrier(64)

    async def page(request: web.Request) -> web.Response:
        await together.wait()
        return web.Response(text="x")

    async with site({"/": page}, PRIVATE) as served:
        fetcher = opened(allow_hosts=(f"127.0.0.1:{served.port}",), robots=False)
        address = f"http://127.0.0.1:{served.port}/"
        assert len(await asyncio.gather(*(fetcher.fetch(address) for _ in range(64)))) == 64


async def test_https_to_a_server_without_it_is_told_to_the_model(opened: Opener) -> None:
    async with site({"/": "x"}, PRIVATE) as served:
        fetcher = opened(allow_hosts=(f"127.0.0.1:{served.port}",))
        assert "does not speak https; open it with http://" in await refused(fetcher, f"127.0.0.1:{served.port}/")


async def test_names_that_cannot_be_asked_for(opened: Opener) -> None:
    for name in ("a..b", "a" * 64 + ".com"):
        fetcher = Fetcher(robots=False)
        assert "is not the name of a host" in await refused(fetcher, f"http://{name}/")
        await fetcher.close()


async def test_a_robots_txt_may_begin_with_a_byte_order_mark(opened: Opener) -> None:
    async with site({"/robots.txt": "\ufeffUser-agent: *\nDisallow: /", "/": "x"}) as served:
        assert "robots.txt" in await refused(opened(), f"http://site.test:{served.port}/")


@pytest.mark.parametrize("code", [500, 503, 429])
async def test_a_site_that_cannot_give_its_robots_txt_is_not_read(opened: Opener, code: int) -> None:
    async with site({"/robots.txt": status(code), "/": "x"}) as served:
        assert "robots.txt" in await refused(opened(), f"http://site.test:{served.port}/")
        assert served.requests == ["/robots.txt"]


async def test_a_hostile_robots_txt_takes_no_time(opened: Opener) -> None:
    async def rules(request: web.Request) -> web.Response:
        return web.Response(text="User-agent: *\nDisallow: /" + "*a" * 500 + "b$\n" * 20_000)

    async with site({"/robots.txt": rules, "/" + "a" * 1500: "x"}) as served:
        fetcher = opened(seconds=5.0)
        await fetcher.fetch(f"http://site.test:{served.port}/" + "a" * 1500)
