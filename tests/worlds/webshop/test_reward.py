"""The reward, case by case, computed manually from the published rules."""

from fractions import Fraction
from typing import Any

import msgspec
import pytest

from agentfactory.worlds.webshop.goals import NO_BOUND, Goal
from agentfactory.worlds.webshop.products import NO_ATTRIBUTES, Product
from agentfactory.worlds.webshop.reward import score

PRODUCT = Product(
    asin="B1",
    title="oak desk lamp",
    description="Gives light.",
    bullets=["Made of oak.", "Stands on a desk."],
    options={},
    attributes=["dimmable"],
    prices=[40.0],
    category="garden",
    query="desk lamps",
    product_category="Home › Lighting › Lamps",
)
GOAL = Goal(
    asin="B1",
    title="oak desk lamp",
    category="garden",
    query="desk lamps",
    product_category="Home › Lighting › Lamps",
    instruction="",
    attributes=["dimmable"],
    options=[],
    price_upper=50.0,
)
ALIEN = {"query": "chairs", "product_category": "Office › Seats › Chairs"}
"""A product that can resemble the goal's only by its title."""
OTHER = {"title": "w3", "query": "chairs"}
EIGHT, TEN, ELEVEN = (" ".join(f"w{number}" for number in range(count)) for count in (8, 10, 11))


