"""Checkpoint folders on disk: names, integrity, information, pruning. Does not need torch."""

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentfactory.base.files import untrusted_files
from agentfactory.base.files.disk import filled, set_usual_modes, writing
from agentfactory.base.messages import is_finite_number

INFO = "trainer_state.json"
DIGESTS = "digests.json"
ONLY_BEST = "only_best"
"""Key in INFO; true: the checkpoint was not due, but was written because its evaluation was the best so far."""


_NAME = re.compile(r"step-\d{1,18}")


class DamagedCheckpointError(Exception):
    """A checkpoint differs from its digests; the message names the file."""


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def checkpoints(folder: Path, within: Path | None = None) -> list[Path]:
    """Return the checkpoints in `folder`, in the order of their steps; links below `within` are not followed. Raises
    RefusedFileError if `folder` or one of them is not a folder."""
    found = []
    for name, kind in untrusted_files.entries_of(folder, within or folder).items():
        if _NAME.fullmatch(name):
            if kind != stat.S_IFDIR:
                raise untrusted_files.refused(folder / name, kind)
            found.append(folder / name)
    return sorted(found, key=step_of)


def read_info(path: Path, within: Path | None = None) -> dict[str, Any]:
    """Return the contents of `trainer_state.json`; links below `within` (None: in the checkpoint) are not followed.
    Raises OSError or ValueError if it cannot be read."""
    return untrusted_files.read_json(path / INFO, within or path)


def partial_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


@contextmanager
def written_aside(path: Path, digests: dict[str, str] | None = None) -> Iterator[Path]:
    """Yield the folder `partial_path` for a checkpoint; then add digests, make it durable and rename it, or delete it.

    `digests` are, by then, the known digests of some files, by their names within the folder. Raises FileExistsError if
    `path` already exists, and DiskError if the disk is full."""
    if path.exists():
        raise FileExistsError(f"{path} already exists: a run never overwrites a checkpoint")
    with filled(path) as aside:
        try:
            with writing(path):
                yield aside
                known = digests or {}
                found = {name: known.get(name) or digest(aside / name) for name in files_of(aside)}
                (aside / DIGESTS).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
                set_usual_modes(aside)
                for entry in [*aside.rglob("*"), aside]:
                    flush(entry)
        except BaseException:
            shutil.rmtree(aside)
            raise
    flush(path.parent)


def files_of(folder: Path) -> list[str]:
    return [str(file.relative_to(folder)) for file in sorted(folder.rglob("*")) if file.is_file()]


def verify(path: Path) -> list[str]:
    """Return the names of all files with a digest. Raises DamagedCheckpointError unless all match."""
    try:
        digests = untrusted_files.read_json(path / DIGESTS, path)
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {DIGESTS} cannot be read ({error})") from None
    if not digests:
        raise DamagedCheckpointError(f"{path} is damaged: {DIGESTS} lists no files")
    try:
        untrusted_files.check_tree(path, path)
        for name, expected in digests.items():
            if digest(path / name, path) != expected:
                raise DamagedCheckpointError(f"{path} is damaged: {name} does not match its digest (sha256)")
    except FileNotFoundError as error:
        gone = Path(error.filename).relative_to(path)
        raise DamagedCheckpointError(f"{path} is damaged: {gone} is missing") from None
    except (OSError, ValueError) as error:
        # ValueError: a name that leads out of the folder
        raise DamagedCheckpointError(f"{path} is damaged: {error}") from None
    return list(digests)


def newest_whole(paths: list[Path]) -> Path | None:
    for path in reversed(paths):
        with suppress(DamagedCheckpointError):
            verify(path)
            return path
    return None


def prune(folder: Path, keep_last: int | None, best: Path | None) -> None:
    """Delete leftovers of killed runs, and all checkpoints except the `keep_last` newest (None: all) and the `best`
    one. A checkpoint that was written only because it was the best is deleted once it no longer is."""
    for left in [*folder.glob(".step-*.partial"), *folder.glob(".step-*.deleted")]:
        shutil.rmtree(left)
    found = checkpoints(folder)
    due = [path for path in found if not read_info(path).get(ONLY_BEST)]
    kept = {*(due if keep_last is None else due[-keep_last:]), best}
    for path in found:
        if path not in kept:
            # rename first: a half-deleted folder must not be mistaken for a checkpoint
            doomed = path.with_name(f".{path.name}.deleted")
            path.rename(doomed)
            shutil.rmtree(doomed)


def digest(file: Path, within: Path | None = None) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal. Links below the folder `within` are not followed."""
    with untrusted_files.open_file(file, within) as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Make a file or a folder's entries durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


AUTO = "auto"
BY_EVALUATION = ("eval/sampled/success", "eval/sampled/reward")
"""Metrics for AUTO: the first one that a run has is used."""


@dataclass(frozen=True)
class BestCheckpoint:
    path: Path
    step: int
    metric: str
    value: float


def find_best(checkpoints: Sequence[Path], metric: str | None, within: Path | None = None) -> BestCheckpoint | None:
    """Return the checkpoint with the highest value (of several, the newest) of `metric`, a value of `train.keep_best`;
    None if none has a finite one. Links below `within` (None: in the checkpoint) raise RefusedFileError."""
    measured = {}
    for path in checkpoints:
        try:
            measured[path] = read_info(path, within)["metrics"]
        except untrusted_files.RefusedFileError:
            raise
        except (OSError, ValueError, LookupError):
            continue  # deleted in the meantime, or written by another program
    for name in metric_names(metric):
        values = {path: figure(figures, name) for path, figures in measured.items()}
        if found := [BestCheckpoint(path, step_of(path), name, v) for path, v in values.items() if v is not None]:
            return max(found, key=lambda best: (best.value, best.step))
    return None


def metric_names(wanted: str | None) -> tuple[str, ...]:
    """Return the metrics for a value of `train.keep_best`; the first one that exists is used."""
    if wanted is None:
        return ()
    return BY_EVALUATION if wanted == AUTO else (wanted,)


def figure(figures: Any, name: str) -> float | None:
    """Return the finite number called `name`, else None: with NaN, the maximum would depend on the order."""
    value = figures.get(name) if isinstance(figures, Mapping) else None
    return value if is_finite_number(value) else None
