"""The weights that a command serves: the recipe's model, a checkpoint of it, an adapter on its base, or a hub name."""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentfactory.base.errors import SettingError
from agentfactory.base.files.untrusted_files import RefusedFileError, check_tree, entries_of, read_json, refused
from agentfactory.launching.run_folder import ADAPTER, RunFolder, RunFolderError, base_of_adapter, is_run
from agentfactory.recipe.composition import COMMAND_LINE, display
from agentfactory.recipe.schema import Recipe, StagedRecipe, stages_of, updated
from agentfactory.trainers.checkpoints.checkpoint_folder import INFO, read_info


@dataclass
class Served:
    """Weights to serve: recipe of the base model, adapters, their name for requests, and their `label` in messages."""

    recipe: Recipe
    label: str
    name: str = "policy"
    adapters: dict[str, Path] = field(default_factory=dict)
    step: int | None = None


def what_is_served(recipe: Recipe | StagedRecipe, checkpoint: Path | str | None) -> Served:
    """Find the weights to serve. `checkpoint` is a folder, a hub name, or None for the recipe's own."""
    stage = stages_of(recipe)[-1]
    if isinstance(checkpoint, str):
        return Served(updated(stage.with_model(checkpoint), "server", model=None), checkpoint)
    lora = stage.model.lora
    if checkpoint is not None:
        checkpoint = checkpoint.expanduser()
        check_weights(checkpoint, "--checkpoint")
        check_weights_folder(checkpoint)
        path = checkpoint.resolve()
    elif isinstance(recipe, StagedRecipe):
        path = RunFolder(stage.output).need_checkpoint()
    elif lora is not None and lora.from_ is not None:
        adapter = Path(lora.from_)
        check_weights_folder(adapter)
        return Served(stage, str(adapter), "checkpoint", {"checkpoint": adapter}, _step_of(adapter))
    else:
        path = Path(stage.model.path)
    if path.is_dir():
        check_weights_folder(path)
    step = _step_of(path)
    if (path / ADAPTER).is_file():
        served = stage.with_model(base_of_adapter(path))
        return Served(served, str(path), "checkpoint", {"checkpoint": path}, step)
    served = stage.with_model(str(path))
    if checkpoint is not None or isinstance(recipe, StagedRecipe):
        # a quantised copy of the initial model is not a copy of another one
        served = updated(served, "server", model=None)
    return Served(served, str(path), step=step)


def trained_in(run: Path, recipe: Recipe | StagedRecipe, overrides: Sequence[str]) -> Path | None:
    """Return the last checkpoint of the run in the folder `run`; None if `overrides` set another model, a running
    server has its own weights, or `what_is_served` finds it."""
    last = stages_of(recipe)[-1]
    if isinstance(recipe, StagedRecipe):
        # another output is only for what the command writes
        is_elsewhere = is_run(run) and run.resolve() != recipe.output.resolve()
        return RunFolder(run / last.name).need_checkpoint() if is_elsewhere and not last.server.urls else None
    names = {override.partition("=")[0] for override in overrides}
    if names & {"model", "model.path"} or last.server.urls:
        return None
    return RunFolder(run).last_checkpoint()


def _step_of(path: Path) -> int | None:
    if not (path / INFO).is_file():
        return None
    try:
        return int(read_info(path)["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{path / INFO} cannot be read: {error!r}; fix: name another checkpoint") from error


def check_weights(folder: Path, option: str) -> None:
    """Raise SettingError if `folder`, which `option` names, contains neither a model nor an adapter."""
    if any((folder / name).is_file() for name in ("config.json", ADAPTER)):
        return
    problem = "neither config.json nor adapter_config.json is there" if folder.is_dir() else "no such folder"
    fix = "name a checkpoint, such as runs/NAME/checkpoints/step-000080"
    raise SettingError(option, f"{display(folder)}: {problem}", fix, source=COMMAND_LINE)


def check_weights_folder(path: Path) -> None:
    """Raise RunFolderError if a weights folder has files that must not be opened."""
    is_ours = path.parent.name == "checkpoints"
    within = path.parents[1] if is_ours else path
    try:
        if not is_ours and not os.path.lexists(path / INFO):
            for file in path.iterdir():
                if not (file.is_file() or file.is_dir()) and file.exists():
                    raise refused(file, stat.S_IFMT(file.stat().st_mode))
            return
        check_tree(path, within)
        for name in entries_of(path, within):
            if name.endswith(".json"):
                read_json(path / name, within)
    except RefusedFileError as error:
        raise RunFolderError(str(error)) from None
    except OSError as error:
        raise RunFolderError(f"{error.filename}: {error.strerror}; fix: make it readable") from None
    except ValueError as error:
        raise RunFolderError(f"{path / name} cannot be read: {error}; fix: name another checkpoint") from None
