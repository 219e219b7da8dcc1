"""The environment: pages in the published text mode, effects of clicks, rewards, concurrent chains."""

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.base.messages import ToolCall
from agentfactory.tools.tool import Finish
from agentfactory.worlds.webshop.nouns import load_tagger
from agentfactory.worlds.webshop.shop import ShopConfig, open_shop
from agentfactory.worlds.webshop.webshop import WebShop, webshop_tasks
from tests.conftest import REPOSITORY
from tests.worlds.opening import tools_of
from tests.worlds.webshop.published_files import write_published_files
from tests.worlds.webshop.shoppers import shop_in_vain, shop_perfectly

INSTRUCTION = "Instruction: [SEP] a stackable chair"


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


class Shopper:
    def __init__(self, environment: WebShop) -> None:
        self.environment = environment
        self.info: dict[str, Any] = {}

    async def act(self, tool: str, argument: str) -> str:
        result = self.environment.search(argument) if tool == "search" else await self.environment.click(argument)
        if not isinstance(result, Finish):
            return result
        self.info = dict(result.value)
        return self.info.pop("observation")

    async def click(self, target: str) -> str:
        return await self.act("click", target)


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[Shopper]:
    """A shopper in a shop of the published files, whose goal is the chair."""
    folder, cache = write_published_files(tmp_path / "data"), tmp_path / "cache"
    environment = WebShop(str(folder), cache=str(cache), results_per_page=2)
    shop = open_shop(ShopConfig(folder, cache=cache))
    chair = next(number for number in range(shop.goals) if shop.goal(number).asin == "B000000005")
    assert environment.reset(chair) == f"WebShop [SEP] {INSTRUCTION} [SEP] Search"
    yield Shopper(environment)
    environment.release()


async def test_pages_are_those_of_the_published_text_mode(theirs: Shopper) -> None:
    first = f"{INSTRUCTION} [SEP] Back to Search [SEP] Page 1 (Total results: 3) [SEP] Next > [SEP] "
    lamps = "B000000001 [SEP] Acme Oak Lamp B000000001 [SEP] $19.99"
    lamps += " [SEP] B000000002 [SEP] Acme Oak Lamp B000000002 [SEP] $9.5 to $1012.0"
    assert await theirs.act("search", "<q> Desk Lamps") == first + lamps
    second = f"{INSTRUCTION} [SEP] Back to Search [SEP] Page 2 (Total results: 3) [SEP] < Prev [SEP] Next > [SEP] "
    assert await theirs.click("Next >") == f"{second}B000000004 [SEP] Acme Oak Lamp B000000004 [SEP] $100.0"
    assert await theirs.click("next >") == second.replace("Page 2", "Page 3").removesuffix(" [SEP] ")
    await theirs.click("< Prev")
    assert await theirs.click("< Prev") == first + lamps
    back = f"{INSTRUCTION} [SEP] Back to Search [SEP] < Prev [SEP] "
    page = await theirs.click("b000000001")
    assert page == (
        f"{back}color [SEP] navy | white [SEP] black [SEP] Acme Oak Lamp B000000001 [SEP] Price: $19.99 [SEP] "
        "Rating: N.A. [SEP] Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
    )
    assert await theirs.click("Navy | White") == page
    assert await theirs.click("Description") == f"{back}A lamp for the desk."
    assert await theirs.click("Buy Now") == f"{back}A lamp for the desk."
    assert await theirs.click("< Prev") == page
    assert await theirs.click("Features") == f"{back}Made of oak [SEP] Bright"
    await theirs.click("< Prev")
    assert await theirs.click("Reviews") == back.removesuffix(" [SEP] ")
    assert await theirs.click("Attributes") == back.removesuffix(" [SEP] ")
    assert await theirs.click("Back to Search") == f"WebShop [SEP] {INSTRUCTION} [SEP] Search"


async def test_a_purchase_ends_the_chain_and_is_judged(theirs: Shopper) -> None:
    await theirs.act("search", "chair")
    await theirs.click("B000000005")
    await theirs.click("s")
    page = await theirs.click("BUY NOW")
    assert page.startswith("Thank you for shopping with us! [SEP] asin [SEP] B000000005 [SEP] options [SEP] {'size'")
    assert page.endswith("Your score (min 0.0, max 1.0) [SEP] 1.0")
    assert theirs.info == {"price": 985.0, "nouns": load_tagger().name}
    parts = {"type": 1.0, "attributes": 1.0, "options": 1.0, "price": 1.0}
    assert theirs.environment.reward() == {"reward": 1.0, "success": 1.0, "bought": 1.0, **parts}


async def test_the_anchor_is_the_page_and_what_is_chosen(theirs: Shopper) -> None:
    """The page does not show the chosen options."""

    async def anchors(*targets: str) -> list[Any]:
        seen = []
        await theirs.act("search", "chair")
        for target in targets:
            await theirs.click(target)
            seen.append(json.dumps(theirs.environment.anchor()))
        return seen

    page, chosen, again, back = await anchors("B000000005", "s", "s", "< Prev")
    assert page != chosen == again
    assert (await anchors("B000000005", "m"))[0] == page
    assert (await anchors("B000000005", "m"))[1] not in (page, chosen)
    assert back not in (page, chosen)
    await theirs.click("B000000005")
    await theirs.click("Buy Now")
    assert theirs.environment.anchor() is None


