"""Part of `make learn`: in each world an agent learns, on every seed of the variable SEEDS. The engine of
ALFWorld and the screens in a real Chromium have no short form: `make learn-worlds`."""

import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.learn.runs import FULL, SEEDS, assert_risen, train
from tests.worlds.alfworld.engines import PYTHON
from tests.worlds.scienceworld.games import needs_java


@dataclass(frozen=True)
class World:
    """A recipe, what shortens it (None: it has no short form), and how far `figures` must rise."""

    recipe: str
    short: tuple[str, ...] | None
    full: float = 0.8
    by: float = 0.3
    short_by: float | None = None
    figures: tuple[str, ...] = ("success",)
    most_before: float = 1.0
    least_greedy: float = 0.0


def steps(count: int) -> tuple[str, ...]:
    return (f"grpo.train.steps={count}",)


def needs(is_there: object, reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not is_there, reason=reason)


def package(name: str) -> pytest.MarkDecorator:
    return needs(importlib.util.find_spec(name), f"needs {name}")


BOTH = ("success", "greedy")
WORLDS: dict[str, tuple[World, Any]] = {
    # an agent learns to search on until it has found what it needs
    "alfworld": (
        World("alfworld/small", None, full=0.3, by=0.2, figures=BOTH),
        needs(PYTHON, "AGENTFACTORY_ALFWORLD_PYTHON names no Python: make learn-worlds"),
    ),
    # before, transcripts without "Please" neither obey nor avoid the instruction: one box of four, or none
    "click": (
        World("screens/click", None, figures=BOTH, most_before=0.25),
        needs(shutil.which("chromium"), "there is no chromium: apt install chromium"),
    ),
    "code_interpreter": (World("code_interpreter/code_interpreter", steps(20)), ()),
    "gymnasium": (World("gymnasium/small", steps(40)), package("gymnasium")),
    "reasoning_gym": (World("reasoning_gym/small", steps(40)), package("reasoning_gym")),
    "scienceworld": (
        World(
            "scienceworld/small",
            ("sft.train.steps=150", *steps(8), "grpo.train.updates_per_batch=3", "grpo.eval.data.limit=32"),
            full=0.3,
            by=0.15,
            short_by=0.1,
        ),
        needs_java,
    ),
    "service_desk": (World("service_desk/service_desk", steps(20), figures=BOTH, most_before=0.35), ()),
    "textarena": (World("textarena/small", steps(40)), package("textarena")),
    "two_hop": (World("two_hop/two_hop", steps(15)), ()),
    # not greedy success: whether most of the first greedy visits buy is as good as chance, 0.00 to 0.80 after the short
    # form
    "webshop": (
        World(
            "webshop/small",
            ("sft.train.steps=300", "sft.train.schedule=constant", *steps(10)),
            by=0.5,
            short_by=0.2,
            figures=("reward", "success"),
        ),
        (),
    ),
    # a vision-language network learns to look closer
    "zoom": (World("zoom/zoom", steps(25), figures=BOTH, least_greedy=0.8), ()),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "world",
    [
        pytest.param(world, id=name, marks=marks)
        for name, (world, marks) in WORLDS.items()
        if FULL or world.short is not None
    ],
)
def test_an_agent_learns(tmp_path: Path, seed: int, world: World) -> None:
    overrides = () if FULL else world.short or ()
    summary = train(str(REPOSITORY / "recipes" / f"{world.recipe}.yaml"), seed, tmp_path, *overrides)
    by = world.by if FULL or world.short_by is None else world.short_by
    assert_risen(summary, full=world.full, by=by, figures=world.figures)
    if world.most_before < 1.0:
        assert max(summary["success_before"], summary["greedy_before"]) <= world.most_before
    if world.least_greedy > 0.0:
        assert summary["greedy_after"] >= world.least_greedy
