"""What a run leaves on disk: recipe.yaml, metrics.jsonl, trajectories/, checkpoints/, logs/, summary.json."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RECIPE = "recipe.yaml"
_ATTACH = "AGENTFACTORY_RUN_FOLDER"


class RunFolderError(Exception):
    """The folder cannot hold the run; the message says why, and what to do."""


class RunFolder:
    """A folder that one run writes to. `on_log` also gets every line of metrics, such as `Progress.update`."""

    def __init__(self, path: Path, on_log: Callable[[dict[str, Any]], None] | None = None):
        self.path = path
        self.on_log = on_log
        self.recipe = path / RECIPE
        self.metrics = path / "metrics.jsonl"
        self.trajectories = path / "trajectories"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.summary = path / "summary.json"

    @classmethod
    def create(cls, path: Path, recipe: str, overwrite: bool = False) -> "RunFolder":
        """Make the folder and store the resolved recipe (YAML) in it.

        Raises RunFolderError where something is there already; `overwrite` deletes it if it is a run's.
        """
        check_free(path, overwrite)
        if path.exists():
            shutil.rmtree(path)
        folder = cls(path)
        for part in (folder.trajectories, folder.checkpoints, folder.logs):
            part.mkdir(parents=True)
        folder.recipe.write_text(recipe, encoding="utf-8")
        return folder

    @classmethod
    def create_or_attach(cls, path: Path, recipe: str) -> "RunFolder":
        """The folder that the launcher has made for this process; without a launcher, a new one as by `create`."""
        return cls(path) if os.environ.get(_ATTACH) == str(path) else cls.create(path, recipe)

    def attachment(self) -> dict[str, str]:
        """Environment variables that let a child `create_or_attach` this folder."""
        return {_ATTACH: str(self.path)}

    def log(self, metrics: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl, at once readable."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics, ensure_ascii=False) + "\n")
        if self.on_log:
            self.on_log(metrics)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json, whole or not at all."""
        aside = self.summary.with_suffix(".json.partial")
        aside.write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        aside.replace(self.summary)

    def read_summary(self) -> dict[str, Any]:
        """What `write_summary` wrote; empty where nothing did."""
        return json.loads(self.summary.read_text(encoding="utf-8")) if self.summary.exists() else {}

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """Lines of metrics.jsonl. A last line that a kill cut short is left out."""
        if not self.metrics.exists():
            return
        for line in self.metrics.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)

    def last_checkpoint(self) -> Path | None:
        """The checkpoint of the highest step."""
        return max(self.checkpoints.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")), default=None)


def check_free(path: Path, overwrite: bool) -> None:
    """Raise RunFolderError unless a run may be written to `path`."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not overwrite:
        raise RunFolderError(f"output: {path} is not empty; fix: output=OTHER, or --overwrite to delete it")
    if not (path / RECIPE).is_file():
        # deleting a folder on a slip of the hand must not be possible
        raise RunFolderError(f"output: {path} is not a run folder, so --overwrite leaves it alone; fix: output=OTHER")


def next_free(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, ... that does not exist."""
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