def one(goal: str, product: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A goal and a product that share nothing but, possibly, their titles."""
    return {"title": goal}, {"title": product, **ALIEN}


# Every word of these titles counts as a noun. The attribute and the price fit, so the reward is the type's factor.
TYPES: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "the product itself": ({}, {}, 1),
    "same query, 1 of 4 nouns": ({"title": "a1 b1 c1 lamp"}, {"product_category": "x"}, 1),
    "same query, 1 of 8 nouns": ({"title": EIGHT}, {"title": "w3", "product_category": "x"}, 1),
    "two categories, 1 of 8 nouns": ({"title": EIGHT}, {"title": "w3", "query": "chairs"}, 1),
    "one category, 1 of 8 nouns": ({"title": EIGHT}, {**ALIEN, "title": "w3", "product_category": "Home › Seats"}, 0.5),
    "1 of 4 nouns": (*one("a1 b1 c1 lamp", "lamp"), 1),
    "1 of 5 nouns is no more than a fifth": (*one("a1 b1 c1 d1 lamp", "lamp"), 0.5),
    "1 of 10 nouns is no less than a tenth": (*one(TEN, "w3"), 0.5),
    "1 of 11 nouns": (*one(ELEVEN, "w3"), 0.1),
    "1 of 11 nouns, two categories": ({"title": ELEVEN}, {"title": "w3", "query": "chairs"}, 0.1),
    "no noun": (*one("lamp", "chair"), 0),
    "goal without nouns, two categories": ({"title": ""}, {"query": "chairs"}, 1),
    "goal without nouns, nothing shared": ({"title": ""}, ALIEN, 0.5),
    "product without nouns": ({}, {"title": ""}, 0),
    "a noun that the goal repeats counts once of 6": (*one("lamp lamp lamp lamp lamp desk", "lamp"), 0.5),
    "categories in another order": ({"title": EIGHT}, {**OTHER, "product_category": "Lamps › Home"}, 1),
    "one category twice": ({"title": EIGHT}, {"title": "w3", "query": "x", "product_category": "Home › Home"}, 0.5),
    "spaces around categories": ({"title": EIGHT}, {**OTHER, "product_category": "Home›  Lamps "}, 1),
    "no categories": ({"title": EIGHT, "product_category": ""}, {**OTHER, "product_category": ""}, 0.5),
}

# The goal's attributes, the product's, the number of matches. The type is 1 and the price fits.
ATTRIBUTES: dict[str, tuple[list[str], dict[str, Any], int]] = {
    "the same": (["dimmable"], {}, 1),
    "a plural: 2 x 13 / 27 = 96": (["essential oils"], {"attributes": ["essential oil"]}, 1),
    "other order": (["gluten free"], {"attributes": ["free gluten"]}, 1),
    "all words and more": (["gluten free"], {"attributes": ["vegan gluten free"]}, 1),
    "one of two words: 60": (["tea tree"], {"attributes": ["tea bag"]}, 0),
    "6 of 7 letters: 86": (["leather"], {"attributes": ["weather"]}, 1),
    "5 of 6 letters: 83": (["golden"], {"attributes": ["golder"]}, 0),
    "in the title": (["cordless"], {"title": "Cordless oak desk lamp"}, 1),
    "over two bullets": (["pure cotton"], {"bullets": ["Of pure", "cotton."]}, 1),
    "in the description": (["cordless"], {"description": "CORDLESS"}, 1),
    "the goal's capitals are kept": (["Cordless"], {"description": "cordless"}, 0),
    "no attributes known": (["dimmable"], {"attributes": NO_ATTRIBUTES}, 0),
    "letters above 127 are left out": (["crème"], {"attributes": ["crme"]}, 1),
    "one of two": (["dimmable", "cordless"], {}, 1),
}

# The goal's options, the chosen ones, the number of matches. Type, attribute and price fit.
OPTIONS: dict[str, tuple[Any, dict[str, str], int]] = {
    "the same": (["black"], {"color": "black"}, 1),
    "nothing chosen": (["black"], {}, 0),
    "a colour within a colour": (["navy blue"], {"color": "blue"}, 1),
    "blue comes before light": (["light blue"], {"color": "sky blue"}, 1),
    "dark comes before green": (["dark green"], {"color": "green"}, 0),
    "dark grey and dark red are both dark": (["dark grey"], {"color": "dark red"}, 1),
    "tan within titanium": (["titanium"], {"color": "tan"}, 1),
    "grey and gray are two colours": (["grey"], {"color": "gray"}, 0),
    "a code before the colour": (["wine"], {"color": "b2-wine"}, 1),
    "two colours in one": (["red | blue"], {"color": "blue"}, 1),
    "all words of large are in x-large": (["large"], {"size": "x-large"}, 1),
    "another size": (["large"], {"size": "medium"}, 0),
    "9 of 10 characters: 95": (["pack of 12"], {"size": "pack of 1"}, 1),
    "one of two": (["black", "large"], {"color": "black"}, 1),
    "one choice for two options": (["black", "black"], {"color": "black"}, 2),
    "more than asked": (["black"], {"color": "black", "size": "large"}, 1),
    "none asked": ([], {"color": "black"}, 0),
    "name and value, another size: 83": ({"size": "large"}, {"size": "x-large"}, 0),
    "name and value, a colour": ({"color": "blue"}, {"color": "navy blue"}, 1),
    "name and value, a colour within": ({"color": "navy blue"}, {"color": "blue"}, 1),
    "name and value, a part of a word is no colour": ({"color": "titanium"}, {"color": "tan"}, 0),
}

# Price, bound, whether it fits.
PRICES = [(49.99, 50.0, 1), (50.0, 50.0, 1), (50.01, 50.0, 0), (5000.0, NO_BOUND, 1), (0.0, 10.0, 1)]

RED = {"color": "red"}
# Changes of the goal, of the product, price, chosen options, reward.
TOGETHER: list[tuple[dict[str, Any], dict[str, Any], float, dict[str, str], Fraction]] = [
    # 1 x (1 of 2 attributes + 1 of 2 options + 0) / 5
    ({"attributes": ["dimmable", "x"], "options": ["red", "9"]}, {}, 60.0, {"color": "red"}, Fraction(2, 5)),
    # 0.5 x (1 + 0 of 1 + 1) / 3
    ({"title": EIGHT, "options": ["red"]}, {"title": "w3", **ALIEN}, 40.0, {}, Fraction(1, 3)),
    # 0.1 x (0 of 1 + 1 of 1 + 0) / 3
    ({"title": ELEVEN, "attributes": ["x"], "options": ["red"]}, {"title": "w3"}, 60.0, RED, Fraction(1, 30)),
    # 0 x (1 + 1 + 1) / 3
    ({"title": "lamp", "options": ["red"]}, {"title": "chair"}, 40.0, {"color": "red"}, Fraction(0)),
    # 1 x (3 + 2 + 1) / 6
    (
        {"attributes": ["dimmable", "oak", "light"], "options": ["red", "9"]},
        {},
        40.0,
        {**RED, "size": "9"},
        Fraction(1),
    ),
]


def reward(
    goal: dict[str, Any], product: dict[str, Any], price: float = 40.0, chosen: dict[str, str] | None = None
) -> float:
    asked, bought = msgspec.structs.replace(GOAL, **goal), msgspec.structs.replace(PRODUCT, **product)
    return score(asked, bought, price, chosen or {}, str.split).reward


@pytest.mark.parametrize("case", TYPES)
def test_type(case: str) -> None:
    goal, product, factor = TYPES[case]
    assert reward(goal, product) == pytest.approx(factor)


@pytest.mark.parametrize("case", ATTRIBUTES)
def test_attributes(case: str) -> None:
    wanted, product, found = ATTRIBUTES[case]
    assert reward({"attributes": wanted}, product) == pytest.approx((found + 1) / (len(wanted) + 1))


@pytest.mark.parametrize("case", OPTIONS)
def test_options(case: str) -> None:
    wanted, chosen, found = OPTIONS[case]
    assert reward({"options": wanted}, {}, chosen=chosen) == pytest.approx((1 + found + 1) / (1 + len(wanted) + 1))


@pytest.mark.parametrize(("price", "bound", "fits"), PRICES)
def test_price(price: float, bound: float, fits: int) -> None:
    assert reward({"price_upper": bound}, {}, price) == (1 + fits) / 2


@pytest.mark.parametrize("case", range(len(TOGETHER)))
def test_all_parts_together(case: int) -> None:
    goal, product, price, chosen, expected = TOGETHER[case]
    assert reward(goal, product, price, chosen) == pytest.approx(float(expected))


def test_the_parts_are_told() -> None:
    asked = msgspec.structs.replace(GOAL, attributes=["dimmable", "x"], options=["red", "9"])
    judged = score(asked, PRODUCT, 60.0, {"color": "red"}, str.split)
    assert (judged.type, judged.attributes, judged.options, judged.price) == (1.0, 0.5, 0.5, 0.0)
