"""`Shop`: products, goals and search index of one data set, on disk; built once, then opened by any process."""

import fcntl
import hashlib
import json
import logging
import os
import random
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from agentfactory.tools.disk import writing
from agentfactory.tools.errors import SettingError
from agentfactory.tools.search.local_index import LocalIndex, build_index
from agentfactory.tools.search.passage import Passage
from agentfactory.tools.webshop.catalogue import write_catalogue
from agentfactory.tools.webshop.goals import Goal, GoalKind, human_goals, shuffled, synthetic_goals
from agentfactory.tools.webshop.nouns import load_tagger
from agentfactory.tools.webshop.products import DataFiles, Product, draw_price, read_entries, read_products

HITS = 50
"""Products that a search finds at most."""
_FORMAT = 1
_DATABASE = "shop.sqlite"
_INDEX = "index"
_REMEMBERED = 4096
"""Products, searches and goals that a process keeps in memory, a few kilobytes each."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShopConfig:
    """What a shop is made of."""

    data: Path | None = None
    """Folder of WebShop's data files, or its file items_shuffle*.json; None: our own catalogue."""
    goals: GoalKind = GoalKind.HUMAN
    seed: int = 0
    """Of the prices that are given as a range, and of the goals' price bounds."""
    products: int | None = None
    """Number of products from the start of the file; None: all."""
    cache: Path | None = None
    """Folder in which shops are kept; None: agentfactory/webshop in the user's cache folder."""


_shops: dict[ShopConfig, "Shop"] = {}
_opening = threading.Lock()


def open_shop(config: ShopConfig) -> "Shop":
    """Open the shop of `config`, which is built first if it is not in the cache. A process has one object per shop.

    Building takes seconds for a thousand products and up to an hour for the 1.18 million. A build that was killed goes
    on where its index was; a second process waits for the first.

    Raises:
        SettingError: a data file is missing or cannot be read.
        DiskError: the disk is full.
    """
    with _opening:
        if config not in _shops:
            _shops[config] = Shop(_built(config))
        return _shops[config]


class Shop:
    """Products, prices, goals and search, read from disk as they are needed. All methods are thread-safe."""

    def __init__(self, folder: Path) -> None:
        # immutable: nothing writes it after the build, so sqlite needs no locks
        address = f"{(folder / _DATABASE).absolute().as_uri()}?immutable=1"
        self._database = sqlite3.connect(address, uri=True, check_same_thread=False)
        self._lock = threading.Lock()
        self._index = LocalIndex(folder / _INDEX)
        self.nouns = load_tagger()
        self.products: int = self._select("SELECT COUNT(*) FROM products")[0][0]
        self.goals: int = self._select("SELECT COUNT(*) FROM places")[0][0]
        self.product = lru_cache(_REMEMBERED)(self._product)
        self.search = lru_cache(_REMEMBERED)(self._search)
        self.goal = lru_cache(_REMEMBERED)(self._goal)

    def price(self, asin: str) -> float:
        """Return a product's price in dollars."""
        return self._select("SELECT price FROM products WHERE asin = ?", asin)[0][0]

    def _product(self, asin: str) -> Product:
        """Return the product. Raises KeyError if there is none."""
        found = self._select("SELECT product FROM products WHERE asin = ?", asin)
        if not found:
            raise KeyError(asin)
        return msgspec.json.decode(found[0][0], type=Product)

    def _goal(self, number: int) -> Goal:
        """Return a goal by its number in the published order. Raises IndexError if there is none."""
        found = self._select("SELECT goal FROM places JOIN goals USING (made) WHERE number = ?", number)
        if not found:
            raise IndexError(number)
        return msgspec.json.decode(found[0][0], type=Goal)

    def _search(self, keywords: str) -> tuple[str, ...]:
        """Return the asins of the products that `keywords` find, the best first, at most 50.

        `<c> WORD`, `<q> WORDS` and `<a> WORDS` find all products of a category, a query or an attribute instead, in the
        shop's order, and `<r>` 50 products at random.
        """
        first, *others = keywords.split(" ")
        words = " ".join(others).strip()
        match first:
            case "<r>":
                numbers = random.Random(keywords).sample(range(self.products), min(HITS, self.products))
                found = [self._select("SELECT asin FROM products WHERE number = ?", number)[0] for number in numbers]
            case "<c>":
                category = others[0].strip() if others else ""
                found = self._select("SELECT asin FROM products WHERE category = ? ORDER BY number", category)
            case "<q>":
                found = self._select("SELECT asin FROM products WHERE query = ? ORDER BY number", words)
            case "<a>":
                joined = "attributes JOIN products USING (number)"
                found = self._select(f"SELECT asin FROM {joined} WHERE attribute = ? ORDER BY number", words)
            case _:
                return tuple(passage.id for passage in self._index.search(keywords, HITS))
        return tuple(asin for (asin,) in found)

    def _select(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._database.execute(statement, values).fetchall()


def _built(config: ShopConfig) -> Path:
    """Return the folder of a shop, after building it if need be."""
    home = config.cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentfactory" / "webshop"
    with writing(home):
        home.mkdir(parents=True, exist_ok=True)
    files = DataFiles.find(config.data or _catalogue(home))
    made_of = {
        "format": _FORMAT,
        "files": [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in files],
        "goals": config.goals,
        "seed": config.seed,
        "products": config.products,
    }
    key = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:16]
    folder = home / key
    if not folder.exists():
        with _locked(home / f"{key}.lock"):
            if not folder.exists():
                _build(files, config, folder)
    return folder


