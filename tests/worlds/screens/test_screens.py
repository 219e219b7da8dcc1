"""Pages in a real Chromium: each task can be solved, but not by doing nothing; hostile pages end as typed failures."""

import asyncio
import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from playwright.async_api import Error

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.tools.images.coordinates import Coordinates, ModelView
from agentfactory.tools.tool import Finish
from agentfactory.worlds.screens.screen import MarkedScreen, Screen
from agentfactory.worlds.screens.sites import PAGE_NAMES, screens_tasks
from agentfactory.worlds.screens.sites import PAGES as PAGES_FOLDER
from tests.http_pages import serving
from tests.project import load_and_check
from tests.server_process import listening
from tests.worlds.opening import Open
from tests.worlds.screens.players import CHOSEN, NAMED, PLAYERS, Player, needs_chromium

pytestmark = needs_chromium
SIZE = {"width": 320, "height": 240}
TALL = "<body style='height: 100vh'>"
PAGES = {
    "/plain": "<button onclick='document.title=1'>a</button>",
    "/hangs": "<button onclick='for (;;) {}' style='position:fixed; inset:0'>a</button>",
    "/dialogs": "<body onclick='for (let n = 0; n < 1000; n++) alert(n)' style='height:100vh'>",
    "/asks": "<body onclick='document.title = confirm(\"Sure?\")' style='height:100vh'>",
    "/tab": "<a href='/plain' target='_blank' style='position:fixed; inset:0'>a</a>",
    "/tabs": "<body onclick='for (let n = 0; n < 12; n++) window.open(\"/plain\")' style='height:100vh'>",
    "/leaves": f"<script>onclick = () => location = 'http://elsewhere.test/'</script>{TALL}",
    "/outer": """<body style='margin:0'>
<iframe src='/inner' style='position:absolute; left:40px; top:30px; width:150px; height:100px;
  border:5px solid; padding:7px'></iframe>
<button style='position:absolute; left:0; top:200px; width:50px; height:20px' onclick='document.title += 0'>a</button>
<div style='position:absolute; left:120px; top:55px; width:80px; height:40px; background:red'></div>""",
    # the second button is covered by an element around the frame, and the third one is scrolled out of view
    "/inner": """<style>body > * { position:absolute; height:20px }</style><body style='margin:0; height:500px'>
<button style='left:10px; top:20px; width:50px' onclick='parent.document.title += 1'>a</button>
<button style='left:90px; top:20px; width:40px' onclick='parent.document.title += 2'>b</button>
<button style='left:10px; top:300px; width:40px' onclick='parent.document.title += 3'>c</button>
<select style='left:10px; top:70px; width:60px'><option>red<option>blue</select>
<iframe src='/innermost' frameborder=0 style='left:80px; top:50px; width:60px'></iframe>""",
    "/innermost": """<body style='margin:0'>
<button style='position:absolute; left:2px; top:3px; width:20px; height:10px'
  onclick='top.document.title += 9'>d</button>""",
    "/writes_itself": """<script>onload = () => {
  document.open();
  document.write("<body style='margin:0'><textarea style='width:100vw; height:100vh'>");
  document.close();
}</script>""",
    "/cookie": "<script>document.title = document.cookie + localStorage.length;"
    "document.cookie = 'a=1'; localStorage.b = 1</script>",
}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving(lambda request: (200, {"Content-Type": "text/html"}, PAGES.get(request.path, "").encode())) as url:
        yield url.removeprefix("http://")


@pytest.fixture
def screen(server: str, opened: Open) -> Screen:
    return opened(Screen, **SIZE, seconds=30.0, allowed=[server])  # a busy machine takes long


@pytest.fixture
def hasty_screen(server: str, opened: Open) -> Screen:
    """A screen with a short time limit, for pages that hang and servers that do not answer."""
    return opened(Screen, **SIZE, seconds=5.0, allowed=[server])


@pytest.mark.extended
async def test_a_player_solves_every_page_and_one_that_does_nothing_solves_none(screen: Screen) -> None:
    assert set(PLAYERS) == set(PAGE_NAMES)
    for page in PAGE_NAMES:
        player = Player(screen, (await screen.reset(page=page, seed=0))[0])
        await PLAYERS[page](player)
        assert player.ended
        assert screen.reward() == {"reward": 1.0, "success": 1.0}, page
        await screen.reset(page=page, seed=0)
        assert isinstance(await screen.done(), Finish)
        assert screen.reward() == {"reward": 0.0, "success": 0.0}, page


