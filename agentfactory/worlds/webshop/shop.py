"""`Shop`: the products, goals and search index of a data set, built once on disk and opened by any process."""

import hashlib
import json
import logging
import os
import random
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from agentfactory.base.errors import SettingError
from agentfactory.base.files.disk import writing
from agentfactory.base.files.lock_file import open_lock
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.worlds.search.local_index import LocalIndex, build_index
from agentfactory.worlds.search.passage import Passage, encodable
from agentfactory.worlds.shared import locked
from agentfactory.worlds.webshop.catalogue import write_catalogue
from agentfactory.worlds.webshop.goals import Goal, GoalKind, human_goals, shuffled, synthetic_goals
from agentfactory.worlds.webshop.nouns import load_tagger
from agentfactory.worlds.webshop.products import (
    DataFiles,
    Instruction,
    Listing,
    Product,
    draw_price,
    read_entries,
    read_products,
)

HITS = 50
_FORMAT = 1
_DATABASE = "shop.sqlite"
_INDEX = "index"
_REMEMBERED = 4096
"""Maximum products, searches and goals in each of a process's caches, a few kilobytes per entry."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ShopConfig:
    """The settings that determine a shop."""

    data: Path | None = None
    """Folder of WebShop's data files, or the file items_shuffle*.json in it; None: our own catalogue."""
    goals: GoalKind = GoalKind.HUMAN
    seed: int = 0
    """Seed of prices given as a range, and of the goals' price bounds."""
    products: int | None = None
    """Number of products from the start of the file; None: all."""
    cache: Path | None = None
    """Folder of built shops; None: agentfactory/webshop in the user's cache folder."""


_shops: dict[ShopConfig, "Shop"] = {}
_opening = threading.Lock()


def open_shop(config: ShopConfig) -> "Shop":
    """Open the shop of `config`, building it first if it is not in the cache. A process has one object per shop. A
    build takes seconds for a thousand products and up to an hour for all 1.18 million. A killed build resumes its
    index; a second process waits for the first. Raises SettingError (a data file is missing or cannot be read, or the
    cache cannot be written or read), DiskError (the disk is full)."""
    with _opening:
        if config not in _shops:
            folder = _built(config)
            try:
                _shops[config] = Shop(folder)
            except ToolInfrastructureError as error:
                raise SettingError("cache", str(error)) from error
        return _shops[config]


class Shop:
    """A shop's products, prices, goals and search, read from disk on demand. All methods are thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        with self._reading():
            # immutable: nothing writes to it after the build, so SQLite needs no locks
            address = f"{(folder / _DATABASE).absolute().as_uri()}?immutable=1"
            self._database = sqlite3.connect(address, uri=True, check_same_thread=False)
            self._index = LocalIndex(folder / _INDEX)
        self.nouns = load_tagger()
        self.products: int = self._select("SELECT COUNT(*) FROM products")[0][0]
        self.goals: int = self._select("SELECT COUNT(*) FROM places")[0][0]
        self.product = lru_cache(_REMEMBERED)(self._product)
        self.search = lru_cache(_REMEMBERED)(self._search)
        self.total = lru_cache(_REMEMBERED)(self._total)
        self._hits = lru_cache(_REMEMBERED)(self._find)
        self.goal = lru_cache(_REMEMBERED)(self._goal)

    def price(self, asin: str) -> float:
        """Return a product's price in dollars."""
        return self._select("SELECT price FROM products WHERE asin = ?", asin)[0][0]

    def _product(self, asin: str) -> Product:
        found = self._select("SELECT product FROM products WHERE asin = ?", asin)
        if not found:
            raise KeyError(asin)
        return msgspec.json.decode(found[0][0], type=Product)

    def _goal(self, number: int) -> Goal:
        found = self._select("SELECT goal FROM places JOIN goals USING (made) WHERE number = ?", number)
        if not found:
            raise IndexError(number)
        return msgspec.json.decode(found[0][0], type=Goal)

    def _search(self, keywords: str, start: int = 0, count: int = HITS) -> tuple[str, ...]:
        if (listed := _listed(keywords)) is None:
            return self._hits(keywords)[start : start + count]
        statement = f"SELECT asin FROM products WHERE {listed[0]} ORDER BY number LIMIT ? OFFSET ?"
        return tuple(asin for (asin,) in self._select(statement, listed[1], count, start))

    def _total(self, keywords: str) -> int:
        if (listed := _listed(keywords)) is None:
            return len(self._hits(keywords))
        return self._select(f"SELECT COUNT(*) FROM products WHERE {listed[0]}", listed[1])[0][0]

    def _find(self, keywords: str) -> tuple[str, ...]:
        if keywords.split(" ")[0] != "<r>":
            with self._reading():
                return tuple(passage.id for passage in self._index.search(keywords, HITS))
        numbers = random.Random(encodable(keywords)).sample(range(self.products), min(HITS, self.products))
        select = "SELECT asin FROM products WHERE number = ?"
        return tuple(self._select(select, number)[0][0] for number in numbers)

    def _select(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock, self._reading():
            return self._database.execute(statement, values).fetchall()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, ValueError, OSError) as error:
            fix = "remove this folder, and the shop is built again"
            told = error.without_fix if isinstance(error, SettingError) else error
            raise ToolInfrastructureError(f"the shop in {self._folder} cannot be read: {told}; fix: {fix}") from error