def _catalogue(home: Path) -> Path:
    folder = home / "catalogue"
    if not folder.exists():
        with _locked(home / "catalogue.lock"):
            if not folder.exists():
                write_catalogue(folder)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(files: DataFiles, config: ShopConfig, folder: Path) -> None:
    """Build database and index in a folder beside `folder`, and rename it."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    unfinished.mkdir(exist_ok=True)
    database = unfinished / _DATABASE
    with writing(unfinished):
        if not database.exists():
            logger.info("webshop: reading %s", files.items)
            aside = unfinished / f"{_DATABASE}.new"
            aside.unlink(missing_ok=True)
            with closing(sqlite3.connect(aside)) as connection:
                _fill(connection, files, config)
            aside.rename(database)
        if not (unfinished / _INDEX).exists():
            with closing(sqlite3.connect(database)) as connection:
                build_index(_passages(connection), unfinished / _INDEX, folder.name, progress=_report)
        unfinished.rename(folder)


def _report(done: int) -> None:
    if done % 100_000 == 0:
        logger.info("webshop: %s products are in the index", f"{done:,}")


def _fill(connection: sqlite3.Connection, files: DataFiles, config: ShopConfig) -> None:
    # the file is thrown away if the build is killed, so no journal is needed
    connection.executescript(
        """
        PRAGMA journal_mode = OFF;
        CREATE TABLE entries (asin TEXT PRIMARY KEY, entry BLOB) WITHOUT ROWID;
        CREATE TABLE products
            (number INTEGER PRIMARY KEY, asin TEXT UNIQUE, category TEXT, query TEXT, price REAL, product BLOB);
        CREATE TABLE attributes (attribute TEXT, number INTEGER);
        CREATE TABLE goals (made INTEGER PRIMARY KEY, goal BLOB);
        CREATE TABLE places (number INTEGER PRIMARY KEY, made INTEGER);
        """
    )
    rng = random.Random(config.seed)
    encode = msgspec.json.encode

    def entry(asin: str) -> dict[str, Any] | None:
        found = connection.execute("SELECT entry FROM entries WHERE asin = ?", (asin,)).fetchone()
        return None if found is None else msgspec.json.decode(found[0])

    entries = ((asin, encode(value)) for asin, value in read_entries(files.attributes))
    connection.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?)", entries)
    products = read_products(files.items, lambda asin: (entry(asin) or {}).get("attributes"), config.products)
    for number, product in enumerate(products):
        price = draw_price(product, rng)
        row = (number, product.asin, product.category, product.query, price, encode(product))
        connection.execute("INSERT INTO products VALUES (?, ?, ?, ?, ?, ?)", row)
        named = ((attribute, number) for attribute in product.attributes)
        connection.executemany("INSERT INTO attributes VALUES (?, ?)", named)
    # bounds are drawn after all prices, in the order of products, as published
    made = enumerate(_goals(connection, files, config, entry, rng))
    connection.executemany("INSERT INTO goals VALUES (?, ?)", ((number, encode(goal)) for number, goal in made))
    count = connection.execute("SELECT COUNT(*) FROM goals").fetchone()[0]
    if count == 0:
        raise SettingError("goals", f"no {config.goals} instruction is for a product of {files.items}", _FIX)
    connection.executemany("INSERT INTO places VALUES (?, ?)", enumerate(shuffled(count)))
    connection.executescript(
        """
        DROP TABLE entries;
        CREATE INDEX by_category ON products (category);
        CREATE INDEX by_query ON products (query);
        CREATE INDEX by_attribute ON attributes (attribute);
        """
    )
    connection.commit()


_FIX = "set `goals` to the other kind, human or synthetic, or take more products"


def _goals(
    connection: sqlite3.Connection, files: DataFiles, config: ShopConfig, entry: Any, rng: random.Random
) -> Iterator[Goal]:
    instructions = dict(read_entries(files.instructions)) if config.goals is GoalKind.HUMAN else {}
    for price, encoded in connection.execute("SELECT price, product FROM products ORDER BY number"):
        product = msgspec.json.decode(encoded, type=Product)
        try:
            if config.goals is GoalKind.HUMAN:
                yield from human_goals(product, price, instructions.get(product.asin, []), rng)
            else:
                yield from synthetic_goals(product, price, entry(product.asin) or {}, rng)
        except (KeyError, TypeError, AttributeError) as error:  # a file of another format
            file = files.instructions if config.goals is GoalKind.HUMAN else files.attributes
            problem = f"the instructions of {product.asin} in {file} cannot be read: {type(error).__name__}: {error}"
            raise SettingError("data", problem, "correct the file, or download it again") from error


def _passages(connection: sqlite3.Connection) -> Iterator[Passage]:
    for asin, encoded in connection.execute("SELECT asin, product FROM products ORDER BY number"):
        yield Passage(asin, msgspec.json.decode(encoded, type=Product).index_text)