@pytest.mark.parametrize(
    "coordinates",
    [Coordinates.RELATIVE1000]
    + [pytest.param(other, marks=pytest.mark.extended) for other in (Coordinates.RELATIVE1, Coordinates.PIXELS)],
)
async def test_places_are_read_as_the_model_states_them(coordinates: Coordinates, opened: Open) -> None:
    screen = opened(Screen, **SIZE, scale=2.0)
    unit = {"relative1000": (1000, 1000), "relative1": (1, 1), "pixels": (640, 480)}[coordinates]
    opening = await screen.reset(page="click_button", seed=1, model_view=ModelView(coordinates).to_json())
    assert opening[-1].size == (640, 480)
    x, y = await Player(screen, opening[0]).ask(NAMED, Player(screen, opening[0]).told(r'"(\w+)"'))
    assert isinstance(await screen.click(x / 320 * unit[0], y / 240 * unit[1]), Finish)
    with pytest.raises(ValueError, match=r"x, y: got .*, outside of the image, which ends at"):
        await screen.click(unit[0] * 1.2, 0)


async def test_marks_are_clicked_by_number(opened: Open) -> None:
    screen = opened(MarkedScreen, **SIZE)
    opening = await screen.reset(page="click_color", seed=0)
    player = Player(screen, opening[0])  # type: ignore[arg-type]
    colours = await player.ask("() => [...document.querySelectorAll('div')].map(one => one.style.background)")
    wanted = colours.index(player.told(r"the (\w+) box"))
    assert isinstance(await screen.click(wanted), Finish)
    assert screen.reward()["success"] == 1
    await screen.reset(page="scroll", seed=0)
    # the list, and the buttons that are not scrolled out of it
    assert len(screen._marks) <= 6
    with pytest.raises(ValueError, match=r"element: got 99; the picture has 0 to"):
        await screen.click(99)


@pytest.mark.extended
async def test_elements_in_frames_have_marks(server: str, opened: Open) -> None:
    screen = opened(MarkedScreen, **SIZE, seconds=5.0, allowed=[server])
    await screen.reset(**at(server, "/outer"))
    # the frame's contents begin at 40 + 5 + 7, 30 + 5 + 7; the innermost frame at 80, 50 within them
    boxes = [[mark.left, mark.top, mark.right, mark.bottom] for mark in screen._marks]
    in_frame = [[52 + 10, 42 + 20, 52 + 60, 42 + 40], [52 + 10, 42 + 70, 52 + 70, 42 + 90]]
    assert boxes == [[0, 200, 50, 220], *in_frame, [132 + 2, 92 + 3, 132 + 22, 92 + 13]]
    for number in (0, 1, 3):
        await screen.click(number)
    told = (await screen.click(2))["observation"][0]
    assert told == "A menu is open, of which you choose by typing: 'red', 'blue'."
    assert len((await screen.type("blue"))["observation"]) == 1
    assert await screen._page.title() == "019"
    assert await screen._page.frames[1].evaluate("() => document.querySelector('select').value") == "blue"
    # the frame scrolled, and scaled to half its size
    await screen._page.evaluate("""() => {
        const frame = document.querySelector('iframe');
        frame.contentWindow.scrollTo(0, 280);
        Object.assign(frame.style, {transform: 'scale(0.5)', transformOrigin: '0 0'});
    }""")
    await screen.wait(0.1)
    boxes = [[mark.left, mark.top, mark.right, mark.bottom] for mark in screen._marks]
    assert boxes == [[0, 200, 50, 220], [40 + 6 + 5, 30 + 6 + 10, 40 + 6 + 25, 30 + 6 + 20]]
    await screen.click(1)
    assert await screen._page.title() == "0193"


MINIWOB = [
    *("click-test", "click-test-2", "click-button", "click-checkboxes", "click-collapsible", "click-color"),
    *("click-dialog", "click-link", "click-menu", "click-option", "click-pie", "click-shape", "click-tab"),
    *(
        *("click-widget", "count-shape", "enter-date", "enter-password", "enter-text", "focus-text", "login-user"),
        "use-slider",
    ),
]


@pytest.mark.long
@pytest.mark.extended
async def test_miniwob_loads_resets_and_scores(opened: Open) -> None:
    screen = opened(Screen, 160, 210)
    for name in MINIWOB:
        opening = await screen.reset(miniwob=name, seed=1)
        assert len(opening[0]) > 5
        again = await screen.reset(miniwob=name, seed=1)
        assert opening[0] == again[0]
        assert screen.reward()["reward"] == 0
    await screen.reset(miniwob="click-test", seed=1)
    assert isinstance(await screen.click(*await Player(screen, "").ask(CHOSEN, ["#subbtn", 0])), Finish)
    assert screen.reward() == {"reward": 1.0, "success": 1.0}


