"""Runs of TRL's GRPOTrainer with `log_completions=True`: completions/completions_NNNNN.parquet and trainer_state.json
in its output_dir.

Tried with runs of TRL 1.16 on texts, on messages and with tools; columns read from its source (grpo_trainer.py: `log`).
A table has the completions of the last generation before a step was logged. An evaluation overwrites that of its step
by one in which its completions follow a rest of the step's own, without a mark: such tables are left out.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from agentfactory.audit import record as streams
from agentfactory.audit.foreign.files import malformed, metric_lines, numbers_of, object_of
from agentfactory.audit.foreign.gather import Gathered, Item, Saved
from agentfactory.audit.foreign.messages import messages_of, named
from agentfactory.audit.record import Record
from agentfactory.base.errors import SettingError
from agentfactory.base.files.untrusted_files import open_file
from agentfactory.base.findings import Evidence, Finding, Severity
from agentfactory.base.messages import text_of
from agentfactory.rollout.trajectory import Outcome, Trajectory

KIND = "TRL"
_TABLES = "completions"
_TABLE = re.compile(r"completions_(\d+)\.parquet")
_STATE = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_OWN = ("step", "prompt", "completion", "advantage")
NEAR = 1e-4
_LACKS = {
    streams.TOKENS: "TRL's completions have texts and no token ids",
    streams.LOGPROBS: "TRL saves no log-probabilities of tokens",
    streams.TRAINED: "TRL saves one advantage for each completion, and nothing for each token",
    streams.ORDER: "TRL does not save which row of the data each prompt is",
    streams.OUTCOMES: "TRL does not save how a completion ended",
    streams.MALFORMED: "TRL does not save which calls it could not read",
    streams.RECIPE: "TRL saves no recipe of ours",
    streams.HELD_OUT: "TRL saves the completions of an evaluation among those of training, without a mark",
}


def read(path: Path) -> Record | None:
    """Return the record of an output_dir of TRL, or of tables of it. Raises SettingError if a file is damaged."""
    tables = _tables(path)
    if not tables:
        return None
    folder = tables[0].parent.parent
    state = _state(folder)
    history = _history(state, folder)
    run = _Run(folder, tables, history)
    record = Record(folder.resolve().name, KIND, folder, run.gathered.groups, run.gathered.size)
    # lines of evaluations have names of their own (`eval_...`)
    record.metrics = metric_lines(history)
    record.lacks = run.lacks()
    record.problems = [
        *run.gathered.problems(),
        *run.notes(),
        *_unlike(run, history if state.get("logging_steps") == 1 else []),
    ]
    return record


def _tables(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if _TABLE.fullmatch(path.name) else []
    folder = path if path.name == _TABLES else path / _TABLES
    return sorted((file for file in folder.glob("*.parquet") if _TABLE.fullmatch(file.name)), key=_step)


def _step(file: Path) -> int:
    return int(file.stem.rpartition("_")[2])


def _state(folder: Path) -> dict[str, Any]:
    """Return the newest trainer_state.json: the one of the whole run, or of its last checkpoint."""
    found = [
        (int(match[1]), file) for file in folder.glob("checkpoint-*") if (match := _CHECKPOINT.fullmatch(file.name))
    ]
    places = [folder / _STATE, *(file / _STATE for _, file in sorted(found, reverse=True))]
    file = next((file for file in places if file.is_file()), None)
    return object_of(file) if file is not None else {}


def _history(state: Mapping[str, Any], folder: Path) -> list[dict[str, float]]:
    found = state.get("log_history", [])
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise SettingError("", f"log_history in {folder}/.../{_STATE} is no list of objects", "copy the file again")
    lines = map(numbers_of, found)
    return [line for line in lines if isinstance(line.get("step"), int)]


class _Run:
    def __init__(self, folder: Path, tables: list[Path], history: Sequence[Mapping[str, float]]) -> None:
        self.tables = tables
        self._damaged = ""
        names = [found[1] for line in history for name in line if (found := re.fullmatch(r"rewards/(.+)/mean", name))]
        self._rewards = list(dict.fromkeys(names))
        self._evaluated = {line["step"] for line in history if "eval_reward" in line}
        self.weights = _Weights(history, self._rewards)
        self.rewards: dict[int, list[float]] = {}
        self.functions: set[str] = set()
        self.size = 0
        """Completions of a prompt: the length of most runs of equal prompts. The data may repeat a prompt."""
        sizes: Counter[int] = Counter()
        for file in tables:
            rows = self._rows(file) if _step(file) not in self._evaluated else []
            sizes.update(len(list(same)) for _, same in groupby(row["prompt"] for row in rows))
        self.size = max(sizes, key=lambda size: (sizes[size], -size), default=0)
        self.texts = False
        self._counting = True
        self.gathered = Gathered(folder, self._saved, self._items)
        self._counting = False

    def _rows(self, file: Path) -> list[dict[str, Any]]:
        """Return the rows of a table; none of the last one if it is damaged, as while it is written."""
        try:
            return _rows(file)
        except SettingError as error:
            if file != self.tables[-1] or len(self.tables) == 1:
                raise
            self._damaged = str(error)
            return []

    def _saved(self) -> Iterator[Saved]:
        before = ""
        for file in self.tables:
            rows = self._rows(file)
            contents = repr([{name: value for name, value in row.items() if name != "step"} for row in rows])
            known, before = contents == before, contents
            # one generation may be trained in several steps
            if known or _step(file) in self._evaluated:
                continue
            group, place = -1, 0
            for number, row in enumerate(rows):
                if number == 0 or row["prompt"] != rows[number - 1]["prompt"] or place == self.size:
                    group, place = group + 1, 0
                place += 1
                yield Saved(file, number + 1, {**row, "group": group}, "row")

    def _items(self, saved: Saved) -> Iterator[Item]:
        row = saved.content
        step = int(row["step"])
        group = f"step-{step}.{row['group']}"
        functions = self._rewards or _functions(row)
        self.functions.update(functions)
        scores = {name: float(row[name]) for name in functions if _is_number(row.get(name))}
        reward = self.weights.total(scores)
        said = messages_of(row["completion"], "assistant")
        self.texts |= isinstance(row["completion"], str)
        if reward is not None and self._counting:
            self.rewards.setdefault(step, []).append(reward)
        metrics = {f"reward/{name}": score for name, score in scores.items()}
        chain = Trajectory(
            f"{group}.{saved.number}",
            named([*messages_of(row["prompt"], "user"), *_without_none(said)]),
            [],
            Outcome.COMPLETED,
            reward=reward,
            metrics=metrics,
            turns=sum(message["role"] == "assistant" for message in said),
        )
        chain.errors = [
            f"{message['name']}: {text}"
            for message in chain.messages
            # a tool that raised an exception
            if message["role"] == "tool" and (text := text_of(message["content"])).startswith("{'error': ")
        ]
        extra = {name: value for name, value in row.items() if name not in (*_OWN, *functions, "group")}
        credit = [{"row": 0, "advantage": [float(row["advantage"])]}] if _is_number(row.get("advantage")) else []
        task = {"prompt": row["prompt"], **extra}
        yield Item(group, chain, task, step=step, credit=credit, version=max(0, step - 1))

    def notes(self) -> Iterator[Finding]:
        if self._damaged:
            text = f"the last table is left out, which may still be written: {self._damaged}"
            yield Finding(Severity.NOTE, "its files", text, "audit the run again when it has ended")
        if left_out := [file for file in self.tables if _step(file) in self._evaluated]:
            text = (
                f"the tables of {len(left_out)} steps with an evaluation are left out, because it has overwritten them"
            )
            fix = "evaluate at steps that are not logged, to keep the completions of all logged steps"
            shown = [Evidence("", file=str(file.relative_to(file.parent.parent))) for file in left_out[:5]]
            yield Finding(Severity.NOTE, "its files", text, fix, shown)
        yield from self.weights.note(self.functions)

    def lacks(self) -> dict[str, str]:
        lacks = dict(_LACKS)
        if self.texts:
            lacks[streams.CALLS] = "TRL's completions here are plain texts, without calls"
        if not self.functions:
            lacks[streams.REWARDS] = "these tables have no column of a reward function"
        if not self._rewards:
            lacks[streams.METRICS] = f"there is no {_STATE} with metrics; TRL writes one with each checkpoint"
        return lacks


def _functions(row: Mapping[str, Any]) -> list[str]:
    """Return the names of the reward functions, which follow the completion, without the help of trainer_state.json."""
    names = list(row)
    later = names[names.index("completion") + 1 : names.index("advantage")] if "advantage" in names else []
    return [name for name in later if isinstance(row[name], float) or row[name] is None]


def _is_number(value: Any) -> bool:
    # a reward function that returned None for a completion has NaN
    return isinstance(value, (int, float)) and not math.isnan(value)


def _without_none(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield messages without the arguments that a table adds as None; one that is really null is lost, too."""
    for message in messages:
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = _pruned(call["function"]["arguments"])
        yield message


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _pruned(each) for name, each in value.items() if each is not None}
    return [_pruned(each) for each in value] if isinstance(value, list) else value


