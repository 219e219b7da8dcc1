"""The runs to show: found in the folders that the user names, and followed."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic_core import from_json

from agentfactory.launching.run_folder import RECIPE, RunFolder
from agentfactory.recipe.composition import resolve_saved
from agentfactory.rollout.group_files import CREDIT_FILE
from agentfactory.trainers.best_checkpoint import BestCheckpoint, find_best
from agentfactory.viewer.growing_file import GrowingFile

_CHECKPOINT = re.compile(r"step-\d+")
_MOST_PROBLEMS = 20


class ViewError(Exception):
    """The runs cannot be shown; the message gives the reason and a fix."""


@dataclass(frozen=True)
class CreditLine:
    """The location of the trainer's line about a group, and the step that trained the group."""

    offset: int
    length: int
    step: int


class Run:
    """One run, or one stage of a run: the data read so far."""

    def __init__(self, path: Path, label: str) -> None:
        self.id = hashlib.sha256(str(path).encode()).hexdigest()[:12]
        """Stable, because it is part of URLs."""
        self.label = label
        self.folder = RunFolder(path)
        self.generation = 0
        """How often metrics.jsonl has restarted."""
        self._begin()

    def _begin(self) -> None:
        self.problems: list[str] = []
        self.lines: list[dict[str, Any]] = []
        """Lines of metrics.jsonl."""
        self.metrics_file = GrowingFile(self.folder.metrics)
        self.files: dict[str, GrowingFile] = {}
        """Trajectory files by their path within `trajectories`."""
        self.credit_file = GrowingFile(self.folder.credit)
        self.credit: dict[str, CreditLine] = {}
        """Credit lines by group."""
        self.best: BestCheckpoint | None = None
        """The best checkpoint by the metric that train.keep_best names, if it names one."""
        self.supervised = False
        """Whether the recipe is of supervised fine-tuning."""
        self._model: str | None = None
        self._checkpoints_seen: list[tuple[str, int]] = []

    def forget(self) -> None:
        """Note that the run is gone, such as a deleted stage. If it reappears, it is read from the beginning."""
        self._begin()
        self.generation += 1

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self.folder.path

    def has_data(self) -> bool:
        """Return whether there is anything to show."""
        return self.folder.metrics.exists() or next(self._trajectory_files(), None) is not None

    def find_files(self) -> None:
        """Look for new trajectory files."""
        for path in self._trajectory_files():
            self.files.setdefault(path.relative_to(self.folder.trajectories).as_posix(), GrowingFile(path))

    def _trajectory_files(self) -> Iterator[Path]:
        for pattern in ("*.jsonl", "eval/*.jsonl"):
            for path in sorted(self.folder.trajectories.glob(pattern)):
                if path.name != CREDIT_FILE and self._can_be_named(path):
                    yield path

    def _can_be_named(self, path: Path) -> bool:
        if not _is_text(path.name):
            self.note(f"{path.name!a}: left out, for its name is not UTF-8")
            return False
        return True

    def find_checkpoints(self) -> None:
        """Find the best checkpoint so far, and read what the recipe says about the run."""
        found = [path for path in self.folder.checkpoints.glob("step-*") if _CHECKPOINT.fullmatch(path.name)]
        try:
            seen = [(path.name, path.stat().st_mtime_ns) for path in [self.folder.recipe, *sorted(found)]]
        except FileNotFoundError:
            return  # the run is deleting checkpoints: the next call finds out
        if seen != self._checkpoints_seen:
            metric = self._setting("train", "keep_best")
            self.best = find_best(found, metric)
            self.supervised = self._setting("train", "algorithm") == "sft"
            self._model = self.model_path()
            self._checkpoints_seen = seen

    def follow_metrics(self, most: int) -> bool:
        """Read new lines of metrics.jsonl; return whether there were any."""
        taken = self.metrics_file.take(most)
        if taken.restarted:
            self.lines, self.generation = [], self.generation + 1
            self.drop_problems(self.metrics_file.path)
        for offset, line in taken.lines:
            try:
                metrics = from_json(line)
                if not isinstance(metrics, dict):
                    raise ValueError("no JSON object")
            except ValueError as error:
                self.note_line(self.metrics_file.path, offset, error)
                continue
            self.lines.append(metrics)
        return bool(taken.lines) or taken.restarted

    def note_line(self, path: Path, offset: int, error: Exception) -> None:
        """Note that a line of a file cannot be read."""
        self.note(f"{self._line_of(path)}{offset}: {error}")

    def drop_problems(self, path: Path) -> None:
        """Drop the problems of a file's lines, because the file has restarted."""
        self.problems = [problem for problem in self.problems if not problem.startswith(self._line_of(path))]

    def _line_of(self, path: Path) -> str:
        """Return the prefix of problems of this file's lines."""
        return f"{path.relative_to(self.path)}, byte "

    def note_unreadable(self, error: OSError) -> None:
        """Note that a file cannot be read."""
        # name it relative to the run, because an exported page is shared with others
        self.note(str(error).replace(f"{self.path}/", ""))

    def note(self, problem: str) -> None:
        """Note a problem for people to see."""
        if problem not in self.problems and len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(problem)

    def status(self) -> str:
        """Return `completed`, `stopped` (train.stop_when), `failed`, `interrupted`, or `in progress`, which includes a
        run that was killed before it could write its summary."""
        summary = self.summary()
        if summary:
            return str(summary.get("status", "completed"))
        whole = _read_json(self.path.parent / "summary.json") if (self.path.parent / RECIPE).is_file() else {}
        status = str(whole.get("status", ""))
        return status if status in ("failed", "interrupted", "stopped") else "in progress"

    def summary(self) -> dict[str, Any]:
        """Return summary.json; empty until the run has ended."""
        return _read_json(self.folder.summary)

    def recipe(self) -> str:
        """Return the resolved recipe as YAML."""
        return self.folder.recipe.read_text(encoding="utf-8")

    def model_path(self) -> str | None:
        """Return the folder or name of the run's initial model."""
        path = self._setting("model", "path")
        return None if path is None else resolve_saved({"path": path}, self.path)["path"]

    def coordinates(self) -> str:
        """Return how the model states places in images: `rollout.coordinates`."""
        return self._setting("rollout", "coordinates") or "auto"

    def step(self) -> Any:
        """Return the last step in metrics.jsonl, or None."""
        return next((line["step"] for line in reversed(self.lines) if "step" in line), None)

    def weights(self) -> list[Path]:
        """Return what may be the folder of the weights that the run began with: the model of its recipe, and the
        checkpoint that its summary names, because the model of a recipe with an adapter is the base."""
        return [Path(name) for name in (self._model, self.summary().get("checkpoint")) if isinstance(name, str)]

    def _setting(self, section: str, name: str) -> str | None:
        """Return a text field of the recipe, or None."""
        part = _read_recipe(self.folder.recipe).get(section)
        value = part.get(name) if isinstance(part, dict) else None
        return value if isinstance(value, str) else None


