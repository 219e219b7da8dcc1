"""The runs to show, found in the folders that the user names, and their data so far."""

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.utils import HFValidationError, validate_repo_id
from pydantic_core import from_json

from agentfactory.base.errors import SettingError
from agentfactory.base.files import untrusted_files as untrusted
from agentfactory.launching.run_folder import RECIPE, RunFolder
from agentfactory.recipe.composition import resolve_saved
from agentfactory.recipe.yaml_text import RECIPE_BYTES, YamlBoundsError, parse_saved
from agentfactory.rollout.groups.group_files import CREDIT_FILE
from agentfactory.trainers.checkpoints.checkpoint_folder import BestCheckpoint, checkpoints, find_best
from agentfactory.viewer.runs.growing_file import GrowingFile

_MOST_PROBLEMS = 20
_MOST_STEPS, _MOST_FIGURES = 1_000_000, 100_000
"""Maximum lines of metrics that are shown, and values in a line."""


@dataclass(frozen=True)
class CreditLine:
    """The location of the trainer's line about a group, and the step that trained the group."""

    offset: int
    length: int
    step: int


class Run:
    """One run or stage: the data read so far. Links below `within`, the folder that a user named, are not followed."""

    def __init__(self, path: Path, label: str, within: Path) -> None:
        self.id = _id_of(path)
        """Stable identifier, which is part of URLs."""
        self.whole = _id_of(within)
        """Identifier of the whole run, which its stages share."""
        self.label = label
        self.folder = RunFolder(path, within=within)
        self.generation = 0
        """Number of times that metrics.jsonl has restarted."""
        self._begin()

    def _begin(self) -> None:
        self.problems: list[str] = []
        self.lines: list[dict[str, Any]] = []
        self.metrics_file = GrowingFile(self.folder.metrics, self.folder.within)
        self.files: dict[str, GrowingFile] = {}
        """Trajectory files by their path within `trajectories`."""
        self.credit_file = GrowingFile(self.folder.credit, self.folder.within)
        self.credit: dict[str, CreditLine] = {}
        self.best: BestCheckpoint | None = None
        """The best checkpoint by the metric that train.keep_best names, if it names one."""
        self.supervised = False
        self._model: str | None = None
        self._checkpoints_seen: list[tuple[str, int]] = []
        self._recipe = _RecipeFile(self.folder)

    def forget(self) -> None:
        """Drop the data of a run that is gone, such as a deleted stage. If it reappears, read it from the beginning."""
        self._begin()
        self.generation += 1

    @property
    def path(self) -> Path:
        return self.folder.path

    def has_data(self) -> bool:
        return os.path.lexists(self.folder.metrics) or next(self._trajectory_files(), None) is not None

    def find_files(self) -> None:
        """Look for new trajectory files; note links and special files. Raises OSError if a folder cannot be read."""
        for name, kind in untrusted.entries_of(self.path, self.folder.within).items():
            if kind not in (stat.S_IFREG, stat.S_IFDIR) and _is_text(name):
                self.note_unreadable(untrusted.refused(self.path / name, kind))
        for path in self._trajectory_files():
            name = path.relative_to(self.folder.trajectories).as_posix()
            self.files.setdefault(name, GrowingFile(path, self.folder.within))

    def _trajectory_files(self) -> Iterator[Path]:
        for folder in (self.folder.trajectories, self.folder.trajectories / "eval"):
            try:
                names = list(untrusted.entries_of(folder, self.folder.within))
            except OSError as error:
                self.note_unreadable(error)
                continue
            for name in names:
                if name.endswith(".jsonl") and name != CREDIT_FILE:
                    if _is_text(name):
                        yield folder / name
                    else:
                        self.note(f"{name!a}: left out, because its name is not UTF-8")

    def saved_checkpoints(self) -> list[Path]:
        """Return the checkpoints in the order of their steps. Raises RefusedFileError if one is a link."""
        return checkpoints(self.folder.checkpoints, self.folder.within)

    def find_checkpoints(self) -> None:
        """Find the best checkpoint so far, and read the recipe's settings for display."""
        found = self.saved_checkpoints()
        try:
            seen = [(path.name, path.lstat().st_mtime_ns) for path in [self.folder.recipe, *found]]
        except FileNotFoundError:
            return  # the run is deleting checkpoints: the next call finds out
        if seen != self._checkpoints_seen:
            if (problem := self._recipe.problem()) is not None:
                self.note(problem)
            metric = self._setting("train", "keep_best")
            self.best = find_best(found, metric, self.folder.within)
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
                if len(self.lines) >= _MOST_STEPS or not untrusted.has_few_values(line, _MOST_FIGURES):
                    raise ValueError(f"more than {_MOST_STEPS:,} steps, or {_MOST_FIGURES:,} values in one")
                metrics = from_json(line)
                if not isinstance(metrics, dict):
                    raise ValueError("no JSON object")
            except ValueError as error:
                self.note_line(self.metrics_file.path, offset, error)
                continue
            self.lines.append(metrics)
        return bool(taken.lines) or taken.restarted

    def note_line(self, path: Path, offset: int, error: Exception) -> None:
        """Record that a line of a file cannot be read."""
        self.note(f"{self._line_of(path)}{offset}: {error}")

    def drop_problems(self, path: Path) -> None:
        """Drop the problems of a file's lines, because the file has restarted."""
        self.problems = [problem for problem in self.problems if not problem.startswith(self._line_of(path))]

    def _line_of(self, path: Path) -> str:
        return f"{path.relative_to(self.path)}, byte "

    def note_unreadable(self, error: OSError | ValueError) -> None:
        # name it without folders outside of the run, because an exported page is shared with others
        text = str(error).replace(f"{self.path}/", "").replace(f"{self.folder.within}/", "")
        if isinstance(error, OSError) and isinstance(error.filename, str):
            text = text.replace(error.filename, Path(error.filename).name)
        self.note(text)

    def note(self, problem: str) -> None:
        if problem not in self.problems and len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(problem)

    def status(self) -> str:
        """Return `completed`, `stopped` (train.stop_when), `failed`, `interrupted`, or `in progress`, which includes a
        run that was killed before it could write its summary."""
        summary = self.summary()
        if summary:
            return str(summary.get("status", "completed"))
        around = RunFolder(self.path.parent)
        whole = self._summary_of(around) if around.recipe.is_file() else {}
        status = str(whole.get("status", ""))
        return status if status in ("failed", "interrupted", "stopped") else "in progress"

    def summary(self) -> dict[str, Any]:
        """Return summary.json; empty until the run has ended."""
        return self._summary_of(self.folder)

    def _summary_of(self, folder: RunFolder) -> dict[str, Any]:
        try:
            return folder.read_summary()
        except (OSError, ValueError) as error:
            self.note(f"{folder.summary.name}: {error}".replace(f"{folder.path}/", ""))
            return {}

    def recipe(self) -> str:
        """Return the resolved recipe as YAML. Raises OSError or ValueError if it cannot be read."""
        return self.folder.read_recipe()

    def model_path(self) -> str | None:
        """Return the folder or name of the run's initial model."""
        path = self._setting("model", "path")
        return None if path is None or "\0" in path else resolve_saved({"path": path}, self.path)["path"]

    def model_file(self, name: str) -> tuple[Path, Path | None] | None:
        """Return a file of the run's initial model that is on this machine, and the folder below which it has no links;
        it may be missing. None if there is no such model, or if it is outside of the run folder and the recipe is
        another user's, because such a path may be private."""
        model = self.model_path()
        if not model:
            return None
        path = Path(os.path.normpath(model)) / name
        if os.path.isabs(model) and path.is_relative_to(self.folder.within):
            return path, self.folder.within
        if not self._recipe.is_own():
            self.note("model: not read, because the recipe is another user's and names one outside of the run")
            return None
        if os.path.isabs(model):
            return path, None
        # the viewer downloads nothing
        cached = try_to_load_from_cache(model, name) if _is_hub_name(model) else None
        return (Path(cached), None) if isinstance(cached, str) else None

    def coordinates(self, source: Any = None) -> str:
        """Return the model's image coordinates in chains of a source: its own, or `rollout.coordinates`."""
        data = self._recipe.data().get("data")
        sources = data.get("sources") if isinstance(data, dict) else None
        for own in sources if isinstance(sources, list) else ():
            if isinstance(own, dict) and own.get("name") == source and isinstance(own.get("coordinates"), str):
                return str(own["coordinates"])
        return self._setting("rollout", "coordinates") or "auto"

    def step(self) -> Any:
        """Return the last step in metrics.jsonl, or None."""
        return next((line["step"] for line in reversed(self.lines) if "step" in line), None)

    def weights(self) -> list[Path]:
        """Return candidates for the folder of the run's initial weights: the model of its recipe, and the checkpoint in
        its summary, because the model of a recipe with an adapter is the base."""
        return [Path(name) for name in (self._model, self.summary().get("checkpoint")) if isinstance(name, str)]

    def _setting(self, section: str, name: str) -> str | None:
        part = self._recipe.data().get(section)
        value = part.get(name) if isinstance(part, dict) else None
        return value if isinstance(value, str) else None


