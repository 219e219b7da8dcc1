"""Recipes for real models are valid, their processes fit into memory, and docs/placement.md shows their tables."""

import re
from pathlib import Path

import pytest

from agentfactory.launching.placement import Placement, place
from agentfactory.recipe.schema import Recipe
from tests.conftest import REPOSITORY
from tests.project import load_and_check

pytestmark = pytest.mark.long

RECIPES = REPOSITORY / "recipes"
FILES = sorted(
    file
    for folder in ("geometry3k", "gsm8k", "gui_agents", "image_questions", "multi-node", "search_r1")
    for file in RECIPES.glob(f"{folder}/*.yaml")
)
GB = 10**9


def name(file: Path) -> str:
    return str(file.relative_to(RECIPES))


@pytest.fixture(scope="module")
def recipes() -> dict[str, Recipe]:
    loaded = {}
    for file in FILES:
        lacks: list[str] = []
        recipe = load_and_check(file, lacks=lacks)
        # vLLM is not in the environment of the tests
        assert all("vllm" in str(lack) for lack in lacks)
        loaded[name(file)] = recipe
    return loaded


@pytest.fixture(scope="module")
def placements(recipes: dict[str, Recipe]) -> dict[str, Placement]:
    found = place([*recipes.values()], "train")
    return {name: placement for name, placement in zip(recipes, found, strict=True) if placement is not None}


def test_every_recipe_fits(recipes: dict[str, Recipe], placements: dict[str, Placement]) -> None:
    assert placements.keys() == recipes.keys()
    for name, placement in placements.items():
        assert placement.refused is None, name
        wanted = recipes[name].placement.mode
        assert placement.mode == ("separate" if wanted == "auto" else wanted), name
        if "24gb" in name:
            sums = re.findall(r"= ([\d.]+) of ([\d.]+) GiB (?:together|while)", placement.table)
            assert sums, name
            for total, room in sums:
                assert float(total) <= float(room) <= 23 * GB / 2**30, name


def test_a_hybrid_pads_its_rows_and_says_so(placements: dict[str, Placement]) -> None:
    said = "rows are padded: Qwen/Qwen3.5-9B has layers of linear_attention"
    assert [name for name, placement in placements.items() if said in placement.table] == [
        "gsm8k/qwen3.5-9b-qlora-24gb-timeshare.yaml"
    ]


def test_the_docs_show_the_tables(placements: dict[str, Placement]) -> None:
    page = (REPOSITORY / "docs" / "placement.md").read_text()
    shown = dict(re.findall(r"\n`recipes/(\S+)`.*?\n```\n(.*?)\n```", page, re.DOTALL))
    assert shown.keys() == placements.keys()
    for name, table in shown.items():
        made = [line for line in placements[name].table.splitlines() if "the hub cannot be reached" not in line]
        assert table.splitlines() == made, name
