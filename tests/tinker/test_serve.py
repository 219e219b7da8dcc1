"""Recipes that `serve --as tinker` refuses, before anything starts."""

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.recipe.schema import Recipe
from agentfactory.tinker.serve import prepared


@pytest.mark.parametrize(
    "told", ["model.lora: missing", "model.lora.target_modules: got", "server.url: got an address"]
)
def test_a_recipe_that_cannot_be_served_is_named(told: str) -> None:
    lora = {"rank": 4, "target_modules": ["q_proj"]} if "target" in told else None if "missing" in told else {"rank": 4}
    server = {"url": "http://127.0.0.1:1"} if "url" in told else {"engine": "embedded"}
    recipe = {
        "model": {"path": "m", "dtype": "float32", "lora": lora},
        "server": server,
        "train": {"steps": 1},
        "name": "m",
        "output": "m",
    }
    with pytest.raises(SettingError, match=told):
        prepared(Recipe.model_validate(recipe))
