"""The whole recipe after files and overrides are composed: one run, or stages; and its YAML form."""

import os
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, PrivateAttr

from agentfactory.base.config import Section
from agentfactory.recipe.composition import HERE, Composed, replace_prefixes
from agentfactory.trainers.config import TrainRecipe

MERGED = "merged"
"""Folder of a run, or of a stage, for the base with an adapter merged into it, on which it trains."""

Purpose = Literal["train", "serve", "rollout", "eval", "tools"]
"""The command that will use a recipe. `tools` needs no model and no data."""


class _WholeRecipe(Section):
    name: str
    """Name of the run; default: the recipe file's folder and name, such as webshop-small."""
    output: Path
    """Run folder; default: runs/<name> in the current folder."""
    prepare: str | None = None
    """`FILE.py:NAME` of a function (folder, seed) that runs once before the run and fills `${prepared}`."""
    _composed: Composed = PrivateAttr(default_factory=Composed)

    @property
    def composed(self) -> Composed:
        """The mapping that the recipe was loaded from, for the sources of its fields."""
        return self._composed

    def loaded_from(self, composed: Composed) -> Self:
        self._composed = composed
        return self

    def to_yaml(self) -> str:
        """Return the resolved recipe, which can run unchanged; the run folder is written as `${output}`."""
        return _dump(self._data(), self.output)

    def to_saved(self, whole: Path | None = None) -> str:
        """Return the resolved recipe for a file in its run folder, with paths relative to that file, so that the folder
        can be moved or copied. `whole` is the folder that is moved as a unit if the run is a stage or an evaluation."""
        return _dump(self._data(), self.output, whole or self.output)

    def _data(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


class Recipe(_WholeRecipe, TrainRecipe):
    """One run. Paths are absolute, except hub names."""


class StagedRecipe(_WholeRecipe):
    """Recipes that run in order, each from the previous one's checkpoint, in folders `<output>/<stage>`."""

    import_path: list[Path] = []
    """Folders from which user code of every stage can import, after all installed packages; default: the folders of the
    files of the recipe and its stages."""
    seed: int = Field(default=0, ge=0)
    """Seed of every stage."""
    stages: list[Recipe] = []
    """Recipe files (or inline recipes, each with a `name`), in order."""

    def _data(self) -> dict[str, Any]:
        data = super()._data()
        for index, stage in enumerate(data["stages"]):
            # fields that stages get from the whole recipe
            for name in ("output", "seed", "prepare", "import_path"):
                del stage[name]
            if index:
                del stage["model"]["path"]
                if stage["model"]["lora"]:
                    del stage["model"]["lora"]["from"]
        return data


def updated(recipe: Recipe, section: str, **settings: Any) -> Recipe:
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=settings)})


def stages_of(recipe: Recipe | StagedRecipe) -> list[Recipe]:
    """Return the stages in order; a recipe without stages is the only one."""
    return recipe.stages if isinstance(recipe, StagedRecipe) else [recipe]


def _dump(data: dict[str, Any], output: Path, whole: Path | None = None) -> str:
    """Return YAML with placeholders for the run folder; with `whole`, paths below it are relative to `output`."""
    top = {name: data.pop(name) for name in ("name", "output", "prepare", "import_path", "seed")}
    prefixes = {f"{output}/prepared": "${prepared}", str(output): "${output}"}
    if whole is not None:
        top["output"] = HERE
        # unlike prepared files, it is not made again for another output
        prefixes = {f"{output}/{MERGED}": f"{HERE}/{MERGED}", **prefixes}
        prefixes.setdefault(str(whole), f"{HERE}/{os.path.relpath(whole, output)}")
    return yaml.safe_dump(top | replace_prefixes(data, prefixes), sort_keys=False, allow_unicode=True, width=120)
