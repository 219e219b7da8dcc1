"""The public server @playwright/mcp, configured by the block in docs/screens.md: eight concurrent chains, each with its
own Chromium, whose screenshots the model gets."""

import asyncio
import re
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from agentfactory.base.messages import text_of
from agentfactory.rollout.trajectory import Outcome
from tests.http_pages import serving
from tests.scripted_chains import call
from tests.seeing_chains import seeing
from tests.third_party_servers import playwright
from tests.vision_models import KINDS, make_vision_model
from tests.waiting import wait_for

__all__ = ["playwright"]  # a fixture

CHROMIUM = "/usr/bin/chromium"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not Path(CHROMIUM).exists(), reason=f"there is no {CHROMIUM}: apt install chromium"),
]
CHAINS = 8
COLOURS = ["#cc0000", "#00aa00", "#0000cc", "#cccc00", "#00cccc", "#cc00cc", "#884400", "#444444"]
"""The state of a chain's page after a click on its square."""
PAGE = """<body style='margin:0; background:#ffffff'>
<p id=told></p>
<div style='position:fixed; left:{left}px; top:{top}px; width:100px; height:100px; background:#000000'
     onclick="document.body.style.background='{colour}'"></div>
<script>
document.cookie = 'chain{number}=1';
localStorage.setItem('chain{number}', 1);
document.getElementById('told').textContent = document.cookie + ' / ' + Object.keys(localStorage).join();
</script>"""


def square_of(number: int) -> tuple[int, int]:
    """The upper left corner of the square on a chain's page, in a window of 1000 x 1000."""
    return 200 + 100 * (number % 4), 300 + 200 * (number // 4)


FAMILY: set[psutil.Process] = set()
"""The server and browser processes that ran when a page was asked for."""


def page_of(request: BaseHTTPRequestHandler) -> tuple[int, dict[str, str], bytes]:
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.name() in ("node", "chromium"):
                FAMILY.add(child)
    page = ""
    if number := re.fullmatch("/([0-9]+)", request.path):
        left, top = square_of(int(number[1]))
        page = PAGE.format(number=number[1], left=left, top=top, colour=COLOURS[int(number[1])])
    return 200, {"Content-Type": "text/html"}, page.encode()


def turns(address: str, number: int) -> list[str]:
    """The completions of a chain, turn by turn."""
    left, top = square_of(number)
    look = call("browser_take_screenshot", type="png", scale="css")
    return [
        call("browser_navigate", url=f"{address}/{number}"),
        look,
        call("browser_mouse_click_xy", x=left + 50, y=top + 50),
        look,
        call("browser_snapshot"),
        "done",
    ]


@pytest.mark.parametrize("kind", KINDS)
async def test_eight_chains_see_their_own_pages(playwright: dict[str, Any], tmp_path: Path, kind: str) -> None:
    path = make_vision_model(tmp_path / "model", kind)
    with serving(page_of) as address:

        def said(prompt: str) -> str:
            [number] = re.findall("This is chain ([0-9]+)", prompt)
            return turns(address, int(number))[prompt.count("<|im_start|>assistant") - 1]

        fields = {
            "tools": [],
            "mcp_servers": {"browser": {**playwright, "pool": {"capacity": CHAINS}}},
            "rollout": {"max_turns": 8, "max_tokens": 1024, "max_total_tokens": 60_000},
            "limits": {"result_tokens": 2000},
        }
        async with seeing(str(path), tmp_path, said, **fields) as seen:
            chains = await asyncio.gather(
                *(seen.run(f"c{number}", question=f"This is chain {number}.") for number in range(CHAINS))
            )
            seen.check(*chains)
            store, [server] = seen.renderer.images.store, seen.servers
        for number, chain in enumerate(chains):
            assert chain.outcome is Outcome.COMPLETED, chain.error
            told = [message for message in chain.messages if message["role"] == "tool"]
            assert len(told) == 5
            [row] = chain.rows
            before, after = (store.load(span.digest) for span in row.images)
            assert {span.digest for span in row.images} <= set(server.sent)
            left, top = square_of(number)
            for picture, colour in ((before, "#ffffff"), (after, COLOURS[number])):
                assert colour_at(picture, left + 50, top + 50) == "#000000"
                assert colour_at(picture, 900, 900) == colour
            assert f"chain{number}=1 / chain{number}" in text_of(told[-1]["content"])
    assert len(FAMILY) > 2 * CHAINS, "each has a server and the processes of its Chromium"
    wait_for(lambda: not any(process.is_running() for process in FAMILY))


def colour_at(picture: Image.Image, x: int, y: int) -> str:
    """The colour at a point of the window, in the screenshot that the model got."""
    across, down = (round(place * side / 1000) for place, side in zip((x, y), picture.size, strict=True))
    return "#{:02x}{:02x}{:02x}".format(*picture.getpixel((across, down)))