class Runs:
    """All runs of the named folders; stages are added when a run reaches them."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises ViewError if a folder is not a run."""
        self._roots = list(dict.fromkeys(folder.expanduser().resolve() for folder in folders))
        for root in self._roots:
            _check_run(root)
        self._labels = _labels(self._roots)
        self._known: dict[Path, Run] = {}

    def find(self) -> list[Run]:
        """Return the runs that exist now, in the order of the folders and stages."""
        found: list[Run] = []
        for root in self._roots:
            label = self._labels[root]
            parts = [self._run(part, f"{label}/{part.name}") for part in _parts(root) if part not in self._roots]
            parts = [run for run in parts if run.has_data()]
            whole = self._run(root, label)
            found += [whole, *parts] if whole.has_data() or not parts else parts
        return found

    def _run(self, path: Path, label: str) -> Run:
        if path not in self._known:
            self._known[path] = Run(path, label)
        return self._known[path]


def _parts(root: Path) -> list[Path]:
    """Return the folders of the stages in order, then folders that other commands wrote next to them."""
    folders = sorted(path.parent for path in root.glob(f"*/{RECIPE}") if _is_text(path.parent.name))
    stages = _read_recipe(root / RECIPE).get("stages")
    names = [stage.get("name") for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
    return sorted(folders, key=lambda path: names.index(path.name) if path.name in names else len(names))


def _check_run(root: Path) -> None:
    if (root / RECIPE).is_file():
        if not any(map(_has_begun, [root, *_parts(root)])):
            fix = "name the `output` folder of a run, such as runs/NAME"
            raise ViewError(f"{root} has a {RECIPE}, but nothing that a run has written; fix: {fix}")
        return
    if not root.is_dir():
        raise ViewError(f"{root}: no such folder; fix: name the folder of a run, such as runs/NAME")
    inside = sorted(path.parent.name for path in root.glob(f"*/{RECIPE}"))[:3]
    fix = f"name a run in it, such as {root / inside[0]}" if inside else "name the `output` folder of a run"
    raise ViewError(f"{root} is no run folder, for it has no {RECIPE}; fix: {fix}")


def _has_begun(path: Path) -> bool:
    """Return whether a run has written to this folder; the folder of a task has a recipe, too."""
    folder = RunFolder(path)
    written = (folder.metrics, folder.trajectories, folder.checkpoints, folder.logs, folder.summary)
    return any(part.exists() for part in written)


def _labels(roots: Sequence[Path]) -> dict[Path, str]:
    """Return the shortest ends of the paths that distinguish them."""
    longest = max(len(root.parts) for root in roots)
    for count in range(1, longest + 1):
        labels = {root: "/".join(root.parts[-count:]) for root in roots}
        if len(set(labels.values())) == len(roots):
            return labels
    raise AssertionError("resolved paths differ")


def _is_text(name: str) -> bool:
    """Return whether a file's name can be used in URLs and JSON."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_recipe(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
