"""ALFWorld's recipes for real models: their published format, and their errors for missing games."""

from pathlib import Path

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.data import load_tasks
from agentfactory.rollout.trajectory import Outcome
from agentfactory.worlds.alfworld.alfworld import QUESTION
from agentfactory.worlds.alfworld.engine import Engine
from agentfactory.worlds.alfworld.games import GeneratedGames
from tests.conftest import REPOSITORY
from tests.project import load_and_check
from tests.scripted_chains import scripted_chains
from tests.worlds.alfworld.engines import PYTHON, needs_engine

pytestmark = [needs_engine, pytest.mark.processes]

RECIPES = REPOSITORY / "recipes" / "alfworld"


def recipe_of(name: str) -> Recipe:
    recipe = load_and_check(RECIPES / name, lacks=[])
    assert isinstance(recipe, Recipe)
    return recipe


@pytest.mark.parametrize("name", ["3b-lora-24gb.yaml", "7b-full-8gpu.yaml"])
def test_the_recipes_say_which_folder_is_missing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(name)
    assert recipe.data is not None
    assert recipe.eval.data is not None
    recipe.data.options["python"] = recipe.eval.data.options["python"] = PYTHON
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    with pytest.raises(SettingError, match=rf"\$ALFWORLD_DATA: there is no folder {tmp_path}/json_2.1.1 with games"):
        load_tasks(recipe.data)
    recipe.data.options["data"] = recipe.eval.data.options["data"] = None
    assert len(load_tasks(recipe.data)) == 3000
    assert len(load_tasks(recipe.eval.data)) == 150


async def test_a_chain_acts_in_the_published_format(tmp_path: Path) -> None:
    recipe = recipe_of("3b-lora-24gb.yaml")
    engine = Engine(processes=1, games=200, python=PYTHON)
    try:
        game = GeneratedGames(0, engine.package()).game("valid_seen/000002")
    finally:
        engine.close()
    options = {"python": PYTHON, "show_actions": True, "processes": 1}
    fields = {
        "tools": [],
        "mcp_servers": {"alfworld": {"module": "alfworld", "options": options, "timeout_seconds": 300}},
        "limits": recipe.limits.model_dump(),
        "rewards": [],
        "rollout": {"parser": recipe.rollout.parser, "max_turns": 50, "system_prompt": recipe.rollout.system_prompt},
    }
    texts = [f"<think>I know.</think>\n<action>{action}</action>" for action in game.walkthrough]
    async with scripted_chains(tmp_path, ["<think>Hm.</think>", *texts], **fields) as chains:
        trajectory = await chains.run(question=QUESTION, game="valid_seen/000002", task_type=game.task_type)
        chains.check(trajectory)
        last = chains.sent()[-1]
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 1.0)
    assert trajectory.metrics["success"] == trajectory.metrics["pick_clean_then_place_in_recep"] == 1.0
    assert "You are an expert agent operating in the ALFRED Embodied Environment." in last
    assert "Your task is to: clean some cloth and put it in cabinet.\nAdmissible actions: go to cabinet 1, " in last
    assert "Reason within <think> </think> tags, then write one action within <action> </action> tags." in last
    assert "<|im_start|>user\nYou arrive at toilet 1. On the toilet 1, you see a cloth 2.\nAdmissible" in last
    assert "<information>" not in last