class _RecipeFile:
    """The recipe of a run, parsed again only if the file changes."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._seen: tuple[int, ...] = ()
        self._data: dict[str, Any] = {}
        self._problem: str | None = None
        self._owner = -1

    def data(self) -> dict[str, Any]:
        try:
            with untrusted.open_file(self._folder.recipe, self._folder.within) as file:
                status = os.fstat(file.fileno())
                seen = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                if seen != self._seen:
                    self._data, self._problem, self._owner = {}, None, status.st_uid
                    self._seen = seen
                    if status.st_size > RECIPE_BYTES:
                        raise ValueError(f"has more than {RECIPE_BYTES:,} bytes")
                    found = parse_saved(file.read(RECIPE_BYTES).decode())
                    if not isinstance(found, dict):
                        raise ValueError("holds no mapping")
                    self._data = found
        except OSError as error:
            self._data, self._problem, self._seen = {}, str(error).replace(f"{self._folder.path}/", ""), ()
        except ValueError as error:
            self._problem = f"{RECIPE}: {error}"
        return self._data

    def problem(self) -> str | None:
        self.data()
        return self._problem

    def is_own(self) -> bool:
        self.data()
        return self._owner == os.geteuid()


class Runs:
    """All runs of the named folders; stages are added when a run reaches them."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises SettingError if a folder is not a run."""
        self._roots = list(dict.fromkeys(folder.expanduser().resolve() for folder in folders))
        for root in self._roots:
            _check_run(root)
        self._labels = _labels(self._roots)
        self._known: dict[Path, Run] = {}
        self._recipes = {root: _RecipeFile(RunFolder(root)) for root in self._roots}

    def find(self) -> list[Run]:
        """Return the runs that exist now, in the order of the folders and stages."""
        found: list[Run] = []
        for root in self._roots:
            label = self._labels[root]
            stages = self._recipes[root].data().get("stages")
            entries = stages if isinstance(stages, list) else []
            names = [stage.get("name") for stage in entries if isinstance(stage, dict)]
            parts = [
                self._run(part, f"{label}/{untrusted.printable(part.name)}", root)
                for part in _parts(root, names)
                if part not in self._roots
            ]
            parts = [run for run in parts if run.has_data()]
            whole = self._run(root, label, root)
            shown = [whole, *parts] if whole.has_data() or not parts else parts
            if (problem := self._recipes[root].problem()) is not None:
                shown[0].note(problem)
            found += shown
        return found

    def _run(self, path: Path, label: str, within: Path) -> Run:
        if path not in self._known:
            self._known[path] = Run(path, label, within)
        return self._known[path]


