"""WebShop's goals, each a purchase to make, with random price bounds, in the published shuffled order and splits."""

import itertools
import random
from collections.abc import Iterator
from enum import StrEnum

import msgspec

from agentfactory.base.errors import SettingError
from agentfactory.worlds.webshop.products import Instruction, Listing, Product

NO_BOUND = 1_000_000.0
"""The bound of a goal whose product is too expensive for a real one."""
_BOUNDS = [10.0 * number for number in range(1, 100)]


class GoalKind(StrEnum):
    HUMAN = "human"
    """Human-written instructions: items_human_ins.json."""
    SYNTHETIC = "synthetic"
    """One instruction per product, with each combination of its options: items_ins_v2.json."""


class Split(StrEnum):
    """The part of the shuffled goals that a task comes from."""

    TEST = "test"
    EVAL = "eval"
    TRAIN = "train"

    def numbers(self, goals: int) -> range:
        """Return the numbers of the split's goals out of `goals` in total: 0-499, 500-1499 and the rest."""
        start, end = {Split.TEST: (0, 500), Split.EVAL: (500, 1500), Split.TRAIN: (1500, goals)}[self]
        return range(min(start, goals), min(end, goals))


class Goal(msgspec.Struct, frozen=True):
    """A purchase to make, and the data to judge it."""

    asin: str
    title: str
    category: str
    query: str
    product_category: str
    instruction: str
    """The instruction shown to the shopper, including the price bound."""
    attributes: list[str]
    options: list[str] | dict[str, str]
    """Human goals: values. Synthetic goals: name -> value."""
    price_upper: float


def human_goals(product: Product, price: float, instructions: list[Instruction], rng: random.Random) -> Iterator[Goal]:
    """Yield a goal for each of the product's human-written instructions that requests an attribute."""
    for entry in instructions:
        if entry.instruction_attributes:
            bound, words = _draw_bound(price, rng)
            text = entry.instruction.strip(".") + words
            yield _goal(product, text, entry.instruction_attributes, entry.instruction_options, bound)


def synthetic_goals(product: Product, price: float, listing: Listing, rng: random.Random) -> Iterator[Goal]:
    """Yield a goal for each combination of the product's options; all have the same price bound."""
    if listing.instruction is None:
        return
    attributes = listing.instruction_attributes
    if not attributes:
        problem = f"the instruction of {product.asin} in items_ins_v2 requests no attribute"
        raise SettingError("data", problem, "download it again")
    bound, words = _draw_bound(price, rng)
    names = sorted(product.options)
    for values in itertools.product(*(product.options[name] for name in names)):
        options = dict(zip(names, values, strict=True))
        chosen = ", and ".join(f"{name}: {value}" for name, value in options.items())
        text = f"{listing.instruction} with {chosen}{words}" if chosen else f"{listing.instruction}{words}"
        yield _goal(product, text, attributes, options, bound)


def _draw_bound(price: float, rng: random.Random) -> tuple[float, str]:
    """Draw a bound, the larger of two of the next four multiples of 10 above the price; return it and its words."""
    above = [bound for bound in _BOUNDS if bound > price][:4]
    if len(above) < 2:
        return NO_BOUND, ""
    bound = max(rng.sample(above, 2))
    return bound, f", and price lower than {bound:.2f} dollars"


def _goal(
    product: Product, instruction: str, attributes: list[str], options: list[str] | dict[str, str], bound: float
) -> Goal:
    return Goal(
        product.asin,
        product.title,
        product.category,
        product.query,
        product.product_category,
        instruction,
        attributes,
        options,
        bound,
    )


def shuffled(count: int) -> list[int]:
    """Return the published numbering of `count` goals: goal n was created as number `shuffled(count)[n]`."""
    order = list(range(count))
    random.Random(233).shuffle(order)
    return order
