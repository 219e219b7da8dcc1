"""What a run leaves on disk: recipe.yaml, metrics.jsonl, trajectories/, checkpoints/, logs/, summary.json."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from agentfactory.rollout.trajectory import CREDIT_FILE
from agentfactory.trainers.checkpoint_folder import checkpoints

RECIPE = "recipe.yaml"
ADAPTER = "adapter_config.json"
"""What a checkpoint that is an adapter has."""

_BLOCK = 1 << 20


class RunFolderError(Exception):
    """The folder cannot hold the run; the message says why, and what to do."""


class RunFolder:
    """A folder that one run writes to. `on_log` also gets every line of metrics, such as `Progress.update`."""

    def __init__(self, path: Path, on_log: Callable[[dict[str, Any]], None] | None = None):
        self.path = path
        self.on_log = on_log
        self.recipe = path / RECIPE
        self.assignment = path / "assignment.json"
        """What the launcher gave to the trainer's processes."""
        self.metrics = path / "metrics.jsonl"
        self.trajectories = path / "trajectories"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.sync = path / "sync"
        self.summary = path / "summary.json"
        self.credit = self.trajectories / CREDIT_FILE
        self.growing = {
            "metrics.jsonl": self.metrics,
            "trajectories/train.jsonl": self.trajectories / "train.jsonl",
            f"trajectories/{CREDIT_FILE}": self.credit,
        }
        """Files that a run appends to, and that a resumed one goes on with."""
        self._stopping = path / ".stopping"

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
    def reopen(cls, path: Path, recipe: str) -> "RunFolder":
        """The folder of a run that goes on, with this recipe in place of the one before. Raises RunFolderError where
        there is none."""
        folder = cls(path)
        if not folder.recipe.is_file():
            raise RunFolderError(f"--resume: there is no run in {path}; fix: leave out --resume")
        folder.recipe.write_text(recipe, encoding="utf-8")
        folder.summary.unlink(missing_ok=True)
        return folder

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

    def cut(self, sizes: Mapping[str, int]) -> None:
        """Shorten the growing files to these sizes in bytes (none: 0), and there to whole lines."""
        for name, file in self.growing.items():
            if file.exists():
                _cut(file, sizes.get(name, 0))

    @property
    def title(self) -> str:
        """What the run is called elsewhere: its folder's name, behind that of the whole run where it is a stage."""
        whole = self.path.parent / RECIPE
        stages = (yaml.safe_load(whole.read_text(encoding="utf-8")) or {}).get("stages", []) if whole.is_file() else []
        is_stage = any(isinstance(stage, dict) and stage.get("name") == self.path.name for stage in stages)
        return f"{whole.parent.name}-{self.path.name}" if is_stage else self.path.name

    def note_credit(self, lines: list[str]) -> None:
        """Append lines to trajectories/credit.jsonl; without any, it is not made."""
        if not lines:
            return
        with self.credit.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)

    def note_stopping(self) -> None:
        """The trainer has heard that it is to end: it finishes its step and writes a checkpoint first."""
        self._stopping.touch()

    def note_stopped(self) -> None:
        """Nothing of the trainer's is unfinished."""
        self._stopping.unlink(missing_ok=True)

    def is_finishing(self) -> bool:
        """Whether the trainer would lose something if it were ended now."""
        return self._stopping.exists() or any(self.checkpoints.glob(".step-*.partial"))

    def last_checkpoint(self) -> Path | None:
        """The checkpoint of the highest step."""
        found = checkpoints(self.checkpoints)
        return found[-1] if found else None

    def need_checkpoint(self) -> Path:
        """The checkpoint of the highest step. Raises RunFolderError where there is none."""
        checkpoint = self.last_checkpoint()
        if checkpoint is None:
            raise RunFolderError(f"{self.checkpoints} holds no checkpoint; fix: run `agentfactory train` first")
        return checkpoint


def _cut(path: Path, size: int) -> None:
    with path.open("rb+") as file:
        file.truncate(min(size, path.stat().st_size))
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _BLOCK)
            file.seek(start)
            line_end = file.read(end - start).rfind(b"\n")
            if line_end >= 0:
                file.truncate(start + line_end + 1)
                return
            end = start
        file.truncate(0)


class Hold:
    """Keeps every other launcher and trainer from the run in `path`, by a lock on a file in it. Children do not inherit
    the lock, and the kernel frees it when this process ends, however it does."""

    def __init__(self, path: Path):
        self._path = path
        self._file = path / ".lock"
        self._held: int | None = None

    def __enter__(self) -> "Hold":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let others have it."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def take(self, make: bool = False) -> None:
        """Hold the run that is there; `make` the file where it is not. Raises RunFolderError where a run is alive
        there."""
        if self._held is not None:
            return
        try:
            opened = os.open(self._file, os.O_RDWR | (os.O_CREAT if make else 0), 0o644)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            alive = f"a run is alive there (pid {os.pread(opened, 20, 0).decode()})"
            os.close(opened)
            fix = "wait for it, end it, or output=OTHER"
            raise RunFolderError(f"output: {self._path}: {alive}; fix: {fix}") from None
        except OSError:
            # a filesystem without locks: nobody can hold one there, and training goes on as it would without
            os.close(opened)
            return
        self._held = opened
        os.ftruncate(opened, 0)
        os.pwrite(opened, str(os.getpid()).encode(), 0)


def is_free(path: Path) -> bool:
    """Whether nothing, or an empty folder, is there."""
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def check_free(path: Path, overwrite: bool) -> None:
    """Raise RunFolderError unless a run may be written to `path`."""
    if is_free(path):
        return
    if not overwrite:
        is_run = (path / RECIPE).is_file() and RunFolder(path).checkpoints.is_dir()
        resume = "--resume to go on with it, " if is_run else ""
        raise RunFolderError(f"output: {path} is not empty; fix: {resume}output=OTHER, or --overwrite to delete it")
    if not (path / RECIPE).is_file():
        # deleting a folder on a slip of the hand must not be possible
        raise RunFolderError(f"output: {path} is not a run folder, so --overwrite leaves it alone; fix: output=OTHER")


def base_of_adapter(checkpoint: Path) -> str:
    """Folder or hub name of the model that an adapter is for. Raises RunFolderError where the folder is not there."""
    base = str(json.loads((checkpoint / ADAPTER).read_text(encoding="utf-8"))["base_model_name_or_path"])
    if os.path.isabs(base) and not Path(base).is_dir():
        raise RunFolderError(f"{checkpoint} is an adapter for {base}, which is not there; fix: move or link it there")
    return base


def next_free(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, ... that does not exist."""
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