def _id_of(path: Path) -> str:
    return hashlib.sha256(str(path).encode()).hexdigest()[:12]


def _parts(root: Path, names: Sequence[Any]) -> list[Path]:
    """Return the folders of the stages in order, then folders that other commands wrote next to them."""
    kinds = {name: kind for name, kind in untrusted.entries_of(root, root).items() if _is_text(name)}
    folders = [root / name for name, kind in kinds.items() if kind == stat.S_IFDIR]
    found = [folder for folder in folders if os.path.lexists(folder / RECIPE)]
    return sorted(found, key=lambda path: names.index(path.name) if path.name in names else len(names))


def _check_run(root: Path) -> None:
    if os.path.lexists(root / RECIPE):
        try:
            parse_saved(RunFolder(root).read_recipe())
        except untrusted.RefusedFileError as error:
            raise SettingError("", str(error)) from None
        except (OSError, YamlBoundsError) as error:
            fix = "put back the recipe that the run has written"
            raise SettingError("", f"{root / RECIPE} cannot be read: {error}", fix) from None
        except ValueError:
            pass  # the curves can be shown, and the page says so
        if not any(map(_has_begun, [root, *_parts(root, ())])):
            fix = "name the `output` folder of a run, such as runs/NAME"
            raise SettingError("", f"{root} has a {RECIPE}, but nothing that a run has written", fix)
        return
    if not root.is_dir():
        raise SettingError("", f"{root}: no such folder", "name the folder of a run, such as runs/NAME")
    inside = [path.name for path in _parts(root, ())][:3]
    fix = f"name a run in it, such as {root / inside[0]}" if inside else "name the `output` folder of a run"
    raise SettingError("", f"{root} is not a run folder, because it has no {RECIPE}", fix)


def _has_begun(path: Path) -> bool:
    """Return whether a run has written to this folder; the folder of a task has a recipe, too."""
    folder = RunFolder(path)
    written = (folder.metrics, folder.trajectories, folder.checkpoints, folder.logs, folder.summary)
    return any(map(os.path.lexists, written))


def _labels(roots: Sequence[Path]) -> dict[Path, str]:
    """Return the shortest ends of the paths that distinguish them."""
    longest = max(len(root.parts) for root in roots)
    for count in range(1, longest + 1):
        labels = {root: untrusted.printable("/".join(root.parts[-count:])) for root in roots}
        if len(set(labels.values())) == len(roots):
            return labels
    raise AssertionError("resolved paths differ")


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_hub_name(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
