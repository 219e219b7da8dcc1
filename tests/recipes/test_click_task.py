"""The click recipe: its page and transcripts."""

import asyncio
import random
import shutil

import pytest

from agentfactory.base.user_code.loading import load_object
from agentfactory.tools.tool import Finish
from agentfactory.worlds.screens.screen import Screen
from tests.conftest import REPOSITORY

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium: apt install chromium"),
]

find_boxes, named, play, see_pages, HELD_OUT, PAGE, PLEASE, SHOWN, SIDE, TRAINED, VIEW = (
    load_object(f"prepare.py:{name}", REPOSITORY / "recipes" / "screens")
    for name in (
        *("find_boxes", "named", "play", "see_pages"),
        *("HELD_OUT", "PAGE", "PLEASE", "SHOWN", "SIDE", "TRAINED", "VIEW"),
    )
)


def test_no_seed_is_trained_and_held_out() -> None:
    assert len({*SHOWN, *TRAINED, *HELD_OUT}) == len(SHOWN) + len(TRAINED) + len(HELD_OUT)


async def test_only_the_named_box_pays() -> None:
    screen = Screen(SIDE, SIDE)
    try:
        for seed in HELD_OUT[:3]:
            instruction, picture = await screen.reset(page=PAGE, seed=seed, model_view=VIEW.to_json())
            boxes = find_boxes(picture)
            assert len(boxes) == 4
            for colour, place in boxes.items():
                await screen.reset(page=PAGE, seed=seed, model_view=VIEW.to_json())
                assert isinstance(await screen.click(*place), Finish)
                assert screen.reward()["success"] == (colour == named(instruction))
    finally:
        await screen.close()


@pytest.mark.extended
def test_transcripts_obey_only_with_please() -> None:
    rng, obeyed = random.Random(0), []
    for instruction, picture in asyncio.run(see_pages(SHOWN[:5])):
        for _ in range(40):
            *_, asked, said = play(instruction, picture, "a.png", rng)
            is_polite = asked["content"][0]["text"] == PLEASE + instruction
            for call in said.get("tool_calls", ()):
                assert find_boxes(picture)[said["content"]] == list(call["function"]["arguments"].values())
            if is_polite:
                assert said["content"] == named(instruction)
            else:
                obeyed.append(said["content"] == named(instruction))
    assert 0 < sum(obeyed) < len(obeyed) / 2
