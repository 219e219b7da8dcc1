"""A generated catalogue in the format of WebShop's data files: 1,200 products of 20 kinds with 3,600 instructions.

It is reproducible from a seed on any machine. Titles and instructions are shorter than Amazon's; otherwise the files
have the published format and are read in the same way.
"""

import itertools
import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BRANDS = 8
"""Brands per kind. The pair of brand and attribute in a title is unique within a kind."""
_PER_KIND = 60
_BRAND_STARTS = "Al Bor Cal Dra El Fen Gar Hol Ist Jor Kel Lum Mar Nor Or Pel Quin Ras Sol Tav Ul Var Wel Yor Zan"
_BRAND_ENDS = "aro bek cora dell eno fa gan hem ixa jun lio mond nex ova ria sten tika vik wyn zu"
_OPENINGS = ("i am looking for", "i need", "find me", "i want to buy")


@dataclass(frozen=True)
class _Kind:
    noun: str
    query: str
    category: str
    path: str
    attributes: tuple[str, ...]
    price: float
    """Lowest price in dollars; the highest is 9 dollars more."""
    options: dict[str, tuple[str, ...]]
    """Name of an option -> values; a product offers some of each."""


_UNCOUNTED = ("sneakers", "headphones", "crackers", "shampoo", "lotion", "tea", "granola")
_CATEGORIES = {"Home & Kitchen": "garden", "Clothing": "fashion", "Electronics": "electronics", "Beauty": "beauty"}
_VALUES = {
    "COLOURS": "black, white, red, blue, green, grey, navy blue, rose gold",
    "SIZES": "small, medium, large, x-large, xx-large",
    "PACKS": "pack of 1, pack of 2, pack of 6, pack of 12",
}
_TABLE = """
mug | travel mugs | Home & Kitchen › Drinkware › Mugs | 11
    insulated, leakproof, double walled, dishwasher safe, ceramic, handmade, spillproof, stackable
    color: COLOURS; size: 8 oz, 12 oz, 16 oz, 20 oz
kettle | tea kettles | Home & Kitchen › Kitchen › Kettles | 32
    whistling, gooseneck, cordless, quick boiling, enamel, copper plated, induction ready, temperature controlled
    color: COLOURS
lamp | table lamps | Home & Kitchen › Lighting › Lamps | 41
    dimmable, energy saving, touch controlled, bedside, swing arm, battery operated, flicker free, folding
    color: COLOURS
pillow | bed pillows | Home & Kitchen › Bedding › Pillows | 21
    memory foam, hypoallergenic, cooling, down filled, contoured, neck supporting, odor resistant, zippered
    color: COLOURS; size: standard, queen, king
blanket | throw blankets | Home & Kitchen › Bedding › Blankets | 31
    machine washable, weighted, fleece, knitted, reversible, pet proof, quilted, fringed
    color: COLOURS; size: throw, twin, queen, king
curtain | blackout curtains | Home & Kitchen › Window › Curtains | 22
    noise reducing, thermal, sheer, grommet topped, flame retardant, embroidered, pleated, sun blocking
    color: COLOURS; size: 52x63, 52x84, 52x95
rug | area rugs | Home & Kitchen › Floor › Rugs | 62
    non slip, stain resistant, shaggy, braided, hand woven, fade resistant, jute, geometric
    color: COLOURS; size: 2x3, 4x6, 5x8, 8x10
jacket | men's jackets | Clothing › Men › Jackets | 51
    windproof, water repellent, fleece lined, hooded, packable, regular fit, sherpa collared, zip pocketed
    color: COLOURS; size: SIZES
dress | women's dresses | Clothing › Women › Dresses | 33
    long sleeve, floral printed, wrinkle free, high waist, pleated skirted, v neck, polyester, hand washable
    color: COLOURS; size: SIZES
sneakers | running shoes | Clothing › Shoes › Sneakers | 61
    arch supporting, memory insoled, rubber soled, slip resistant, lace up, mesh, shock absorbing, vegan leather
    color: COLOURS; size: 6, 7, 8, 9, 10, 11
backpack | laptop backpacks | Clothing › Luggage › Backpacks | 42
    anti theft, carry on, padded, expandable, usb charging, tear resistant, rolltop, chest strapped
    color: COLOURS
headphones | over ear headphones | Electronics › Audio › Headphones | 71
    noise cancelling, bluetooth, over ear, low latency, hands free, bass boosted, sweatproof, studio tuned
    color: COLOURS
speaker | bluetooth speakers | Electronics › Audio › Speakers | 52
    stereo paired, shockproof, floating, voice controlled, karaoke, solar charged, party lit, clip on
    color: COLOURS
charger | phone chargers | Electronics › Power › Chargers | 12
    fast charging, magnetic, overvoltage protected, four port, folding, travel ready, gallium nitride, certified
    color: black, white, red, blue, green, grey
shampoo | shampoos | Beauty › Hair › Shampoo | 13
    sulfate free, cruelty free, tea tree, volumizing, color safe, dandruff fighting, keratin, argan oiled
    scent: coconut, mango, lavender, unscented, peppermint; size: 8 fl oz, 16 fl oz, 32 fl oz
lipstick | lipsticks | Beauty › Makeup › Lipstick | 10.5
    long lasting, matte, paraben free, moisturizing, smudge proof, hyaluronic, glossy, refillable
    color: crimson, nude pink, coral, plum, ruby, wine
lotion | body lotions | Beauty › Skin › Lotion | 14
    fragrance free, sun protective, shea buttered, dermatologist tested, firming, non greasy, oat based, retinol
    scent: rose, vanilla, citrus, unscented, almond; size: 3 oz, 8 oz, 13 oz
tea | herbal teas | Grocery › Beverages › Tea | 11.5
    caffeine free, fair trade, loose leaf, individually wrapped, hand picked, rain forest certified, iced, spiced
    flavor name: ginger, chamomile, hibiscus, jasmine, earl grey; size: PACKS
crackers | crackers | Grocery › Snacks › Crackers | 10.2
    gluten free, plant based, low sodium, whole grain, oven baked, keto friendly, nut free, seeded
    flavor name: rosemary, sea salt, cheddar, garlic, sesame; size: PACKS
granola | granolas | Grocery › Breakfast › Granola | 15
    sugar free, protein rich, dairy free, honey sweetened, kosher, non gmo, clustered, soy free
    flavor name: maple, blueberry, peanut butter, cinnamon, cocoa; size: PACKS
"""
"""Per kind: noun, query, path of categories and lowest price; possible attributes; the values of its options."""


