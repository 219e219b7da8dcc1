"""Runs of verl with `trainer.rollout_data_dir` or `trainer.validation_data_dir`: N.jsonl, one for each step.

Read from the source of verl 0.4.1, 0.5.0, 0.7.1 and 0.9.1 (trainer/ppo/ray_trainer.py and v1/trainer_base.py:
`_dump_generations`, `_write_generations`; utils/tracking.py: `FileLogger`); the files of the tests are written as they
do, by no run of verl.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from agentfactory.audit import record as streams
from agentfactory.audit.foreign.files import convert, first_row, malformed, metric_lines, numbers_of, rows_of
from agentfactory.audit.foreign.gather import Gathered, Item, Saved, saved_lines, short_name
from agentfactory.audit.record import Record
from agentfactory.rollout.trajectory import Outcome, Trajectory

KIND = "verl"
_STEP = re.compile(r"(\d+)\.jsonl")
_LACKS = {
    streams.TOKENS: "verl's dumps have texts and no token ids",
    streams.LOGPROBS: "verl's dumps have no log-probabilities",
    streams.TRAINED: "verl's dumps have no advantages",
    streams.CALLS: "verl's dumps have each conversation as one text, without its special tokens",
    streams.MALFORMED: "verl's dumps do not say which calls could not be read",
    streams.OUTCOMES: "verl's dumps do not say how a chain ended",
    streams.ORDER: "verl's dumps do not say which row of the data each prompt is",
    streams.RECIPE: "verl saves no recipe of ours",
}
_OURS = {
    "actor/grad_norm": "grad_norm",
    "actor/pg_loss": "loss",
    "actor/lr": "learning_rate",
    "actor/entropy": "entropy",
    "critic/score/mean": "reward",
}
"""Name of a metric of verl -> the name that it has here, beside its own."""


class Dumped(msgspec.Struct):
    """A line of a dump. `uid` is of verl's newest trainer: `{prompt}_{rollout}_{output}`."""

    input: str
    output: str
    score: float
    step: int
    gts: Any = None
    uid: str | None = None


class Logged(msgspec.Struct):
    """A line of the file logger."""

    step: int
    data: dict[str, Any]


def read(path: Path) -> Record | None:
    """Return the record of the run whose dumps are in or below `path`. Raises SettingError if a line is damaged."""
    files = _dumps(path)
    if not files:
        return None
    folder = path if path.is_dir() else path.parent
    held_out = {parent: _is_validation(parent, files) for parent in {file.parent for file in files}}
    gathered = Gathered(folder, lambda: saved_lines(files), lambda one: _items(one, held_out[one.file.parent]))
    record = Record(folder.resolve().name, KIND, folder, gathered.groups, gathered.size)
    record.metrics = _metrics(folder)
    lacks = dict(_LACKS)
    if not gathered.held_out:
        lacks[streams.HELD_OUT] = "there are no dumps of trainer.validation_data_dir beside those of training"
    if not record.metrics:
        lacks[streams.METRICS] = "there is no file of verl's file logger here (trainer.logger: file)"
    record.lacks = lacks
    record.problems = gathered.problems()
    return record


def _dumps(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if _STEP.fullmatch(path.name) and _is_dump(path) else []
    files = [file for pattern in ("*.jsonl", "*/*.jsonl") for file in path.glob(pattern) if _STEP.fullmatch(file.name)]
    files.sort(key=lambda file: (str(file.parent), int(file.stem)))
    return files if files and any(_is_dump(file) for file in files) else []


def _is_dump(file: Path) -> bool:
    return first_row(file).keys() >= {"input", "output", "score", "step"}


def _is_validation(folder: Path, files: list[Path]) -> bool:
    """Return whether dumps are of validations: only those repeat the score as `reward`, or begin at step 0."""
    mine = [file for file in files if file.parent == folder]
    if any(file.name == "0.jsonl" for file in mine):
        return True
    rows = [row for file in mine[:1] for _, row in rows_of(file)]
    return bool(rows) and all("reward" in row and row["reward"] == row.get("score") for row in rows)


def _items(saved: Saved, held_out: bool) -> Iterator[Item]:
    row: dict[str, Any] = saved.content
    dumped: Dumped = convert(row, Dumped)
    # equal prompts of a step are one group: rows of a batch are sorted by length, and only some versions save a name
    group = dumped.uid.rsplit("_", 2)[0] if dumped.uid else dumped.input
    name = f"step-{dumped.step}"
    extra = {key: value for key, value in row.items() if key not in Dumped.__struct_fields__}
    chain = Trajectory(
        f"{name}:{dumped.uid or saved.number}",
        [{"role": "user", "content": dumped.input}, {"role": "assistant", "content": dumped.output}],
        [],
        Outcome.COMPLETED,
        reward=dumped.score,
        metrics={key: float(value) for key, value in extra.items() if isinstance(value, (int, float))},
        turns=1,
    )
    task = {"prompt": dumped.input, **({} if dumped.gts is None else {"gts": dumped.gts})}
    version = dumped.step if held_out else max(0, dumped.step - 1)
    mode = "sampled" if held_out else ""
    yield Item(f"{name}:{short_name(group)}", chain, task, mode, dumped.step, version=version)


def _metrics(folder: Path) -> list[dict[str, float]]:
    for file in sorted(folder.glob("*.jsonl")):
        if not _STEP.fullmatch(file.name) and first_row(file).keys() >= {"step", "data"}:
            return metric_lines(_logged(file), _OURS)
    return []


def _logged(file: Path) -> Iterator[dict[str, float]]:
    for number, row in rows_of(file):
        try:
            line: Logged = convert(row, Logged)
        except ValueError as error:
            raise malformed(file, number, error) from error
        yield {**numbers_of(line.data), "step": line.step}
