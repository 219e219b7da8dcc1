"""The click recipe: its page, and the seeds of its tasks."""

from agentfactory.base.user_code.loading import load_object
from agentfactory.tools.tool import Finish
from agentfactory.worlds.screens.screen import Screen
from tests.conftest import REPOSITORY
from tests.worlds.screens.players import needs_chromium

pytestmark = needs_chromium

find_boxes, named, HELD_OUT, PAGE, SHOWN, SIDE, TRAINED, VIEW = (
    load_object(f"prepare.py:{name}", REPOSITORY / "recipes" / "screens")
    for name in ("find_boxes", "named", "HELD_OUT", "PAGE", "SHOWN", "SIDE", "TRAINED", "VIEW")
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