def at(server: str, path: str) -> dict[str, str]:
    return {"url": f"http://{server}{path}"}


@pytest.mark.extended
async def test_hostile_pages_are_typed_and_the_next_chain_is_well(hasty_screen: Screen, server: str) -> None:
    screen = hasty_screen
    hostile = {"/hangs": "the page did not answer within 5 s", "/dialogs": "the page opened more than 20 dialogs"}
    for path, problem in hostile.items():
        await screen.reset(**at(server, path))
        with pytest.raises(ToolInfrastructureError, match=problem):
            await screen.click(160, 120)
        await screen.reset(**at(server, "/plain"))
        await screen.click(20, 20)
    await screen.reset(**at(server, "/plain"))
    with suppress(Error):
        await screen._page.goto("chrome://crash")
    with pytest.raises(ToolInfrastructureError, match="the page crashed"):
        await screen.click(20, 20)


@pytest.mark.extended
async def test_what_the_model_is_told(screen: Screen, server: str) -> None:
    await screen.reset(**at(server, "/asks"))
    assert (await screen.click(160, 120))["observation"][0] == "A dialog said 'Sure?'; it was refused."
    await screen.reset(**at(server, "/tab"))
    assert (await screen.click(160, 120))["observation"][0] == "A new tab was opened."
    assert len((await screen.back())["observation"]) == 1
    await screen.reset(**at(server, "/tabs"))
    results = [await screen.click(160, 120), await screen.wait(1.0)]
    told = " ".join(part for result in results for part in result["observation"] if isinstance(part, str))
    assert "A further tab was not opened." in told
    assert told.count("A further tab was not opened.") <= len(results)
    assert len(screen._pages) == 5
    await screen.reset(page="form")
    assert (await screen.back())["observation"][0] == "There is no page before this one."
    assert (await screen.type("a" * 2001))["observation"][0] == "Only the first 2000 characters were typed."
    with pytest.raises(ValueError, match="keys: got 'Entr'"):
        await screen.key("Entr")


async def test_chains_share_nothing_and_reach_only_what_is_allowed(screen: Screen, server: str, opened: Open) -> None:
    title = "() => document.title"
    for _ in range(2):
        await screen.reset(**at(server, "/cookie"))
        assert await Player(screen, "").ask(title) == "0"
    await screen.reset(**at(server, "/leaves"))
    await screen.click(160, 120)
    assert "test" not in await Player(screen, "").ask("() => document.body.innerText.includes('proxy') ? '' : 'test'")
    other = opened(Screen, **SIZE, seconds=5.0)
    with pytest.raises(ToolInfrastructureError, match="cannot be reached: `allowed` does not name it"):
        await other.reset(**at(server, "/plain"))


@pytest.mark.extended
async def test_what_a_chain_copies_no_other_chain_pastes(screen: Screen, opened: Open) -> None:
    value = "() => document.querySelector('input').value"
    other = opened(Screen, **SIZE)
    for one in (screen, other):
        await one.reset(page="login", seed=1)
        await one.click(*await Player(one, "").ask(CHOSEN, ["input", 0]))
    await screen.type("secret")
    for keys, shown in (
        ("Control+A", "secret"), ("Control+C", "secret"), ("End", "secret"), ("Control+V", "secretsecret"),
        ("Control+A", "secretsecret"), ("Control+X", ""), ("Shift+Insert", "secretsecret"),
    ):  # fmt: skip
        await screen.key(keys)
        assert await Player(screen, "").ask(value) == shown, keys
    for keys in ("ControlLeft+KeyA", "ControlRight+KeyX", "ShiftLeft+Insert", "ControlOrMeta+v"):
        await screen.key(keys)
    assert await Player(screen, "").ask(value) == "secretsecret" * 2
    for keys in ("Control+A", "Control+C"):
        await screen._page.keyboard.press(keys)  # into Chromium's own clipboard, as a page's button may copy
    await other._page.keyboard.press("Control+V")
    assert await Player(other, "").ask(value) == ""
    for keys in ("Control+V", "ControlLeft+KeyV", "Shift+Control+V", "ShiftLeft+Insert"):
        await other.key(keys)
        assert await Player(other, "").ask(value) == "", keys
    await screen.key("Control+A")
    await other._press(*await Player(other, "").ask(CHOSEN, ["input", 0]), button="middle")
    assert await Player(other, "").ask(value) == ""
    await screen.reset(page="login", seed=1)
    await screen.click(*await Player(screen, "").ask(CHOSEN, ["input", 0]))
    await screen.key("Control+V")
    assert await Player(screen, "").ask(value) == ""


