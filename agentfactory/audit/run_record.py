"""The records of the runs at a path: of AgentFactory's own, one per stage with chains, or of another project's."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentfactory.audit.foreign import read as read_foreign
from agentfactory.audit.record import HELD_OUT, METRICS, READ, RECIPE, TRAINED, Record, Seen
from agentfactory.base.errors import SettingError
from agentfactory.base.files.untrusted_files import lines_of, open_file
from agentfactory.base.findings import Evidence, Finding, Severity
from agentfactory.launching.run_folder import RECIPE as RECIPE_FILE
from agentfactory.launching.run_folder import RunFolder, RunFolderError, check_run_of, is_run
from agentfactory.recipe.checks import check_recipe
from agentfactory.recipe.load import load_recipe
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.groups.group_files import CREDIT_FILE, UNFINISHED, read_groups, train_files
from agentfactory.trainers.checkpoints.checkpoint_folder import read_info

KIND = "agentfactory"
_EVALUATED = re.compile(r"(?:(\d+)|.*)-(sampled|greedy)")
"""Name of a file of held-out chains: the step, and the mode."""
_LABEL = re.compile(r".*-v(\d+)")
_FAR = 1e300
_KNOWN = {"reward", "loss", "grad_norm", "entropy", "learning_rate", "success", "sync/canary_drift", "sync/provable"}
"""Figures that are read: they must be numbers."""
_LIVE = re.compile(rb"version (\d+) \(([^()]+)\) is live as ")


def records_of(path: Path) -> list[Record]:
    """Return a record of the run in the folder `path`; of a run with stages, one for each that has chains. Empty if
    there is no run. Raises RunFolderError if the folder holds links or other special files."""
    if not is_run(path):
        return []
    whole = RunFolder(path)
    folders = [RunFolder(path / name, within=path) for name in whole.stage_names() if is_run(path / name)] or [whole]
    for folder in folders:
        folder.check_entries("RUN")
    records = [_record(folder, whole) for folder in folders]
    return [record for record in records if record.size or record.metrics] or records[-1:]


def _record(folder: RunFolder, whole: RunFolder) -> Record:
    name = folder.path.name if folder is whole else f"{whole.path.name}/{folder.path.name}"
    files = _Files(folder)
    record = Record(name, KIND, folder.path, files.groups)
    files.problems = record.problems
    lacks: dict[str, str] = {}
    try:
        if folder.recipe.stat().st_uid != os.geteuid():
            raise SettingError("", "it is another user's, and its code is not run", "copy the folder to audit it whole")
        recipe = load_recipe(folder.recipe)
        check_recipe(recipe, lacks=[])
        assert isinstance(recipe, Recipe)
        record.recipe = recipe
    except (SettingError, OSError, ValueError) as error:
        lacks[RECIPE] = f"{RECIPE_FILE} cannot be used here: {error}"
    try:
        lines = list(folder.read_metrics())
        record.metrics = [found for line in lines if (found := _figures(line)) is not None]
        if len(record.metrics) < len(lines):
            fault = ValueError(f"{len(lines) - len(record.metrics)} lines are no steps with numbers")
            record.problems.append(_unreadable("metrics.jsonl", fault))
    except (OSError, ValueError) as error:
        record.problems.append(_unreadable("metrics.jsonl", error))
    if not record.metrics:
        lacks[METRICS] = "metrics.jsonl has no lines"
    try:
        summary = folder.read_summary()
        numbers = ("success_before", "success_after", "reward_after", "greedy_after", "steps")
        bad = [name for name in numbers if not isinstance(summary.get(name, 0), int | float | None)]
        bad += [name for name in ("reason", "status") if not isinstance(summary.get(name, ""), str)]
        if bad:
            record.problems.append(_unreadable("summary.json", ValueError(f"{bad[0]} is {summary[bad[0]]!r}")))
        record.summary = {name: value for name, value in summary.items() if name not in bad}
    except (OSError, ValueError) as error:
        record.problems.append(_unreadable("summary.json", error))
    files.is_complete = record.summary.get("status") == "completed"
    files.index_credit()
    if not files.credit:
        lacks[TRAINED] = "there is no trajectories/credit.jsonl"
    if not files.held_out:
        lacks[HELD_OUT] = "there are no held-out chains"
    record.trained = Counter(lines[-1].step for lines in files.credit.values())
    record.size = files.count()
    record.labels = _labels(folder)
    record.lacks = lacks
    return record


def _labels(folder: RunFolder) -> dict[str, int]:
    """Return the versions of labels of weights: those of the last checkpoint, and younger ones from the log."""
    found: dict[str, int] = {}
    for checkpoint in sorted(folder.checkpoints.glob("step-*"), reverse=True):
        try:
            labels: Any = read_info(checkpoint, folder.within).get("labels")
        except (OSError, ValueError):
            continue
        if isinstance(labels, dict):
            found = {label: version for label, version in labels.items() if type(version) is int}
            break
    try:
        with open_file(folder.logs / "train.log", folder.within) as log:
            for line in lines_of(log):
                if live := _LIVE.search(line):
                    found[live[2].decode("utf-8", "replace")] = int(live[1])
    except OSError:
        pass
    return found


def _figures(line: Any) -> dict[str, Any] | None:
    """Return the numbers of a line of metrics; None if it is no step of a run."""
    if not isinstance(line, dict) or type(line.get("step")) is not int:
        return None
    found = {name: value for name, value in line.items() if type(value) in (int, float) and abs(value) < _FAR}
    others = {name: float("nan") for name, value in line.items() if type(value) is float and value != value}
    whole = len(found) + len(others) == len(line)
    return {**found, **others} if whole or not _KNOWN & (line.keys() - found.keys() - others.keys()) else None


def version_of(record: Record, label: str) -> int | None:
    """Return the version of the weights called `label`; None for weights of another run."""
    if label in record.labels:
        return record.labels[label]
    # published after the last checkpoint
    known = {name.rpartition("-v")[0] for name in record.labels}
    found = _LABEL.fullmatch(label)
    return int(found[1]) if found and (not known or label.rpartition("-v")[0] in known) else None


@dataclass(frozen=True)
class _CreditLine:
    step: int
    offset: int
    length: int


class _Files:
    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.trained = train_files(folder.trajectories)
        self.held_out: dict[Path, tuple[int | None, str]] = {}
        for file in sorted(folder.trajectories.rglob("*.jsonl")):
            if file.parent.name != UNFINISHED and (found := _EVALUATED.fullmatch(file.stem)):
                self.held_out[file] = (int(found[1]) if found[1] else None, found[2])
        others = {*folder.trajectories.glob("*.jsonl")} - {*self.trained, *self.held_out, folder.credit}
        self.trained += sorted(others)
        self.credit: dict[str, list[_CreditLine]] = {}
        self.problems: list[Finding] = []
        self.is_complete = False
        """True if the run has ended, so that its files are whole."""

    def count(self) -> int:
        return sum(content.count(b"\n") for file in self.trained for content in self._blocks(file))

    def _blocks(self, file: Path) -> Iterator[bytes]:
        with open_file(file, self.folder.within) as content:
            while block := content.read(1 << 20):
                yield block

    def index_credit(self) -> None:
        if not self.folder.credit.exists():
            return
        offset, damaged = 0, []
        with open_file(self.folder.credit, self.folder.within) as content:
            for line in lines_of(content):
                # the fields of a line are in this order, and the rest is long
                head = re.match(rb'\{"group": ?"([^"]*)", ?"step": ?(\d{1,9}), ?"chains": ?\{', line)
                if head and line.endswith(b"}\n"):
                    place = _CreditLine(int(head[2]), offset, len(line))
                    self.credit.setdefault(head[1].decode("utf-8", "replace"), []).append(place)
                elif line.endswith(b"\n"):
                    damaged.append(offset)
                offset += len(line)
        if damaged:
            found = ValueError(f"{len(damaged)} lines are none of ours, the first at byte {damaged[0]}")
            self.problems.append(_unreadable(CREDIT_FILE, found))

    def groups(self) -> Iterator[Seen]:
        """Yield the groups of all files; what cannot be read becomes a problem."""
        for file in self.trained:
            yield from self._groups(file)
        for file, (step, mode) in self.held_out.items():
            yield from self._groups(file, step, mode)

    def _groups(self, file: Path, step: int | None = None, mode: str = "") -> Iterator[Seen]:
        name = str(file.relative_to(self.folder.path))
        try:
            for group in read_groups(file):
                lines = [] if mode else self.credit.get(group.id, [])
                trained = lines[-1].step if lines else None
                yield Seen(group, name, mode, step if mode else trained, self._credit(lines[-1:]))
        except (OSError, ValueError) as error:
            if not self.is_complete and not _ends_in_a_line(file):
                return  # the last group is still being written, or the run was killed meanwhile
            self._note(_unreadable(name, error))

    def _credit(self, lines: list[_CreditLine]) -> dict[str, Any]:
        for place in lines:
            with open_file(self.folder.credit, self.folder.within) as content:
                content.seek(place.offset)
                try:
                    chains: Any = json.loads(content.read(place.length))["chains"]
                except (ValueError, LookupError, TypeError, RecursionError) as error:
                    self._note(_unreadable(CREDIT_FILE, ValueError(f"byte {place.offset}: {error!r}")))
                    return {}
                return chains if isinstance(chains, dict) else {}
        return {}

    def _note(self, found: Finding) -> None:
        if found not in self.problems:
            self.problems.append(found)


def _ends_in_a_line(file: Path) -> bool:
    with file.open("rb") as content:
        size = content.seek(0, 2)
        content.seek(max(0, size - 1))
        return content.read(1) in (b"\n", b"")


def _unreadable(name: str, error: Exception) -> Finding:
    fix = "copy the run folder again, or remove the damaged line"
    return Finding(Severity.WRONG, READ, f"{name} cannot be read", fix, [Evidence(str(error), file=name)])


def records_at(path: Path) -> list[Record]:
    """Return the records of the run at `path`, one for each of its stages. Raises SettingError if there is none, if
    another project's files are damaged, or if the folder of the run has links or other special files."""
    if not path.exists():
        raise SettingError("RUN", f"there is no {path}", "name the folder of a run, such as runs/quickstart")
    # first, because a folder with `logs` looks like a run of ours
    if (foreign := read_foreign(path)) is not None:
        return [foreign]
    try:
        check_run_of(path / RECIPE_FILE)
        found = records_of(path)
    except RunFolderError as error:
        problem, _, fix = str(error).partition("; fix: ")
        raise SettingError("RUN", problem, fix or "name another folder") from None
    if not found:
        fix = "name a folder that `agentfactory train` has written, or files of one of the projects in docs/audit.md"
        raise SettingError("RUN", f"{path} is no run", fix)
    return found
