"""WebShop's products, streamed from the published data files, with their derived fields."""

import random
import re
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import ijson
import msgspec

from agentfactory.base.errors import SettingError, short

NO_ATTRIBUTES = ["DUMMY_ATTR"]
"""The attributes of a product that the attributes file does not list."""
NO_PRICE = 100.0
"""Dollars, for a product without a price."""

T = TypeVar("T")


class Product(msgspec.Struct, frozen=True):
    """A product of the shop, as used by pages, index and reward."""

    asin: str
    """Amazon's identifier, at most ten characters."""
    title: str
    description: str
    bullets: list[str]
    options: dict[str, list[str]]
    """Name of an option, such as `color` -> values; all in lower case, with ` | ` for a slash."""
    attributes: list[str]
    prices: list[float]
    """One price in dollars, or the lower and upper end of a range."""
    category: str
    query: str
    """The search query with which the product was scraped, in lower case."""
    product_category: str
    """Path of categories, such as `Beauty › Skin Care › Face`."""

    @property
    def price_tag(self) -> str:
        return " to ".join(f"${price}" for price in self.prices)

    @property
    def index_text(self) -> str:
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        return " ".join([self.title, self.description, *self.bullets[:1], options]).lower()


class DataFiles(NamedTuple):
    """The files of one WebShop data set, as its project publishes them."""

    items: Path
    """items_shuffle.json, or items_shuffle_1000.json: a list of products."""
    attributes: Path
    """items_ins_v2.json, or items_ins_v2_1000.json: asin -> attributes, and optionally a synthetic instruction."""
    instructions: Path
    """items_human_ins.json: asin -> human-written instructions."""

    @classmethod
    def find(cls, data: Path) -> "DataFiles":
        """Find the data files; `data` is their folder, or the file items_shuffle*.json in it. Raises SettingError if a
        file is missing, or if the folder has several such files."""
        if not data.exists():
            raise SettingError("data", f"there is no folder {data.resolve()}", DOWNLOAD)
        items = data
        if data.is_dir():
            found = sorted(data.glob("items_shuffle*.json"))
            if len(found) > 1:
                problem = f"{data} has {' and '.join(path.name for path in found)}"
                raise SettingError("data", problem, f"name one of the files, such as {found[0]}")
            items = found[0] if found else data / "items_shuffle.json"
        suffix = items.stem.removeprefix("items_shuffle")
        files = cls(items, *(items.with_name(f"{name}.json") for name in (f"items_ins_v2{suffix}", "items_human_ins")))
        for path in files:
            if not path.is_file():
                raise SettingError("data", f"there is no file {path}", DOWNLOAD)
        return files


DOWNLOAD = (
    "download WebShop's data as setup.sh of https://github.com/princeton-nlp/WebShop does (items_shuffle, items_ins_v2 "
    "and items_human_ins; with _1000 in the name for the small set) and set `data` to their folder; null: the "
    "catalogue that comes with AgentFactory"
)


class Listing(msgspec.Struct, frozen=True, omit_defaults=True):
    attributes: list[str] | None = None
    instruction: str | None = None
    instruction_attributes: list[str] | None = None


class Instruction(msgspec.Struct, frozen=True):
    instruction: str
    instruction_attributes: list[str]
    instruction_options: list[str]


def read_products(
    path: Path, attributes_of: Callable[[str], list[str] | None], limit: int | None = None
) -> Iterator[Product]:
    """Stream the products of an items file in order; memory does not grow with the file. A product is skipped if its
    asin is `nan`, longer than ten characters or a repetition. `attributes_of` maps an asin to its attributes, or to
    None. `limit` counts skipped products, too. Raises SettingError with the number of a product that cannot be read."""
    seen: set[str] = set()
    for number, item in enumerate(read_items(path)):
        if number == limit:
            return
        try:
            asin = item["asin"]
            if asin != "nan" and len(asin) <= 10 and asin not in seen:
                seen.add(asin)
                attributes = attributes_of(asin)
                yield product_of(item, NO_ATTRIBUTES if attributes is None else attributes)
        except (KeyError, TypeError, ValueError, AttributeError) as error:  # the file has another format
            problem = f"product {number} of {path} cannot be read: {type(error).__name__}: {error}: {short(item)}"
            raise SettingError("data", problem, _FIX) from error


def read_items(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the elements of a JSON list. Raises SettingError if the file is not a JSON list."""
    yield from _parsed(path, b"[", lambda file: ijson.items(file, "item", use_float=True))


def read_entries(path: Path, kind: type[T]) -> Iterator[tuple[str, T]]:
    """Yield the keys and values of a JSON object, with values of type `kind`. Raises SettingError if the file is not a
    JSON object, or, with the key, if a value has another type."""
    for key, value in _parsed(path, b"{", lambda file: ijson.kvitems(file, "", use_float=True)):
        try:
            yield key, msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            raise SettingError("data", f"{short(key)} of {path} cannot be read: {error}", _FIX) from error


def _parsed(path: Path, opening: bytes, parse: Callable[[BufferedReader], Iterator[Any]]) -> Iterator[Any]:
    with path.open("rb") as file:
        start = file.peek().lstrip()
        if start and not start.startswith(opening):
            raise SettingError(
                "data", f"{path} has to start with {opening.decode()}, and starts with {short(start[:20])}", _FIX
            )
        try:
            yield from parse(file)
        except (ijson.JSONError, UnicodeDecodeError) as error:
            raise SettingError("data", f"{path} is not JSON: {error}", "download it again") from error


_FIX = "correct the file, or download it again"


def product_of(item: dict[str, Any], attributes: list[str]) -> Product:
    """Derive a product from an entry. Raises KeyError, TypeError, ValueError or AttributeError."""
    points = item["small_description"]
    derived = {
        "asin": item["asin"],
        "title": item["name"],
        "description": item["full_description"] or "",
        "bullets": [point or "" for point in (points if isinstance(points, list) else [points])],
        "options": _options(item["customization_options"] or {}),
        "attributes": attributes,
        "prices": _prices(item.get("pricing")),
        "category": item["category"] or "",
        "query": item["query"].lower().strip(),
        "product_category": item["product_category"] or "",
    }
    return msgspec.convert(derived, Product)


def _options(customization: dict[str, Any]) -> dict[str, list[str]]:
    return {
        name.lower(): [choice["value"].strip().replace("/", " | ").lower() for choice in choices]
        for name, choices in customization.items()
        if choices is not None
    }


def _prices(pricing: str | None) -> list[float]:
    """Return the first two prices of a text such as `$9.99 to $1,012.00`."""
    if not pricing:
        return [NO_PRICE]
    return [float(re.sub(r"[^\d.]", "", part)) for part in pricing.split("$")[1:]][:2]


def draw_price(product: Product, rng: random.Random) -> float:
    """Return the product's price in dollars, drawn uniformly if it is a range."""
    if not product.prices:
        return NO_PRICE
    return product.prices[0] if len(product.prices) == 1 else rng.uniform(*product.prices)
