"""The whole recipe: composed from files and overrides, validated, resolved, and written back as YAML."""

import difflib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, Field, ValidationError

from agentfactory.checks import Purpose, check
from agentfactory.composition import (
    COMMAND_LINE,
    Composed,
    RecipeError,
    compose,
    display,
    override,
    parse_overrides,
    read_mapping,
    short,
)
from tools.config import Section
from trainers.config import TrainRecipe

__all__ = ["Recipe", "RecipeError", "StagedRecipe", "load_recipe"]

_STAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_FOLDER_NAMES = {"prepared", "checkpoints", "trajectories", "logs", "eval", "rollout"}


class Recipe(TrainRecipe):
    """One run. Paths are absolute, except hub names."""

    name: str
    """What the run is called; default: the recipe file's name."""
    output: Path
    """Run folder; default: runs/<name> in the current folder."""
    prepare: str | None = None
    """`FILE.py:NAME` of a function (folder, seed) that runs once before and fills `${prepared}`."""

    def to_yaml(self) -> str:
        """The resolved recipe, which runs as it stands; its own folder is written `${output}`."""
        return _dump(_placeholders(self.model_dump(mode="json"), self.output))


class StagedRecipe(Section):
    """Recipes that run in order, each from the last one's checkpoint, in folders `<output>/<stage>`."""

    name: str
    """What the run is called; default: the recipe file's name."""
    output: Path
    """Folder of all stages; default: runs/<name> in the current folder."""
    prepare: str | None = None
    """`FILE.py:NAME` of a function (folder, seed) that runs once before and fills `${prepared}`."""
    seed: int = Field(default=0, ge=0)
    """Seed of every stage."""
    stages: list[Recipe] = []
    """Recipe files (or whole recipes in place, each with a `name`), in order."""

    def to_yaml(self) -> str:
        """The resolved recipe, which runs as it stands."""
        data = self.model_dump(mode="json")
        for index, stage in enumerate(data["stages"]):
            # what the whole gives to its stages is not theirs to say
            for name in ("output", "seed", "prepare"):
                del stage[name]
            if index:
                del stage["model"]["path"]
        return _dump(_placeholders(data, self.output))


def load_recipe(path: str | Path, overrides: Sequence[str] = (), purpose: Purpose = "train") -> Recipe | StagedRecipe:
    """Compose, validate and resolve the recipe file `path`. Nothing is written.

    `overrides` are `key=value`; in a staged recipe a key that begins with a stage's name goes to that stage, `name`,
    `output`, `prepare` and `seed` to the whole, any other to every stage. `purpose` is the command that will use it:
    a server's settings are checked only where one is started.

    Raises RecipeError, whose text names the file, the field, the value and the fix.
    """
    file = Path(path).expanduser().resolve()
    composed = compose(read_mapping(file, "", "recipe"), file)
    composed.data.setdefault("name", file.stem)
    settings = parse_overrides(overrides)
    if "stages" in composed.data:
        return _load_staged(composed, file, settings, purpose)
    for name, value in settings:
        override(composed, name, value)
    output = _output(composed)
    if composed.data.get("prepare") is None and '"${prepared}' in json.dumps(composed.data, default=str):
        raise RecipeError(
            composed.source, "prepare", "${prepared} is used, but nothing prepares it", "set prepare: FILE.py:NAME"
        )
    recipe = _validate(Recipe, composed, {"${prepared}": f"{output}/prepared", "${output}": str(output)})
    check(recipe, purpose, composed, output / "prepared")
    return recipe


def _load_staged(composed: Composed, file: Path, settings: list[tuple[str, Any]], purpose: Purpose) -> StagedRecipe:
    entries = composed.data.pop("stages")
    if not isinstance(entries, list) or not entries:
        raise RecipeError(composed.source, "stages", f"got {short(entries)}", "list at least one recipe file")
    stages = [_compose_stage(entry, index, composed, file) for index, entry in enumerate(entries)]
    names = [stage.data["name"] for stage in stages]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise RecipeError(composed.source, f"stages.{index}", f"a second stage called {name!r}", "set its name")
    for name, value in settings:
        first, _, rest = name.partition(".")
        if first in names and rest:
            override(stages[names.index(first)], rest, value)
        elif first in StagedRecipe.model_fields:
            override(composed, name, value)
        elif first in Recipe.model_fields:
            for stage in stages:
                override(stage, name, value)
        else:
            known = [*names, *Recipe.model_fields]
            raise RecipeError(COMMAND_LINE, name, "unknown key", _did_you_mean(first, known, ["a stage's name first"]))
    output = _output(composed)
    whole = _validate(StagedRecipe, composed, {"${output}": str(output)})
    for index, stage in enumerate(stages):
        _fit_into(whole, stage)
        if index:
            previous = f"{output}/{names[index - 1]}/checkpoints"
            override(stage, "model.path", previous)
        own_output = stage.data["output"]
        recipe = _validate(Recipe, stage, {"${prepared}": f"{output}/prepared", "${output}": own_output})
        check(recipe, purpose, stage, output / "prepared", previous_checkpoints=index > 0)
        whole.stages.append(recipe)
    check_prepare = Composed(composed.source, composed.data, composed.origins)
    if whole.prepare is not None:
        from agentfactory.checks import check_prepare as run

        run(whole.prepare, check_prepare)
    return whole