def _rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a table. Raise SettingError if it is damaged."""
    import pyarrow
    from pyarrow import parquet

    try:
        with open_file(file) as content:
            table = parquet.ParquetFile(pyarrow.BufferReader(content.read()))
        # Arrow's threads would outlive the command, and abort it
        rows: list[dict[str, Any]] = table.read(use_threads=False).to_pylist()
    # texts of damaged tables may be no UTF-8
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise SettingError("", f"{file} cannot be read: {error}", "copy the file again, or remove it") from error
    for number, row in enumerate(rows, 1):
        for name in ("step", "prompt", "completion"):
            if name not in row:
                raise malformed(file, number, f"it has no column {name}", "row")
    return rows


class _Weights:
    """The weights of the reward functions, found from the logged means of each function and of the reward."""

    def __init__(self, history: Sequence[Mapping[str, float]], names: Sequence[str]) -> None:
        self.names = names
        lines = [line for line in history if all(_is_number(line.get(name)) for name in self._columns)]
        self._means = np.asarray([[line[name] for name in self._columns[1:]] for line in lines]).reshape(
            len(lines), len(names)
        )
        self._rewards = np.asarray([line["reward"] for line in lines])
        self.values = np.ones(len(names))
        self.known = bool(lines) and self._fits(self.values)
        if names and lines and not self.known:
            found, _, rank, _ = np.linalg.lstsq(self._means, self._rewards, rcond=1e-3)
            weights: np.ndarray = np.asarray(found).round(3)
            if rank == len(names) and self._fits(weights):
                self.values, self.known = weights, True

    @property
    def _columns(self) -> list[str]:
        return ["reward", *(f"rewards/{name}/mean" for name in self.names)]

    def _fits(self, weights: np.ndarray) -> bool:
        return bool(np.allclose(self._means @ weights, self._rewards, rtol=NEAR, atol=NEAR))

    def total(self, scores: Mapping[str, float]) -> float | None:
        weights = dict(zip(self.names, self.values, strict=True))
        return math.fsum(score * float(weights.get(name, 1.0)) for name, score in scores.items()) if scores else None

    def note(self, names: Iterable[str]) -> list[Finding]:
        fix = "TRL does not save reward_weights"
        if self.known and np.all(self.values == 1.0):
            return []
        if self.known:
            found = ", ".join(f"{value:g} of {name}" for name, value in zip(self.names, self.values, strict=True))
            return [
                Finding(Severity.NOTE, "rewards", f"the logged means tell the weights of the rewards: {found}", fix)
            ]
        if len(names := sorted(names)) < 2 and not self._rewards.size:
            return []
        text = f"the reward of a completion is taken as the sum of {', '.join(names)}, each with weight 1"
        return [Finding(Severity.NOTE, "rewards", text, fix)]


def _unlike(run: _Run, history: Sequence[Mapping[str, float]]) -> list[Finding]:
    logged = {line["step"]: line["reward"] for line in history if _is_number(line.get("reward"))}
    means = {step: math.fsum(values) / len(values) for step, values in run.rewards.items() if step in logged}
    apart = [step for step, mean in means.items() if abs(mean - logged[step]) > NEAR * max(1.0, abs(mean))]
    if not apart or not run.weights.known:
        return []
    text = f"in {len(apart)} of {len(means)} steps the logged reward is not the mean of the saved completions"
    fix = "with steps_per_generation below gradient_accumulation_steps, TRL saves only a part of them"
    shown = [Evidence(f"step {step}: {logged[step]:.6g} logged, {means[step]:.6g} saved") for step in apart[:5]]
    return [Finding(Severity.NOTE, "rewards", text, fix, shown)]