@pytest.mark.extended
async def test_no_other_way_pastes_it_either(screen: Screen, server: str, opened: Open) -> None:
    other = opened(Screen, **SIZE)
    await other.reset(page="login", seed=1)
    await other.click(*await Player(other, "").ask(CHOSEN, ["input", 0]))
    await other.type("secret")
    await other.key("Control+A")
    await other._page.keyboard.press("Control+C")
    # `document.open` removes all of a page's listeners, including the one that blocks pastes
    await screen.reset(**at(server, "/writes_itself"))
    await screen.click(160, 120)
    await screen._press(160, 120, button="middle")
    for keys in ("Control+a+v", "Control+AltGraph+v", "Control+v+a", "+".join(["a"] * 3000)):
        with pytest.raises(ValueError, match=r"keys: got .*; hold Control, Shift, Alt or Meta, and press one key"):
            await screen.key(keys)
    assert await Player(screen, "").ask("() => document.querySelector('textarea').value") == ""


@pytest.mark.extended
async def test_the_next_chain_on_a_page_of_ours_gets_the_tab_afresh(screen: Screen, server: str) -> None:
    # state that a tab could carry from one chain to the next
    pages = "".join(file.read_text(encoding="utf-8") for file in PAGES_FOLDER.iterdir())
    assert not re.search(r"cookie|Storage|indexedDB|location|history|open\(", pages)
    opening = await screen.reset(page="form", seed=3)
    tab = screen._page
    await screen.click(40, 40)
    await screen.type("left by another chain")
    await screen.scroll("down", 100, 100)
    await screen.release()
    await screen.reset(page="login", seed=1)
    await screen.release()
    again = await screen.reset(page="form", seed=3)
    assert screen._page is tab
    assert again[0] == opening[0]
    assert np.array_equal(again[1], opening[1])
    assert (await screen.back())["observation"][0] == "There is no page before this one."
    # an unfinished action, and any other address
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await screen.drag(20, 20, 200, 200)
    await screen.release()
    await screen.reset(page="form", seed=3)
    assert tab.is_closed()
    tab = screen._page
    await screen.reset(**at(server, "/plain"))
    assert tab.is_closed()
    tab = screen._page
    await screen.reset(page="form", seed=3)
    assert tab.is_closed()


async def test_bad_rows_are_refused(screen: Screen) -> None:
    for row, problem in (
        ({}, "has one of the fields page, miniwob and url"),
        ({"page": "click_buton"}, "page: got 'click_buton'; there are checkboxes, click_button"),
        ({"miniwob": "click"}, "miniwob: got 'click'; there are"),
        ({"url": "file:///etc/passwd"}, "it begins with http:// or https://"),
        ({"url": "http://localhost:1", "check": 5}, "check: got 5; give JavaScript as a text"),
    ):
        with pytest.raises(ValueError, match=problem):
            await screen.reset(**row)
    with pytest.raises(ValueError, match=r"miniwob: got .*; there are"):
        await screen.reset(miniwob="../miniwob/click-test")
    assert len(screens_tasks(seeds=2)) == 2 * len(PAGE_NAMES)


def test_rows_that_cannot_earn_anything_are_refused_with_the_recipe(project: Path) -> None:
    alone = ["tools=[]", "eval.data=null", "eval.every=0"]

    def load(row: dict[str, Any], *overrides: str) -> None:
        Path("tasks.jsonl").write_text('{"question": "?", "page": "form", "answer": ""}\n' + json.dumps(row) + "\n")
        load_and_check("recipe.yaml", [*alone, "mcp_servers={screen: {module: screen}}", *overrides])

    address = {"question": "?", "url": "http://localhost:1/", "answer": ""}
    with pytest.raises(SettingError, match=r"data: row 2: url without `check`.* earn 0.*\"check\": .*rewards"):
        load(address, "rewards=[]")
    with pytest.raises(SettingError, match=r"data: row 2: page: got 'fom'; there are checkboxes"):
        load({"question": "?", "page": "fom"}, "rewards=[]")
    load({**address, "check": "0"}, "rewards=[]")
    load(address)  # the recipe's own reward judges


