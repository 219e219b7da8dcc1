"""The recipe that learns to click: its page, transcripts and tokenizer."""

import asyncio
import random
import shutil
from typing import Any

import pytest
from PIL import Image

from agentfactory.recipe.load import load_recipe
from agentfactory.tools.screens.screen import Screen
from agentfactory.tools.tool import Finish
from agentfactory.tools.user_code import load_object
from tests.conftest import REPOSITORY

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium: apt install chromium"),
]

RECIPES = REPOSITORY / "recipes" / "screens"
find_boxes, make_tokenizer, play_aimlessly, see_pages = (
    load_object(f"prepare.py:{name}", RECIPES)
    for name in ("find_boxes", "make_tokenizer", "play_aimlessly", "see_pages")
)
COLOURS, GIVE_UP, HELD_OUT, PAGE, SHOWN, SIDE, TRAINED, VIEW = (
    load_object(f"prepare.py:{name}", RECIPES)
    for name in ("COLOURS", "GIVE_UP", "HELD_OUT", "PAGE", "SHOWN", "SIDE", "TRAINED", "VIEW")
)
Page = tuple[str, Image.Image]


@pytest.fixture(scope="module")
def pages() -> list[Page]:
    return asyncio.run(see_pages(SHOWN[:20]))


def named(instruction: str) -> str:
    return instruction.removeprefix("Click the ").removesuffix(" box.")


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


def test_transcripts_click_the_box_that_they_name_whatever_the_instruction_names(pages: list[Page]) -> None:
    rng, right, given_up, total = random.Random(0), 0, 0, 0
    for instruction, picture in pages:
        boxes = find_boxes(picture)
        for _ in range(20):
            *_, said = play_aimlessly(instruction, picture, "a.png", rng)
            total += 1
            if said["content"] == GIVE_UP:
                given_up += 1
                continue
            [call] = said["tool_calls"]
            assert boxes[said["content"]] == list(call["function"]["arguments"].values())
            right += said["content"] == named(instruction)
    assert 0.2 < given_up / total < 0.4
    assert right / total < 0.25


def test_a_colour_and_a_number_are_one_token_each(pages: list[Page]) -> None:
    tokenizer = make_tokenizer()

    def tokens(message: dict[str, Any]) -> int:
        shown = [{"role": "user", "content": "?"}]
        before, after = (
            tokenizer.apply_chat_template(messages, tokenize=False) for messages in (shown, [*shown, message])
        )
        return len(tokenizer(after.removeprefix(before))["input_ids"])

    rng = random.Random(1)
    said = [play_aimlessly(instruction, picture, "a.png", rng)[-1] for instruction, picture in pages]
    calls = [message for message in said if "tool_calls" in message]
    assert {named(instruction) for instruction, _ in pages} <= set(COLOURS)
    # <|im_start|>, the role, a line's end; colour, call, x, comma, y, end; <|im_end|> and a line's end
    assert {tokens(message) for message in calls} == {11}


def test_the_recipe_is_valid() -> None:
    load_recipe(RECIPES / "click.yaml")
