"""WebShop's reward for a purchase, from the match of type, attributes, options and price. Pure functions.

reward = type x (attributes found + options found + price within the bound) / (attributes + options + 1)

As published (Yao et al., 2022, arXiv:2207.01206, section 3); edge cases follow their code of 2023.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rapidfuzz.fuzz import token_set_ratio
from rapidfuzz.utils import default_process

from agentfactory.worlds.webshop.goals import Goal
from agentfactory.worlds.webshop.products import Product

_NAMES = """
alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo
caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream crystal
dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather indigo ivory
ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor
mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand
sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut
wheat white wine yellow
"""
_BASE_COLOURS = tuple(_NAMES.split())
"""The base colours in the published order; the first match counts."""


def base_colour(option: str | tuple[str, str]) -> str | None:
    """Return the first base colour in the value, or among the elements of a (name, value) pair, or None."""
    return next((colour for colour in _BASE_COLOURS if colour in option), None)


_LATIN_1 = {code: None for code in range(128, 256)}


@dataclass(frozen=True)
class Score:
    reward: float
    type: float
    """1, 0.5, 0.1 or 0: the match between the product's type and the goal's."""
    attributes: float
    """The fraction of the goal's attributes that the product has."""
    options: float
    """The fraction of the goal's options that were chosen; 1 if it has none."""
    price: float
    """1 if the price is within the bound, else 0."""


def score(
    goal: Goal, product: Product, price: float, chosen: Mapping[str, str], nouns: Callable[[str], Sequence[str]]
) -> Score:
    """Score a purchase at `price` dollars with the options `chosen` (name -> value); `nouns` of a title."""
    kind = type_score(goal, product, nouns)
    attributes = sum(has_attribute(product, wanted) for wanted in goal.attributes)
    options = options_found(goal.options, chosen)
    affordable = price <= goal.price_upper
    wanted = len(goal.attributes) + len(goal.options) + 1
    return Score(
        kind * (attributes + options + affordable) / wanted,
        kind,
        attributes / len(goal.attributes),
        options / len(goal.options) if goal.options else 1.0,
        float(affordable),
    )


def type_score(goal: Goal, product: Product, nouns: Callable[[str], Sequence[str]]) -> float:
    """Return 1 if the product matches the goal by its query, by two categories, or by more than a fifth of the title's
    nouns; else 0.5. If less than a tenth of the nouns match, return 0.1; if none does, 0."""
    wanted = nouns(goal.title)
    # as published: distinct shared nouns, divided by all nouns including repetitions
    shared = len(set(wanted) & set(nouns(product.title))) / len(wanted) if wanted else 0.2
    if shared == 0:
        return 0.0
    if shared < 0.1:
        return 0.1
    categories = _categories(goal.product_category) & _categories(product.product_category)
    return 1.0 if product.query == goal.query or len(categories) >= 2 or shared > 0.2 else 0.5


def has_attribute(product: Product, wanted: str) -> bool:
    """Return whether a product attribute resembles `wanted`, or the title, bullet points or description contain it."""
    return (
        any(alike(attribute, wanted) for attribute in product.attributes)
        or wanted in product.title.lower()
        or wanted in " ".join(product.bullets).lower()
        or wanted in product.description.lower()
    )


def options_found(wanted: Sequence[str] | Mapping[str, str], chosen: Mapping[str, str]) -> int:
    """Count the wanted options that resemble a chosen value; colours by base colour, mappings with their names."""
    texts = [_comparable(option) for option in (wanted.items() if isinstance(wanted, Mapping) else wanted)]
    values = [_comparable(value) for value in chosen.values()]
    return sum(any(alike(value, text) for value in values) for text in texts)


def alike(one: str, other: str) -> bool:
    """Return whether two texts have nearly the same words in any order: thefuzz's token_set_ratio above 85."""
    return round(token_set_ratio(_processed(one), _processed(other))) > 85


def _processed(text: str) -> str:
    """Normalize `text` as thefuzz does: drop the characters 128 to 255, lower the case, replace signs by spaces."""
    return default_process(text.translate(_LATIN_1))


def _comparable(option: str | tuple[str, str]) -> str:
    return base_colour(option) or (option if isinstance(option, str) else " ".join(option))


def _categories(path: str) -> set[str]:
    return {part.strip() for part in path.split("›")}