@pytest.mark.extended
async def test_a_check_scores_the_page_or_is_named(screen: Screen, server: str) -> None:
    await screen.reset(**at(server, "/plain"), check="document.title / 2")
    await screen.click(20, 20)
    assert screen.reward()["reward"] == 0.5
    await screen.reset(**at(server, "/plain"), check="document.nothing.text == 1")
    with pytest.raises(ToolInfrastructureError, match=r"^check failed: Page.evaluate: TypeError: [^\n]*$"):
        await screen.done()


ASKS_ABOUT = """async ([reached, name]) => {
  const servers = [`stun:${reached}`, `turn:${reached}`, `turn:${reached}?transport=tcp`, `turn:${name}?transport=tcp`];
  for (const urls of servers) {
    const peer = new RTCPeerConnection({iceServers: [{urls, username: 'a', credential: 'b'}]});
    peer.createDataChannel('a');
    await peer.setLocalDescription(await peer.createOffer());
  }
  await new Promise(done => setTimeout(done, 2000));
}"""


@pytest.mark.extended
async def test_webrtc_reaches_nothing_and_looks_nothing_up(server: str, tmp_path: Path) -> None:
    log, program = tmp_path / "net.json", tmp_path / "chromium"
    program.write_text(f'#!/bin/sh\nexec {shutil.which("chromium")} "$@" --log-net-log={log}\n', encoding="utf-8")
    program.chmod(0o700)
    screen = Screen(**SIZE, allowed=[server], executable=str(program))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as there:
        there.bind(("127.0.0.1", 0))
        there.setblocking(False)
        try:
            await screen.reset(**at(server, "/plain"))
            await Player(screen, "").ask(ASKS_ABOUT, [f"127.0.0.1:{there.getsockname()[1]}", "leak.test:3478"])
        finally:
            await screen.close()
        with pytest.raises(BlockingIOError):
            there.recv(1)
    assert server in log.read_text(encoding="utf-8")
    assert '"leak.test."' not in log.read_text(encoding="utf-8")


@pytest.mark.extended
async def test_a_chain_cancelled_while_it_opens_leaves_nothing(screen: Screen, server: str, opened: Open) -> None:
    other = opened(Screen, **SIZE, seconds=5.0, allowed=[server])
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    for seconds in (0.05, 0.2, 0.4, 0.8):  # while Chromium starts, too
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await other.reset(**at(server, "/plain"))
        await other.release()
    await screen.reset(page="form")
    for wait in range(20):
        with suppress(TimeoutError):
            async with asyncio.timeout(0.02 * wait):
                await other.reset(**at(server, "/plain"))
    await other.release()
    while screen._browser._work:
        await asyncio.wait(screen._browser._work)
    assert len(screen._browser._running.chromium.contexts) == 1
    await other.close()
    await screen.close()
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    _, alive = psutil.wait_procs(left, timeout=10)
    assert not alive


@pytest.mark.extended
@pytest.mark.parametrize("name", ["node", "chromium"])
async def test_chains_outlive_a_killed_browser(hasty_screen: Screen, server: str, name: str, opened: Open) -> None:
    other = opened(Screen, **SIZE, seconds=5.0, allowed=[server])
    before = set(psutil.Process().children(recursive=True))
    await hasty_screen.reset(**at(server, "/plain"))
    await other.reset(page="form")
    started = [child for child in psutil.Process().children(recursive=True) if child not in before]
    programs = [process for process in started if process.name().startswith("chromium")]
    acting = asyncio.gather(hasty_screen.wait(1.0), other.wait(1.0), return_exceptions=True)
    await asyncio.sleep(0.5)
    for process in started:
        with suppress(psutil.NoSuchProcess):
            if process.name().startswith(name):
                process.kill()
    assert all(isinstance(error, ToolInfrastructureError) for error in await acting)
    for one in (hasty_screen, other):
        await one.release()
        await one.reset(page="form")
        await one.click(20, 20)
    _, alive = psutil.wait_procs(programs, timeout=10)
    assert not alive


FOREVER = """
import asyncio
from agentfactory.worlds.screens.screen import Screen

async def main():
    await Screen(320, 240).reset(page="form")
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.extended
def test_no_browser_outlives_a_killed_worker() -> None:
    worker = subprocess.Popen([sys.executable, "-c", FOREVER], stdout=subprocess.PIPE, text=True)
    assert worker.stdout.readline() == "ready\n"
    started = psutil.Process(worker.pid).children(recursive=True)
    assert len(started) > 2
    assert not listening(worker.pid), "it is controlled by a pipe"
    worker.kill()
    worker.wait()
    worker.stdout.close()
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive
