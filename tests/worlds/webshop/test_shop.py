"""A shop from the published data files: derived fields, prices, goals, their order and splits, and the search."""

import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.worlds.webshop import shop as shop_module
from agentfactory.worlds.webshop.catalogue import write_catalogue
from agentfactory.worlds.webshop.goals import NO_BOUND, GoalKind, Split, shuffled
from agentfactory.worlds.webshop.products import DataFiles, read_products
from agentfactory.worlds.webshop.shop import Shop, ShopConfig, open_shop
from tests.worlds.webshop.published_files import ITEMS, item, write_published_files


def make_shop(folder: Path, **changes: Any) -> Shop:
    return open_shop(ShopConfig(write_published_files(folder / "data"), cache=folder / "cache", **changes))


def test_products_are_read_as_published(tmp_path: Path) -> None:
    files = DataFiles.find(write_published_files(tmp_path))
    one, two, four, five = read_products(files.items, {"B000000001": ["dimmable"]}.get)
    assert one.title == "Acme Oak Lamp B000000001"
    assert one.options == {"color": ["navy | white", "black"]}
    assert one.attributes == ["dimmable"]
    assert (one.query, one.price_tag) == ("desk lamps", "$19.99")
    assert two.attributes == ["DUMMY_ATTR"]
    assert (two.prices, two.price_tag, two.bullets) == ([9.5, 1012.0], "$9.5 to $1012.0", ["One text"])
    assert (four.prices, four.price_tag, four.description, four.options) == ([100.0], "$100.0", "", {})
    assert five.options == {"size": ["s", "m"], "color": ["red"]}


def test_the_index_text_is_the_published_one(tmp_path: Path) -> None:
    one, _, four, five = read_products(DataFiles.find(write_published_files(tmp_path)).items, lambda asin: None)
    assert one.index_text == "acme oak lamp b000000001 a lamp for the desk. made of oak color: navy | white, black"
    assert four.index_text == "acme oak lamp b000000004  "
    assert five.index_text.endswith("made of oak size: s, m, and color: red")


def test_prices_and_bounds_are_drawn_in_the_published_order(tmp_path: Path) -> None:
    """With the published code's seed: first prices given as ranges, then a bound per goal."""
    shop = make_shop(tmp_path, seed=7)
    rng = random.Random(7)
    assert shop.price("B000000002") == rng.uniform(9.5, 1012.0)
    assert shop.price("B000000004") == 100.0
    lamp, chair = sorted((shop.goal(number) for number in range(shop.goals)), key=lambda goal: goal.asin)
    bound = max(rng.sample([20.0, 30.0, 40.0, 50.0], 2))
    assert lamp.price_upper == bound
    assert lamp.instruction == f"i need a dimmable lamp in navy, and price lower than {bound:.2f} dollars"
    assert (lamp.attributes, lamp.options) == (["dimmable"], ["navy | white"])
    # only one multiple of 10 is above 985 dollars
    assert (chair.price_upper, chair.instruction) == (NO_BOUND, "a stackable chair")


def test_synthetic_goals_ask_for_each_combination(tmp_path: Path) -> None:
    shop = make_shop(tmp_path, goals=GoalKind.SYNTHETIC)
    goals = sorted((shop.goal(number) for number in range(shop.goals)), key=lambda goal: goal.instruction)
    lamps, chairs = [{"color": "black"}, {"color": "navy | white"}], [{"color": "red", "size": size} for size in "ms"]
    assert [goal.options for goal in goals] == [*lamps, *chairs]
    assert goals[0].instruction.startswith("Find me dimmable desk lamps with color: black, and price lower than ")
    assert goals[2].instruction == "Find me stackable chairs with color: red, and size: m"
    assert goals[0].price_upper == goals[1].price_upper


def test_goals_have_the_published_order_and_splits() -> None:
    goals = [f"goal {number}" for number in range(2000)]
    theirs = list(goals)
    random.seed(233)
    random.shuffle(theirs)
    assert [goals[made] for made in shuffled(2000)] == theirs
    splits = [Split(split).numbers(2000) for split in ("test", "eval", "train")]
    assert splits == [range(500), range(500, 1500), range(1500, 2000)]
    assert not Split.TRAIN.numbers(1500)
    assert Split.EVAL.numbers(700) == range(500, 700)


def test_a_search_finds_products_by_their_text_or_by_a_prefix(tmp_path: Path) -> None:
    assert make_shop(tmp_path, products=2).products == 2
    shop = make_shop(tmp_path)
    assert shop.products == 4
    assert shop.search("brass chair") == ("B000000005",)
    assert set(shop.search("lamp for a desk")) >= {"B000000001", "B000000002"}
    assert shop.search("") == shop.search("zebra") == ()
    assert shop.search("<c> fashion") == ("B000000005",)
    assert shop.search("<q> desk lamps") == ("B000000001", "B000000002", "B000000004")
    assert shop.search("<a> solid wood") == ("B000000002",)
    assert sorted(shop.search("<r>")) == ["B000000001", "B000000002", "B000000004", "B000000005"]
    assert shop.search("<c>") == shop.search("<q>") == shop.search("<a>") == ()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("items_shuffle", "[{", "items_shuffle.json is not JSON"),
        ("items_shuffle", json.dumps([item("B1"), {"asin": "B2"}]), "product 1 of .*KeyError: 'small_description'"),
        (
            "items_shuffle",
            json.dumps([item("B1", name=5)]),
            "product 0 of .*Expected `str`, got `int` - at `.\\.title`",
        ),
        ("items_shuffle", "{}", "items_shuffle.json has to start with \\[, and starts with b'{}'"),
        ("items_shuffle", "[]", "no human instruction is for a product"),
        ("items_ins_v2", '{"B1": {"attributes": "oak"}}', "'B1' of .*items_ins_v2.json .*Expected `array | null`"),
        ("items_human_ins", '{"B000000001": [{}]}', "'B000000001' of .*missing required field `instruction`"),
    ],
)
def test_a_broken_file_is_named(name: str, content: str, message: str, tmp_path: Path) -> None:
    folder = write_published_files(tmp_path / "data")
    (folder / f"{name}.json").write_bytes(content.encode("latin-1"))
    kind = GoalKind.SYNTHETIC if name == "items_ins_v2" else GoalKind.HUMAN
    with pytest.raises(SettingError, match=message):
        open_shop(ShopConfig(folder, kind, cache=tmp_path / "cache"))


def test_a_shop_is_built_once_and_again_when_its_files_change(tmp_path: Path) -> None:
    config = ShopConfig(write_published_files(tmp_path / "data"), cache=tmp_path / "cache")
    first = shop_module._built(config)
    made = (first / "shop.sqlite").stat().st_mtime_ns
    assert shop_module._built(config) == first
    assert (first / "shop.sqlite").stat().st_mtime_ns == made
    more = [*ITEMS, item("B000000006")]
    (tmp_path / "data" / "items_shuffle.json").write_text(json.dumps(more), encoding="utf-8")
    second = shop_module._built(config)
    assert second != first
    assert Shop(second).products == 5


@pytest.mark.processes
def test_processes_that_start_together_build_one_shop(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from agentfactory.worlds.webshop.shop import *;"
        "print(open_shop(ShopConfig(cache=Path(sys.argv[1]))).products)"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [process.communicate()[0] for process in started] == ["1200\n"] * 3
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 2  # the catalogue, and one shop


@pytest.mark.extended
def test_the_catalogue_is_the_same_everywhere(tmp_path: Path) -> None:
    write_catalogue(tmp_path / "catalogue")
    files = DataFiles.find(tmp_path / "catalogue")
    products = list(read_products(files.items, lambda asin: None))
    assert len(products) == 1200
    assert len({product.query for product in products}) == 20
    assert len({product.title for product in products}) == 1200
    assert {name for product in products for name in product.options} == {"color", "size", "scent", "flavor name"}
    instructions = json.loads(files.instructions.read_text(encoding="utf-8"))
    assert sum(len(entries) for entries in instructions.values()) == 3600
    # another digest means other tasks, whose results cannot be compared
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    assert digest == "cdf607db07ee581486921cabcc6d7d0aad9b95c869a6ef72e5f433be0f2382e4"
