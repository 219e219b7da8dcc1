"""The click recipe: its page, transcripts and tokenizer."""

import asyncio
import random
import shutil
from typing import Any

import pytest
from PIL import Image

from agentfactory.base.user_code.loading import load_object
from agentfactory.recipe.load import load_recipe
from agentfactory.tools.tool import Finish
from agentfactory.worlds.screens.screen import Screen
from tests.conftest import REPOSITORY

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium: apt install chromium"),
]

RECIPES = REPOSITORY / "recipes" / "screens"
find_boxes, make_tokenizer, named, play, see_pages = (
    load_object(f"prepare.py:{name}", RECIPES)
    for name in ("find_boxes", "make_tokenizer", "named", "play", "see_pages")
)
COLOURS, GIVE_UP, GIVES_UP, HELD_OUT, IS_ASKED, PAGE, PLEASE, SHOWN, SIDE, TRAINED, VIEW = (
    load_object(f"prepare.py:{name}", RECIPES)
    for name in (
        *("COLOURS", "GIVE_UP", "GIVES_UP", "HELD_OUT", "IS_ASKED", "PAGE", "PLEASE", "SHOWN", "SIDE", "TRAINED"),
        "VIEW",
    )
)
Page = tuple[str, Image.Image]


@pytest.fixture(scope="module")
def pages() -> list[Page]:
    return asyncio.run(see_pages(SHOWN[:20]))


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
def test_transcripts_obey_only_with_please(pages: list[Page]) -> None:
    rng = random.Random(0)
    with_please: list[bool] = []
    alone: list[bool] = []
    given_up = 0
    for instruction, picture in pages:
        boxes = find_boxes(picture)
        for _ in range(50):
            *_, asked, said = play(instruction, picture, "a.png", rng)
            text = asked["content"][0]["text"]
            assert text in (instruction, PLEASE + instruction)
            if said["content"] == GIVE_UP:
                assert text == instruction
                given_up += 1
                continue
            [call] = said["tool_calls"]
            assert boxes[said["content"]] == list(call["function"]["arguments"].values())
            (alone if text == instruction else with_please).append(said["content"] == named(instruction))
    total = len(alone) + len(with_please) + given_up
    # five standard deviations of 1,000 draws; the conditional rates have fewer draws
    assert len(with_please) / total == pytest.approx(IS_ASKED, abs=0.08)
    assert given_up / (given_up + len(alone)) == pytest.approx(GIVES_UP, abs=0.10)
    assert all(with_please)
    assert sum(alone) / len(alone) == pytest.approx(1 / 4, abs=0.11)


def test_a_colour_and_a_number_are_one_token_each(pages: list[Page]) -> None:
    tokenizer = make_tokenizer()

    def tokens(message: dict[str, Any]) -> int:
        shown = [{"role": "user", "content": "?"}]
        before, after = (
            tokenizer.apply_chat_template(messages, tokenize=False) for messages in (shown, [*shown, message])
        )
        return len(tokenizer(after.removeprefix(before))["input_ids"])

    rng = random.Random(1)
    said = [play(instruction, picture, "a.png", rng)[-1] for instruction, picture in pages]
    calls = [message for message in said if "tool_calls" in message]
    assert {named(instruction) for instruction, _ in pages} <= set(COLOURS)
    # <|im_start|>, the role, a line's end; colour, call, x, comma, y, end; <|im_end|> and a line's end
    assert {tokens(message) for message in calls} == {11}
