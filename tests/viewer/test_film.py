"""Chains of a browser as film strips: real ones, with clicks where the model meant them, in any coordinates."""

import asyncio
import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image, ImageColor

from agentfactory.launching.run_folder import RunFolder
from agentfactory.tools.images.coordinates import Coordinates
from tests.viewer.browsing import api, asking, chain_page, trajectory, viewing, when_read
from tests.viewer.screen_runs import SIZE, SIZES, screen_run

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [
    pytest.mark.processes,
    pytest.mark.extended,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium: apt install chromium"),
]


def pages_of(run: RunFolder) -> tuple[list[dict[str, Any]], Any]:
    """What the page gets of each chain, and who asks its server."""
    _, client = asking(run.path)
    rows = sorted(client.get("/api/trajectories").json()["rows"], key=lambda row: row["chain"])
    return [chain_page(client, row) for row in rows], client


def assert_is_on_the_wanted_colour(chain: Any, client: Any) -> Any:
    """The first call, a click: on the picture at its place is the colour that the page has asked for."""
    said, shown = chain["messages"][0]["parts"]
    picture = Image.open(BytesIO(client.get(f"/{shown['image']}").content))
    assert picture.size == SIZES.fitted(*SIZE)
    [click] = chain["messages"][1]["calls"]
    [(x, y)] = click["places"]
    [wanted] = re.findall(r"the (\w+) box", said["text"])
    assert picture.getpixel((int(x * picture.width), int(y * picture.height))) == ImageColor.getrgb(wanted)
    return click


@pytest.mark.parametrize(
    ("coordinates", "source"),
    [(Coordinates.PIXELS, ""), (Coordinates.RELATIVE1000, ""), (Coordinates.RELATIVE1, "pages")],
)
async def test_marks_are_on_what_was_clicked(tmp_path: Path, coordinates: Coordinates, source: str) -> None:
    run = await screen_run(tmp_path / "run", ["click_color", "drag"], coordinates, source=source)
    [colours, dragged], client = pages_of(run)
    click = assert_is_on_the_wanted_colour(colours, client)
    [drag] = dragged["messages"][1]["calls"]
    assert len(drag["places"]) == 2
    # what the model stated says the same, except of a picture whose full size nobody knows
    forget_infos(run)
    for page, before in zip(pages_of(run)[0], (click, drag), strict=True):
        [call] = page["messages"][1]["calls"]
        expected = [] if coordinates is Coordinates.PIXELS else before["places"]
        assert [pytest.approx(place, abs=0.002) for place in expected] == call["places"]


def forget_infos(run: RunFolder) -> None:
    """Have a run without what its tools have told beside their results."""
    file = run.trajectories / "train.jsonl"
    groups = [json.loads(line) for line in file.read_text().splitlines()]
    for message in (message for group in groups for one in group["trajectories"] for message in one["messages"]):
        message.pop("info", None)
    file.write_text("".join(f"{json.dumps(group)}\n" for group in groups))


def test_a_chain_of_a_browser_is_a_film(page: "Page", tmp_path: Path) -> None:
    # the browser that looks at it has an event loop in this thread
    with ThreadPoolExecutor() as thread:
        film = thread.submit(lambda: asyncio.run(screen_run(tmp_path / "run", ["login"]))).result()
    with viewing(film.path) as url:
        when_read(url)
        [row] = api(url, "/api/trajectories")["rows"]
        page.goto(f"{url}{trajectory(row)}?tab=film")
        frames = page.locator(".film li")
        frames.first.wait_for()
        messages = chain_page(asking(film.path)[1])["messages"]
        calls = [call for message in messages for call in message["calls"]]
        pictures = [part["image"] for message in messages for part in message["parts"] if "image" in part]
        assert [call["name"] for call in calls] == ["click", "type", "key", "type", "click"]
        # each action on the picture that the model saw before it, and what came of the last one
        assert frames.count() == len(calls) + 1 == len(pictures)
        assert frames.locator("img").evaluate_all("all => all.map(one => one.getAttribute('src'))") == pictures
        lines = frames.locator(".frame-call").all_inner_texts()
        assert [line.split("(")[0] for line in lines] == [*(call["name"] for call in calls), "the last picture"]
        frames.locator("img").last.evaluate("image => image.decode()")
        for number, call in enumerate(calls):
            marks = frames.nth(number).locator(".place")
            assert marks.count() == len(call["places"]) == (call["name"] == "click")
            for x, y in call["places"]:
                image, mark = frames.nth(number).locator("img").bounding_box(), marks.bounding_box()
                assert image
                assert mark
                middle = mark["x"] + mark["width"] / 2, mark["y"] + mark["height"] / 2
                assert middle[0] == pytest.approx(image["x"] + x * image["width"], abs=1)
                assert middle[1] == pytest.approx(image["y"] + y * image["height"], abs=1)
        # a frame leads to its turn
        frames.nth(3).locator("button").click()
        assert page.evaluate("document.activeElement.dataset.turn") == "3"
        assert page.locator(".message:focus .call-name").inner_text() == "type"