_CONDITIONS = {
    "<c>": "category = ?",
    "<q>": "query = ?",
    "<a>": "number IN (SELECT number FROM attributes WHERE attribute = ?)",
}


def _listed(keywords: str) -> tuple[str, str] | None:
    """Return the SQL condition and value of a `<c>`, `<q>` or `<a>` search; None for any other search."""
    first, *others = encodable(keywords).split(" ")
    if first not in _CONDITIONS:
        return None
    return _CONDITIONS[first], " ".join(others[:1] if first == "<c>" else others).strip()


def _built(config: ShopConfig) -> Path:
    home = config.cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentfactory" / "webshop"
    with _making(home):
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
                with writing(folder):
                    write_catalogue(folder)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with _making(path):
        opened = open_lock(path)
    with locked(opened):
        yield


@contextmanager
def _making(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SettingError(
            "cache", f"{path} cannot be made: {error.strerror}", "name a folder that can be written"
        ) from error


def _build(files: DataFiles, config: ShopConfig, folder: Path) -> None:
    """Build database and index in a folder next to `folder`, then rename it to `folder`."""
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
    # the file is discarded if the build is killed, so it needs no journal
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

    def listing(asin: str) -> Listing:
        found = connection.execute("SELECT entry FROM entries WHERE asin = ?", (asin,)).fetchone()
        return Listing() if found is None else msgspec.json.decode(found[0], type=Listing)

    entries = ((asin, encode(value)) for asin, value in read_entries(files.attributes, Listing))
    connection.executemany("INSERT OR REPLACE INTO entries VALUES (?, ?)", entries)
    products = read_products(files.items, lambda asin: listing(asin).attributes, config.products)
    for number, product in enumerate(products):
        price = draw_price(product, rng)
        row = (number, product.asin, product.category, product.query, price, encode(product))
        connection.execute("INSERT INTO products VALUES (?, ?, ?, ?, ?, ?)", row)
        named = ((attribute, number) for attribute in product.attributes)
        connection.executemany("INSERT INTO attributes VALUES (?, ?)", named)
    # as published, bounds are drawn after all prices, in product order
    made = enumerate(_goals(connection, files, config, listing, rng))
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
        CREATE INDEX by_attribute ON attributes (attribute, number);
        """
    )
    connection.commit()


_FIX = "set `goals` to the other kind, human or synthetic, or take more products"


def _goals(
    connection: sqlite3.Connection,
    files: DataFiles,
    config: ShopConfig,
    listing: Callable[[str], Listing],
    rng: random.Random,
) -> Iterator[Goal]:
    human = config.goals is GoalKind.HUMAN
    instructions = dict(read_entries(files.instructions, list[Instruction])) if human else {}
    for price, encoded in connection.execute("SELECT price, product FROM products ORDER BY number"):
        product = msgspec.json.decode(encoded, type=Product)
        if human:
            yield from human_goals(product, price, instructions.get(product.asin, []), rng)
        else:
            yield from synthetic_goals(product, price, listing(product.asin), rng)


def _passages(connection: sqlite3.Connection) -> Iterator[Passage]:
    for asin, encoded in connection.execute("SELECT asin, product FROM products ORDER BY number"):
        yield Passage(asin, msgspec.json.decode(encoded, type=Product).index_text)
