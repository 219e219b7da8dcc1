"""The files of a run: recipe.yaml, metrics.jsonl, trajectories/, images/, checkpoints/, logs/, summary.json."""

import errno
import fcntl
import json
import mmap
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

from agentfactory.base.files import untrusted_files
from agentfactory.base.files.disk import append, refusal, write_whole
from agentfactory.base.files.lock_file import holder, open_lock
from agentfactory.base.files.untrusted_files import RefusedFileError, check_tree, read_json
from agentfactory.recipe.composition import display, resolve_saved
from agentfactory.recipe.yaml_text import RECIPE_BYTES, parse_saved
from agentfactory.rollout.groups.group_files import CREDIT_FILE, arrays_file, train_files
from agentfactory.trainers.checkpoints.checkpoint_folder import INFO, checkpoints, read_info

RECIPE = "recipe.yaml"
ADAPTER = "adapter_config.json"

_PREPARED = "prepared"  # folder that the user's `prepare` fills, and may replace with a link
_BESIDE = re.compile(r"(eval|rollout|serve)(-\d+)?")
"""Run folders below `output` that commands other than `train` write."""


class RunFolderError(Exception):
    """The folder cannot be used for the run; the message gives the reason and a fix."""


class RunFolder:
    """The folder that one run writes to. `on_log`, such as `Progress.update`, also gets every line of metrics. Links
    below the folder `within` are not followed; for a stage of an untrusted run, it is the folder of the whole run."""

    def __init__(self, path: Path, on_log: Callable[[dict[str, Any]], None] | None = None, within: Path | None = None):
        self.path = path
        self.within = within or path
        self.on_log = on_log
        self.recipe = path / RECIPE
        self.assignment = path / "assignment.json"
        self.metrics = path / "metrics.jsonl"
        self.trajectories = path / "trajectories"
        self.images = path / "images"
        """The images of chains, each stored once; checkpoints do not copy them."""
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.parts = (self.trajectories, self.checkpoints, self.logs)
        self.sync = path / "sync"
        self.summary = path / "summary.json"
        self.credit = self.trajectories / CREDIT_FILE
        self._stopping = path / ".stopping"

    @classmethod
    def create(cls, path: Path, recipe: str, overwrite: bool = False, keep_prepared: bool = False) -> "RunFolder":
        """Create the folder with the resolved recipe. Raises RunFolderError if something is there; `overwrite` deletes
        a run, except those of `eval`, `rollout` and `serve`, and what was prepared if `keep_prepared`."""
        check_free(path, overwrite)
        folder = cls(path)
        with _usable(path):
            if is_run(path):
                shutil.rmtree(path)
            elif not keep_prepared and (prepared := path / _PREPARED).exists():
                prepared.unlink() if prepared.is_symlink() else shutil.rmtree(prepared)
            for part in folder.parts:
                part.mkdir(parents=True, exist_ok=True)
            folder.recipe.write_text(recipe, encoding="utf-8")
        return folder

    @classmethod
    def reopen(cls, path: Path, recipe: str) -> "RunFolder":
        """Open the folder of a run that continues, with this recipe. Raises RunFolderError if there is no run."""
        folder = cls(path)
        with _usable(path):
            folder.need_run()
            write_whole(folder.recipe, recipe.encode())
            folder.summary.unlink(missing_ok=True)
        return folder

    def log(self, metrics: dict[str, Any]) -> None:
        append(self.metrics, json.dumps(metrics, ensure_ascii=False) + "\n")
        if self.on_log:
            self.on_log(metrics)

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_whole(self.summary, f"{json.dumps(summary, indent=2, ensure_ascii=False)}\n".encode())

    def read_summary(self) -> dict[str, Any]:
        """Return summary.json, empty if there is none. Raises OSError or ValueError."""
        try:
            return read_json(self.summary, self.within)
        except FileNotFoundError:
            return {}

    def read_recipe(self) -> str:
        """Return the resolved recipe, as YAML. Raises OSError or ValueError if it cannot be read."""
        return untrusted_files.read_file(self.recipe, RECIPE_BYTES, self.within).decode()

    def read_metrics(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of metrics.jsonl. Skip a last line that a kill has truncated."""
        with suppress(FileNotFoundError), untrusted_files.open_file(self.metrics, self.within) as file:
            for line in untrusted_files.lines_of(file):
                if line.endswith(b"\n"):
                    yield json.loads(line)

    def growing(self) -> dict[str, Path]:
        """Return, by relative path, the existing files that a run appends to and a resumed run continues."""
        groups = train_files(self.trajectories)
        # a worker may append meanwhile: sizes taken in this order include the arrays of every line
        files = [self.metrics, self.credit, *groups, *map(arrays_file, groups)]
        return {str(file.relative_to(self.path)): file for file in files if file.exists()}

    def cut(self, sizes: Mapping[str, int]) -> None:
        """Truncate the growing files to these sizes in bytes (missing: 0), and JSONL files further to whole lines."""
        for name, file in self.growing().items():
            size = min(sizes.get(name, 0), file.stat().st_size)
            if file.suffix == ".jsonl":
                whole = 0
                with file.open("rb+") as lines:
                    if size:
                        with mmap.mmap(lines.fileno(), size, access=mmap.ACCESS_READ) as content:
                            whole = content.rfind(b"\n") + 1
                    lines.truncate(whole)
            else:
                os.truncate(file, size)

    @property
    def whole(self) -> Path:
        """The outermost run folder around this one, which users move as a unit."""
        return next((path for path in reversed(self.path.parents) if is_run(path)), self.path)

    def read_part(self, part: "RunFolder") -> dict[str, Any]:
        """Return the summary of `part`, a stage of this run, with paths relative to this folder."""
        summary, below = part.read_summary(), part.path.relative_to(self.path)
        if summary.get("checkpoint"):
            summary["checkpoint"] = str(below / summary["checkpoint"])
        if best := summary.get("best_checkpoint"):
            summary["best_checkpoint"] = {**best, "path": str(below / best["path"])}
        return summary

    @property
    def title(self) -> str:
        """The run's name in trackers: its folder's name; for a stage, prefixed with the name of the whole run."""
        around = RunFolder(self.path.parent)
        return f"{around.path.name}-{self.path.name}" if self.path.name in around.stage_names() else self.path.name

    def stage_names(self) -> list[str]:
        """Return the names of the recipe's stages; none if it has none or cannot be read."""
        try:
            recipe = parse_saved(self.read_recipe())
        except (OSError, ValueError):
            return []
        stages = recipe.get("stages") if isinstance(recipe, dict) else None
        found = [stage.get("name") for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
        return [name for name in found if isinstance(name, str)]

    def note_credit(self, lines: list[str]) -> None:
        """Append lines to trajectories/credit.jsonl; if there are none, the file is not created."""
        if lines:
            append(self.credit, "".join(f"{line}\n" for line in lines))

    def note_stopping(self) -> None:
        """Record that the trainer was asked to stop; it first finishes its step and writes a checkpoint."""
        self._stopping.touch()

    def note_stopped(self) -> None:
        self._stopping.unlink(missing_ok=True)

    def is_finishing(self) -> bool:
        """Return whether the trainer would lose work if it were killed now."""
        return self._stopping.exists() or any(self.checkpoints.glob(".step-*.partial"))

    def last_checkpoint(self) -> Path | None:
        """Return the checkpoint of the highest step; None if there is none. Raises RunFolderError if one is a link."""
        try:
            found = checkpoints(self.checkpoints, self.within)
        except RefusedFileError as error:
            raise RunFolderError(str(error)) from None
        return found[-1] if found else None

    def need_run(self) -> None:
        """Raise RunFolderError if there is no run to resume, or its folder holds links or other special files."""
        if not os.path.lexists(self.recipe):
            raise RunFolderError(f"--resume: there is no run in {self.path}; fix: leave out --resume")
        self.check_entries("--resume")

    def check_entries(self, option: str) -> None:
        """Raise RunFolderError, for `option`, if one of the entries is no regular file or folder."""
        try:
            for name, kind in untrusted_files.entries_of(self.path, self.within).items():
                if kind not in (stat.S_IFREG, stat.S_IFDIR) and name != _PREPARED:
                    raise untrusted_files.refused(self.path / name, kind)
            for part in (*self.parts, self.sync):
                check_tree(part, self.within)
            # a long run has many images, and each is checked when it is read
            check_tree(self.images, self.within, depth=0)
        except OSError as error:
            raise RunFolderError(f"{option}: {error}") from None

    def need_checkpoint(self) -> Path:
        """Return the checkpoint of the highest step. Raises RunFolderError if there is none."""
        checkpoint = self.last_checkpoint()
        if checkpoint is None:
            raise RunFolderError(f"{self.checkpoints} holds no checkpoint; fix: run `agentfactory train` first")
        return checkpoint


class Hold(AbstractContextManager["Hold"]):
    """A lock on a run, which excludes other launchers and trainers. Children do not inherit it."""

    def __init__(self, path: Path):
        self._path = path
        self._file = path / ".lock"
        self._held: int | None = None

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def take(self, make: bool = False) -> None:
        """Lock the run, if there is one; `make`: create the lock file. Raises RunFolderError if it is held."""
        if self._held is not None:
            return
        try:
            opened = open_lock(self._file, make)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise _unusable(self._path, error) from error
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            os.close(opened)
            raise RunFolderError(f"output: {self._file} is not a regular file; fix: delete it")
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            wrote, holds = os.pread(opened, 20, 0).decode(errors="replace"), holder(opened)
            os.close(opened)
            if holds.split()[:2] == ["pid", wrote] or not holds.startswith("pid "):
                problem, fix = f"a run is alive there (pid {wrote})", "wait for it, end it, or output=OTHER"
            else:
                problem = f"{holds} holds the lock {self._file.name}, but the run that wrote it is pid {wrote}"
                fix = f"end that process, or remove {self._file}: only you can open a new one"
            raise RunFolderError(f"output: {self._path}: {problem}; fix: {fix}") from None
        except OSError:
            # a filesystem without locks: no process can lock there, so continue without a lock
            os.close(opened)
            return
        self._held = opened
        os.ftruncate(opened, 0)
        os.pwrite(opened, str(os.getpid()).encode(), 0)


def check_run_of(recipe: Path) -> None:
    """Raise RunFolderError if the file `recipe` is in a run folder with links or other special files."""
    folder = RunFolder(recipe.parent)
    # a folder with only some of them is not a task either
    if recipe.name == RECIPE and any(map(os.path.lexists, folder.parts)):
        folder.check_entries("recipe")


def is_run(path: Path) -> bool:
    """Return whether `path` is a run folder. A folder with only a recipe, such as a task's, is not."""
    folder = RunFolder(path)
    return folder.recipe.is_file() and all(map(Path.is_dir, folder.parts))


def is_free(path: Path) -> bool:
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def _waits_for_run(path: Path) -> bool:
    """Return whether `path` has nothing but what `eval`, `rollout`, `serve` and `prepare` write before the run."""
    if not path.is_dir():
        return False
    names = {entry.name for entry in path.iterdir()}
    runs = {name for name in names if _BESIDE.fullmatch(name) and is_run(path / name)}
    has_log = (path / "logs" / "prepare.log").is_file()
    return (bool(runs) or has_log) and names - runs <= {_PREPARED, f".{_PREPARED}.partial", "logs", ".lock"}


def check_writable(path: Path) -> None:
    """Raise RunFolderError unless files can be written in `path`, which need not exist."""
    with _usable(path):
        there = next(place for place in (path, *path.parents) if place.exists())
        if not there.is_dir():
            raise RunFolderError(f"output: {there} is a file; fix: output=OTHER")
        if (error := refusal(there)) is not None:
            # omit the name of the probe file
            raise OSError(error.errno, error.strerror)


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, error: OSError) -> RunFolderError:
    where = error.filename if isinstance(error.filename, str) and Path(error.filename).is_relative_to(path) else path
    fix = "raise the limit of file sizes (ulimit -f)" if error.errno == errno.EFBIG else "output=OTHER"
    return RunFolderError(f"output: {where} cannot be written: {error.strerror}; fix: {fix}")


def check_free(path: Path, overwrite: bool) -> None:
    """Raise RunFolderError unless a run may be written to `path`."""
    check_writable(path)
    if is_free(path) or _waits_for_run(path):
        return
    if not is_run(path):
        # a typo must not delete a folder
        kept = ", so --overwrite leaves it alone" if overwrite else ""
        raise RunFolderError(f"output: {path} is not empty and not a run folder{kept}; fix: output=OTHER")
    if not overwrite:
        fix = "output=OTHER for another run, --resume to continue this one, or --overwrite to delete it"
        raise RunFolderError(f"output: {path} holds {_described(path)}; fix: {fix}")


def _described(path: Path) -> str:
    try:
        saved = parse_saved(RunFolder(path).read_recipe())
        name, first = saved["name"], Path(saved["import_path"][0])
    except (OSError, ValueError, LookupError, TypeError):
        return "a run"
    # a run in the recipe's own folder stores that folder as a relative path
    return f"the run {name!r}" + (f" of the recipe in {display(first)}" if first.is_absolute() else "")


def base_of_adapter(checkpoint: Path) -> str:
    """Return the folder or hub name of an adapter's model. Raises RunFolderError if it is missing."""
    base = named_base(checkpoint)
    if os.path.isabs(base) and not Path(base).is_dir():
        raise RunFolderError(f"{checkpoint} is an adapter for {base}, which does not exist; fix: move or link it there")
    return base


def named_base(checkpoint: Path) -> str:
    """Return folder or hub name of an adapter's base; one in a run folder may have moved. Raises RunFolderError."""
    try:
        if (checkpoint / INFO).is_file():
            saved = read_info(checkpoint)["recipe"]
            run = checkpoint.resolve().parents[1]
            inside = str(resolve_saved(saved, run)["model"]["path"])
            if inside != saved["model"]["path"] and Path(inside).is_dir():
                return inside
        return str(read_json(checkpoint / ADAPTER, checkpoint)["base_model_name_or_path"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        fix = "name another checkpoint"
        raise RunFolderError(f"{checkpoint}: its base model cannot be read: {error!r}; fix: {fix}") from None


def next_free(path: Path) -> Path:
    """Return `path`, or the first of path-2, path-3, ... that does not exist."""
    further = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return next(candidate for candidate in chain([path], further) if not os.path.lexists(candidate))
