"""ScienceWorld's recipes for real models."""

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.data import load_tasks
from agentfactory.worlds.scienceworld.scienceworld import ScienceWorld
from tests.conftest import REPOSITORY
from tests.project import load_and_check
from tests.worlds.scienceworld.games import needs_java

RECIPES = REPOSITORY / "recipes" / "scienceworld"


@pytest.mark.processes
@needs_java
@pytest.mark.parametrize("name", ["3b-lora-24gb", "7b-full-8gpu"])
def test_the_real_models_recipes_have_the_official_tasks(name: str) -> None:
    recipe = load_and_check(RECIPES / f"{name}.yaml", lacks=[])
    assert isinstance(recipe, Recipe)
    assert recipe.data is not None
    assert recipe.eval.data is not None
    assert len(load_tasks(recipe.data)) == 3592
    evaluated = load_tasks(recipe.eval.data)
    assert len({task["task"] for task in evaluated}) == 30
    assert max(task["variation"] for task in evaluated if task["task"] == "boil") == 18
    recipe.eval.data.options |= {"split": "test", "per_task": 10}
    assert len(load_tasks(recipe.eval.data)) == 271
    assert recipe.mcp_servers["scienceworld"].module == "scienceworld"


@pytest.mark.processes
def test_what_the_machine_lacks_is_an_error_or_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking() -> None:
        raise SettingError("scienceworld", "there is no Java", "install it")

    monkeypatch.setattr(ScienceWorld, "check_machine", staticmethod(lacking))
    file, lacks = RECIPES / "3b-lora-24gb.yaml", []
    load_and_check(file, lacks=lacks)
    told = "mcp_servers.scienceworld.module: there is no Java; fix: install it"
    assert told in [str(lack) for lack in lacks]
    with pytest.raises(SettingError, match=told):
        load_and_check(file, ["server.url=http://127.0.0.1:1"])