async def test_what_was_chosen_is_forgotten_with_the_next_search_and_replaced_by_the_next(
    theirs: Shopper,
) -> None:
    for clicks in (["s", "< Prev", "B000000005"], ["s", "m"], ["s", "Back to Search"]):
        await theirs.act("search", "chair")
        await theirs.click("B000000005")
        for target in clicks:
            await theirs.click(target)
        if clicks[-1] == "Back to Search":
            await theirs.act("search", "chair")
            await theirs.click("B000000005")
        await theirs.click("Buy Now")
        assert theirs.environment.reward()["options"] == 0.0
        theirs.environment.reset(next(n for n in (0, 1) if "chair" in theirs.environment.reset(n)))


async def test_the_attributes_page_and_the_line_of_actions(tmp_path: Path) -> None:
    folder, shown = write_published_files(tmp_path / "data"), {"show_attributes": True, "show_actions": True}
    environment = WebShop(str(folder), cache=str(tmp_path / "cache"), **shown)
    assert environment.reset(0).endswith("Search\nClickable: search")
    shopper = Shopper(environment)
    await shopper.act("search", "chair")
    page = await shopper.click("B000000005")
    assert page.endswith(
        "[SEP] Reviews [SEP] Attributes [SEP] Buy Now\nClickable: back to search, < prev, description, features, "
        "reviews, attributes, buy now, s, m, red"
    )
    page = await shopper.click("Attributes")
    assert "[SEP] < Prev [SEP] stackable [SEP] fashion [SEP] chairs [SEP] Office\n" in page


async def test_a_perfect_shopper_gets_one_on_200_of_200_goals(catalogue: Path) -> None:
    environment = WebShop(cache=str(catalogue))
    shop = open_shop(ShopConfig(cache=catalogue))
    rewards = []
    for number in random.Random(0).sample(range(shop.goals), 200):
        environment.reset(number)
        await shop_perfectly(shop.goal(number), Shopper(environment).act)
        rewards.append(environment.reward()["reward"])
    assert rewards == [1.0] * 200


async def test_shoppers_beside_each_other(catalogue: Path) -> None:
    shop = open_shop(ShopConfig(cache=catalogue))
    async with tools_of("webshop", cache=str(catalogue)) as toolset:
        assert [spec.name for spec in toolset.specs] == ["search", "click"]

        async def run(number: int, perfect: bool) -> float:
            async with toolset.chain(f"chain-{number}-{perfect}", {"goal": number, "question": "unused"}) as session:

                async def act(tool: str, argument: str) -> str:
                    name = "keywords" if tool == "search" else "target"
                    result = await session.call(ToolCall("1", tool, {name: argument}))
                    return result.content

                await (shop_perfectly if perfect else shop_in_vain)(shop.goal(number), act)
                judged = await session.reward()
                return judged.reward

        perfect = await asyncio.gather(*(run(number, True) for number in range(40)))
        vain = await asyncio.gather(*(run(number, False) for number in range(40)))
    assert perfect == [1.0] * 40
    assert vain == [0.0] * 40


HOSTILE = [
    *(
        *("", " ", "\x00", "[SEP]", "click[buy now]", "buy now]", "a" * 10_000, "〈r〉", "🙂" * 500, "\ud800"),
        "' OR 1=1 --",
    ),
    *("<c> \ud800", "<r> \ud800", "<q> \x00", "<a> ' OR 1=1", "<c> " + "a" * 10_000),
    *("title:", "(a AND", '"', "NOT", "*", "^", "<c>", "<q>", "<a>", "<r> x", "<r>", "-1", "Next >", "buy  now", "％s"),
]


async def test_hostile_input_is_searched_or_does_nothing(catalogue: Path) -> None:
    environment = WebShop(cache=str(catalogue))
    environment.reset(3)
    shopper = Shopper(environment)
    rng = random.Random(1)
    for text in HOSTILE * 20:
        page = await shopper.act("search", text)
        assert page.startswith(("Instruction:", "WebShop"))
        for target in (rng.choice(HOSTILE), "B0001", rng.choice(HOSTILE), "Features", rng.choice(HOSTILE)):
            page = await shopper.click(target)
            assert page.startswith(("Instruction:", "WebShop"))
    assert environment.reward()["bought"] == 0.0


def test_tasks_are_rows_of_a_split(catalogue: Path) -> None:
    sizes = {split: len(list(webshop_tasks(split, cache=str(catalogue)))) for split in ("test", "eval", "train")}
    assert sizes == {"test": 500, "eval": 1000, "train": 2100}
    row = next(webshop_tasks("train", cache=str(catalogue)))
    assert row["goal"] == 1500
    environment = WebShop(cache=str(catalogue))
    assert row["instruction"] in environment.reset(**row)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "dev"}, "split: got 'dev'; fix: use one of test, eval, train"),
        ({"split": "test", "data": "/nowhere"}, "data: there is no folder /nowhere"),
        ({"split": "train", "products": 100}, "split: the shop has 300 human goals, all of them in the splits before"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str, catalogue: Path) -> None:
    with pytest.raises(SettingError, match=message):
        webshop_tasks(**options, cache=str(catalogue))


async def test_the_visit_on_the_page_is_what_the_shop_shows(catalogue: Path) -> None:
    page = (REPOSITORY / "docs" / "webshop.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith(("| **", "| the shop |"))]
    environment = WebShop(cache=str(catalogue))
    shown = environment.reset(25)
    shopper = Shopper(environment)
    for speaker, text in rows:
        if speaker != "the shop":
            shown = await shopper.act(speaker.strip("*"), text)
        elif text != "the same page":
            *parts, last = text.split("...")
            assert shown.endswith(last) or not last
            assert all(part.strip() in shown for part in parts)
    assert environment.reward()["reward"] == 1.0
