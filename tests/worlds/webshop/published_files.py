"""Small data files in exactly the format that the WebShop project publishes."""

import json
from pathlib import Path
from typing import Any


def item(asin: str, **changes: Any) -> dict[str, Any]:
    """An entry of items_shuffle.json, with fields that the shop does not use, too."""
    return {
        "name": f"Acme Oak Lamp {asin}",
        "asin": asin,
        "pricing": "$19.99",
        "list_price": "",
        "availability_quantity": None,
        "availability_status": "In Stock.",
        "small_description": ["Made of oak", "Bright"],
        "full_description": "A lamp for the desk.",
        "images": ["https://example.org/a.jpg"],
        "product_category": "Home & Kitchen › Lighting › Lamps",
        "customization_options": {
            "Color": [
                {"is_selected": False, "url": None, "value": " Navy/White ", "image": "https://example.org/b.jpg"},
                {"is_selected": True, "value": "Black", "image": None},
            ],
            "Size": None,
        },
        "category": "garden",
        "query": " Desk LAMPS",
        "page": 1,
        **changes,
    }


ITEMS = [
    item("B000000001"),
    item("B000000002", pricing="$9.50 to $1,012.00", small_description="One text", customization_options=None),
    item("B000000002", name="a duplicate"),
    item("nan"),
    item("B00000000003", name="too long an asin"),
    item("B000000004", pricing=None, full_description=None, small_description=[], customization_options={}),
    item(
        "B000000005",
        name="Brass Bell Chair",
        category="fashion",
        query="chairs",
        product_category="Office",
        pricing="$985.00",
        customization_options={"Size": [{"value": "S"}, {"value": "M"}], "Color": [{"value": "Red", "image": None}]},
    ),
]
ATTRIBUTES = {
    "B000000001": {
        "attributes": ["dimmable", "energy saving"],
        "instruction": "Find me dimmable desk lamps",
        "instruction_attributes": ["dimmable"],
    },
    "B000000002": {"attributes": ["solid wood"]},
    "B000000005": {
        "attributes": ["stackable"],
        "instruction": "Find me stackable chairs",
        "instruction_attributes": ["stackable"],
    },
}
INSTRUCTIONS = {
    "B000000001": [
        {
            "asin": "B000000001",
            "instruction": "i need a dimmable lamp in navy.",
            "attributes": ["dimmable"],
            "options": ["color: navy | white"],
            "instruction_attributes": ["dimmable"],
            "instruction_options": ["navy | white"],
            "assignment_id": "3X",
            "worker_id": "A1",
        },
        {"asin": "B000000001", "instruction": "a lamp", "instruction_attributes": [], "instruction_options": []},
    ],
    "B000000005": [
        {"instruction": "a stackable chair", "instruction_attributes": ["stackable"], "instruction_options": ["s"]}
    ],
    "B000000099": [{"instruction": "of no product", "instruction_attributes": ["x"], "instruction_options": []}],
}


def write_published_files(folder: Path) -> Path:
    """Write the three files into `folder`; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {"items_shuffle": ITEMS, "items_ins_v2": ATTRIBUTES, "items_human_ins": INSTRUCTIONS}
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
