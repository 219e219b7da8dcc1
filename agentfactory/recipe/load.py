"""Load a recipe file and overrides as a `Recipe`: compose, validate and resolve it. recipe.checks checks it."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from agentfactory.base.errors import SettingError, short
from agentfactory.base.processes.environment import name_variables
from agentfactory.base.user_code.import_path import append_folders
from agentfactory.recipe.adapters import follow, take_over
from agentfactory.recipe.composition import (
    COMMAND_LINE,
    Composed,
    compose,
    override,
    parse_overrides,
    read_mapping,
    recipe_file,
    replace_prefixes,
)
from agentfactory.recipe.field_errors import did_you_mean, familiar, setting_error
from agentfactory.recipe.removed_fields import drop_removed
from agentfactory.recipe.schema import Purpose, Recipe, StagedRecipe

RecipeT = TypeVar("RecipeT", Recipe, StagedRecipe)
_FOLDER_NAMES = {"prepared", "checkpoints", "trajectories", "logs", "eval", "rollout"}

NO_MODEL = "none"
"""The `model.path` of a file that has only tools, for `agentfactory tools`."""
_WITHOUT_TRAINING = {"train": {"steps": 1}}
_FOR_TOOLS = {"model": {"path": NO_MODEL}, **_WITHOUT_TRAINING}


def load_recipe(path: str | Path, overrides: Sequence[str] = (), purpose: Purpose = "train") -> Recipe | StagedRecipe:
    """Compose, validate and resolve the recipe file `path` for the command `purpose`, without writing anything.
    `overrides` are `key=value`; in a staged recipe, a key may begin with a stage's name, and others but `name`,
    `output`, `prepare` and `seed` apply to every stage. Raises SettingError."""
    file = recipe_file(path, Path.cwd())
    composed = compose(read_mapping(file, "", "recipe"), file)
    composed.data.setdefault("name", default_name(file))
    if "stages" in composed.data:
        return _load_staged(composed, file, overrides)
    for name, value in parse_overrides(overrides):
        override(composed, name, value)
    if purpose != "train":
        composed.data = (_FOR_TOOLS if purpose == "tools" else _WITHOUT_TRAINING) | composed.data
    _set_import_path(composed)
    _set_output(composed)
    with composed.located():
        take_over(composed.data)
    recipe = _validate(Recipe, composed, f"{composed.data['output']}/prepared")
    append_folders(recipe.import_path)
    name_variables(recipe.env)
    return recipe


def default_name(file: Path) -> str:
    """Return the default name of a run: the folder and stem of its file, without repetition."""
    folder, name = file.parent.name, file.stem
    return name if file.parent == Path.cwd() or name.startswith(folder) else f"{folder}-{name}"


def _load_staged(composed: Composed, file: Path, overrides: Sequence[str]) -> StagedRecipe:
    with composed.located():
        stages = _compose_stages(composed.data.pop("stages"), composed, file)
    for name, value in parse_overrides(overrides):
        first, _, rest = name.partition(".")
        if first in stages and rest:
            override(stages[first], rest, value)
        elif first in StagedRecipe.model_fields:
            override(composed, name, value)
        elif first in Recipe.model_fields:
            for stage in stages.values():
                override(stage, name, value)
        else:
            problem, fix = f"got {short(value)} for a stage", f"set one of its keys: {name}.KEY"
            if name not in stages:
                fix = familiar(name, value) or did_you_mean(first, [*stages, *Recipe.model_fields], Recipe)
                problem = f"unknown key {first!r}"
            raise SettingError(name, problem, fix, source=COMMAND_LINE)
    for name, stage in stages.items():
        _check_import_path(stage, f"{name}.import_path")
    _set_import_path(composed, *stages.values())
    _set_output(composed)
    whole = _validate(StagedRecipe, composed, f"{composed.data['output']}/prepared")
    append_folders(whole.import_path)
    for name, stage in stages.items():
        _give_to_stage(whole, name, stage)
        with composed.stage_named(name):
            if whole.stages:
                follow(stage, name, whole.stages[-1], whole.output)
            else:
                with stage.located():
                    take_over(stage.data)
            whole.stages.append(_validate(Recipe, stage, f"{whole.output}/prepared"))
    name_variables({name for stage in whole.stages for name in stage.env})
    return whole


def _compose_stages(entries: Any, composed: Composed, file: Path) -> dict[str, Composed]:
    if not isinstance(entries, list) or not entries:
        raise SettingError("stages", f"got {short(entries)}", "list at least one recipe file")
    stages: dict[str, Composed] = {}
    for index, entry in enumerate(entries):
        field = f"stages.{index}"
        if isinstance(entry, str):
            path = recipe_file(entry, file.parent)
            stage = compose(read_mapping(path, composed.source, field), path)
            stage.data.setdefault("name", path.stem)
        elif isinstance(entry, dict) and "name" in entry:
            stage = compose(entry, file)
        else:
            raise SettingError(field, f"got {short(entry)}", "name a recipe file, or write a recipe with a name")
        with stage.located():
            name = stage.data["name"]
            if "stages" in stage.data:
                raise SettingError("stages", f"{name} is itself a stage", "list its stages in the outer recipe")
            if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
                raise SettingError("name", f"got {short(name)}", "a stage's name is letters, digits, _ and -")
            if name in _FOLDER_NAMES or name in Recipe.model_fields:
                raise SettingError("name", f"a stage cannot be called {name!r}", "choose another name")
        if stages.setdefault(name, stage) is not stage:
            raise SettingError(field, f"a second stage called {name!r}", "set another name in one of the two")
    return stages


def _give_to_stage(whole: StagedRecipe, name: str, stage: Composed) -> None:
    """Give a stage its seed, output and import path from the whole recipe; its own apply only when it runs alone."""
    prepare = stage.data.pop("prepare", None)
    with stage.located():
        if prepare not in (None, whole.prepare):
            raise SettingError("prepare", f"got {prepare!r}", f"stages share one: name it in the {whole.name} recipe")
    stage.data |= {"seed": whole.seed, "output": f"{whole.output}/{name}"}
    stage.data["import_path"] = [str(folder) for folder in whole.import_path]


def _set_import_path(composed: Composed, *stages: Composed) -> None:
    """Set a missing import path to the folders of the recipe's files; stages add their own."""
    _check_import_path(composed, "import_path")
    said = composed.data.get("import_path")
    folders = composed.folders if said is None else said
    for stage in stages:
        own = stage.data.get("import_path")
        if own is not None or said is None:
            folders = [*folders, *(stage.folders if own is None else own)]
    composed.data["import_path"] = [*dict.fromkeys(map(str, folders))]


def _check_import_path(composed: Composed, field: str) -> None:
    # checked before the lists of the whole recipe and its stages are joined
    said = composed.data.get("import_path")
    if said is not None and not (isinstance(said, list) and all(isinstance(folder, str) for folder in said)):
        problem = f"got {short(said)}, not a list of folders"
        raise SettingError(field, problem, "write it as [FOLDER, ...]", source=composed.origin("import_path"))


def _set_output(composed: Composed) -> None:
    output = composed.data.setdefault("output", f"runs/{composed.data['name']}")
    if isinstance(output, str):
        composed.data["output"] = os.path.abspath(os.path.expanduser(output))


def _validate(model: type[RecipeT], composed: Composed, prepared: str) -> RecipeT:
    drop_removed(composed.data)
    data = replace_prefixes(composed.data, {"${prepared}": prepared, "${output}": str(composed.data["output"])})
    with composed.located():
        try:
            # JSON, because its strict mode still creates enums, tuples and paths from what YAML can express
            recipe = model.model_validate_json(json.dumps(data, default=str), strict=True)
        except ValidationError as errors:
            raise setting_error(errors, data, model) from None
    return recipe.loaded_from(composed)