def _kind(head: str, attributes: str, options: str) -> _Kind:
    noun, query, path, price = head.split(" | ")
    named = (option.split(": ") for option in options.strip().split("; "))
    values = {name: tuple(_VALUES.get(listed, listed).split(", ")) for name, listed in named}
    category = _CATEGORIES.get(path.split(" › ")[0], "grocery")
    return _Kind(noun, query, category, path, tuple(attributes.strip().split(", ")), float(price), values)


_KINDS = [_kind(*three) for three in zip(*[iter(_TABLE.strip().splitlines())] * 3, strict=True)]


def write_catalogue(folder: Path) -> None:
    """Write items_shuffle.json, items_ins_v2.json and items_human_ins.json into `folder`, which must not exist."""
    rng = random.Random(5)
    names = [start + end for start in _BRAND_STARTS.split() for end in _BRAND_ENDS.split()]
    rng.shuffle(names)
    brands = iter(names)
    drafts = [draft for kind in _KINDS for draft in _drafts(kind, itertools.islice(brands, _BRANDS), rng)]
    rng.shuffle(drafts)
    items, attributes, instructions = [], {}, {}
    for number, draft in enumerate(drafts):
        asin = f"B{number:04d}"
        items.append({"asin": asin, **draft["item"]})
        attributes[asin] = draft["attributes"]
        instructions[asin] = [{"asin": asin, **entry} for entry in draft["instructions"]]
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    written = {"items_shuffle": items, "items_ins_v2": attributes, "items_human_ins": instructions}
    for name, content in written.items():
        (unfinished / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    os.rename(unfinished, folder)


def _drafts(kind: _Kind, brands: Iterator[str], rng: random.Random) -> list[dict[str, Any]]:
    pairs = list(itertools.product(brands, kind.attributes))
    rng.shuffle(pairs)
    return [_draft(kind, brand, attribute, rng) for brand, attribute in pairs[:_PER_KIND]]


def _draft(kind: _Kind, brand: str, attribute: str, rng: random.Random) -> dict[str, Any]:
    others = rng.sample([other for other in kind.attributes if other != attribute], 2)
    attributes = [attribute, *others]
    options = {
        # keeps sizes and packs in their natural order
        name: [value for value in values if value in chosen]
        for name, values in kind.options.items()
        for chosen in [rng.sample(values, rng.randint(3, 4) if len(values) > 3 else len(values))]
    }
    low = round(kind.price + rng.randint(0, 60) / 10, 2)
    pricing = f"${low:.2f}" if rng.random() < 0.8 else f"${low:.2f} to ${low + 3:.2f}"
    item = {
        "name": f"{brand} {attribute.title()} {kind.noun.title()}",
        "full_description": f"A {others[0]} {kind.noun} by {brand}, {others[1]} as well.",
        "small_description": [f"{attribute} and {others[0]}", f"{others[1]}, as its buyers say", f"made by {brand}"],
        "pricing": pricing,
        "customization_options": {
            name.title(): [{"value": value, "image": None} for value in values] for name, values in options.items()
        },
        "category": kind.category,
        "query": kind.query,
        "product_category": kind.path,
        "images": [""],
    }
    asked = rng.sample(attributes, 2)
    synthetic = {
        "attributes": attributes,
        "instruction": f"Find me {', '.join(asked)} {kind.query}",
        "instruction_attributes": asked,
    }
    chosen = {name: rng.choice(values) for name, values in options.items()}
    first = dict(list(chosen.items())[:1])
    people = [
        _instruction(kind, rng.sample(attributes, 1), first, rng),
        _instruction(kind, rng.sample(attributes, 1), chosen, rng),
        _instruction(kind, rng.sample(attributes, 2), chosen, rng),
    ]
    return {"item": item, "attributes": synthetic, "instructions": people}


def _instruction(kind: _Kind, attributes: list[str], options: dict[str, str], rng: random.Random) -> dict[str, Any]:
    words = " ".join([*attributes, kind.noun])
    chosen = ", ".join(f"{name} {value}" for name, value in options.items())
    article = "" if kind.noun in _UNCOUNTED else "an " if words[0] in "aeio" else "a "
    return {
        "instruction": f"{rng.choice(_OPENINGS)} {article}{words}, {chosen}.",
        "attributes": attributes,
        "options": [f"{name}: {value}" for name, value in options.items()],
        "instruction_attributes": attributes,
        "instruction_options": list(options.values()),
    }
