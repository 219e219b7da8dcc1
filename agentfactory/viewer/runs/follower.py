"""A thread that reads new data of all runs while the page is open."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agentfactory.viewer.runs.chain_index import Index, Line, has_run_version, rows_of
from agentfactory.viewer.runs.run_data import CreditLine, Run, Runs
from agentfactory.viewer.runs.saved_groups import outline, read_bytes

_EVERY_SECONDS = 0.4
_IDLE_SECONDS = 15.0
"""Seconds after the last request when reading stops."""
_BYTES_AT_ONCE = 4 << 20
_MOST_STEPS = 1 << 63
"""Largest number that the index holds."""
_BAD_LINE = (ValueError, OverflowError)
"""Errors of a line that is invalid or has numbers too large for the index."""


class Follower:
    """The current data of the runs. `runs` is replaced, never mutated."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises SettingError if a folder is not a run."""
        self._all = Runs(folders)
        self.runs: list[Run] = self._all.find()
        self.index = Index()
        self._asked = time.monotonic()
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._follow, name="viewer-follower", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        self._thread.join()

    def asked(self) -> None:
        """Record a request, so that reading continues."""
        self._asked = time.monotonic()
        self._wake.set()

    def run(self, run_id: str) -> Run | None:
        return next((run for run in self.runs if run.id == run_id), None)

    def bytes_of(self, line: Line) -> bytes:
        """Return a line of the index. Raises OSError if it cannot be read, or its run is gone."""
        run = self.run(line.run)
        if run is None:
            raise FileNotFoundError(line.run)
        return read_bytes(run.folder.trajectories / line.file, line.byte, line.length, run.folder.within)

    def read_all(self) -> None:
        while self.read_some():
            pass

    def read_some(self) -> bool:
        """Read some of the new data, a little of each file; return whether there was any."""
        try:
            before, self.runs = self.runs, self._all.find()
        except OSError:
            before = []  # a folder is being deleted: the next call finds out
        for run in before:
            if run not in self.runs:
                for name in run.files:
                    self.index.forget(run.id, name)
                run.forget()
        for run in self.runs:
            self._read_part(run, run.find_files)
            self._read_part(run, run.find_checkpoints)
        # curves first: the page begins with them, and trajectories are many times larger
        if any([self._read_part(run, self._read_metrics, run) for run in self.runs]):
            return True
        return any([self._read_trajectories(run) for run in self.runs])

    def progress(self) -> dict[str, int]:
        """Return the number of bytes of trajectories that were read, and the total."""
        files = [file for run in self.runs for file in list(run.files.values())]
        return {"read": sum(file.offset for file in files), "total": sum(file.size for file in files)}

    def state(self) -> dict[str, Any]:
        """Return the state by which a page detects new data."""
        counts = self.index.counts()
        return {
            "runs": [
                {
                    "id": run.id,
                    "label": run.label,
                    "folder": run.whole,
                    "status": run.status(),
                    "supervised": run.supervised,
                    "trained": self._trained(run),
                    "generation": run.generation,
                    "lines": len(run.lines),
                    "step": run.step(),
                    "chains": counts.get(run.id, 0),
                    "credited": len(run.credit),
                    # without its path, because an exported page is shared with others
                    "best": (best := run.best) and {"step": best.step, "metric": best.metric, "value": best.value},
                    "problems": list(run.problems),
                }
                for run in self.runs
            ],
            "progress": self.progress(),
        }

    def _trained(self, run: Run) -> str | None:
        """Return the id of the run that saved the weights of this one, if it is shown."""
        folders = [weights.parent for weights in run.weights()]
        return next((other.id for folder in folders for other in self.runs if other.folder.checkpoints == folder), None)

    def _follow(self) -> None:
        while not self._closed:
            if self.read_some():
                continue
            idle = time.monotonic() - self._asked > _IDLE_SECONDS
            self._wake.wait(None if idle else _EVERY_SECONDS)
            self._wake.clear()

    def _read_trajectories(self, run: Run) -> bool:
        read = self._read_part(run, self._read_credit, run)
        return any([read, *(self._read_part(run, self._read_file, run, name) for name in list(run.files))])

    def _read_part(self, run: Run, read: Callable[..., bool | None], *given: Any) -> bool:
        try:
            return bool(read(*given))
        except OSError as error:
            run.note_unreadable(error)
        except Exception as error:  # boundary: other users' files may hold anything
            run.note(f"{read.__name__.strip('_').replace('_', ' ')}: {error!r:.500}")
        return False

    def _read_metrics(self, run: Run) -> bool:
        read = run.follow_metrics(_BYTES_AT_ONCE)
        if read:
            for name in run.files:  # an evaluation logs its step when it has ended
                self._note_version(run, name)
        return read

    def _note_version(self, run: Run, name: str) -> None:
        step = run.step()
        if has_run_version(name) and type(step) is int and abs(step) < _MOST_STEPS:
            self.index.note_version(run.id, name, step)

    def _read_file(self, run: Run, name: str) -> bool:
        file = run.files[name]
        taken = file.take(_BYTES_AT_ONCE)
        if taken.restarted:
            self.index.forget(run.id, name)
            run.drop_problems(file.path)
        groups = []
        for offset, line in taken.lines:
            try:
                made = rows_of(run.id, name, offset, line)
                # line by line, so that only a line that the index rejects is left out
                self.index.add(made)
            except _BAD_LINE as error:
                run.note_line(file.path, offset, error)
                continue
            groups += [row[6] for row, _ in made[:1]]
        self.index.note_steps(run.id, [(group, run.credit[group].step) for group in groups if group in run.credit])
        if groups:
            self._note_version(run, name)
        return bool(taken.lines) or taken.restarted

    def _read_credit(self, run: Run) -> bool:
        taken = run.credit_file.take(_BYTES_AT_ONCE)
        if taken.restarted:
            run.credit.clear()
            run.drop_problems(run.credit_file.path)
        for offset, line in taken.lines:
            try:
                said = outline(line)
                group, step = str(said["group"]), int(said["step"])
                self.index.note_steps(run.id, [(group, step)])
            except (KeyError, TypeError, *_BAD_LINE) as error:
                run.note_line(run.credit_file.path, offset, error)
                continue
            run.credit[group] = CreditLine(offset, len(line), step)
        return bool(taken.lines) or taken.restarted
