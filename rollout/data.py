"""Tasks: rows of a dataset file or a hub dataset, and the order in which they are taken."""

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.config import DataConfig
from tools.messages import Message

Task = dict[str, Any]
"""One row: `question` or `messages`, and any further fields."""


def load_tasks(config: DataConfig) -> list[Task]:
    """Rows of `config.path`, columns renamed, each with `question` or `messages`.

    Raises ValueError that names the file and the row where a row has neither, or the file cannot be read as rows.
    """
    rows = _read(config)
    if config.limit is not None:
        rows = rows[: config.limit]
    if not rows:
        raise ValueError(f"data.path: {config.path} holds no rows")
    return [_rename(row, number, config) for number, row in enumerate(rows, 1)]


def _read(config: DataConfig) -> list[Task]:
    path = Path(config.path)
    if path.suffix == ".jsonl" and path.is_file():
        rows = []
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"data.path: {path}:{number} is not JSON: {error}") from None
        return rows
    if path.suffix == ".json" and path.is_file():
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"data.path: {path} is not JSON: {error}") from None
        if not isinstance(rows, list):
            raise ValueError(f"data.path: {path} holds a {type(rows).__name__}; it must be a list of rows")
        return rows
    # datasets takes seconds to import, and only these two need it
    import datasets

    if path.suffix == ".parquet" and path.is_file():
        return datasets.Dataset.from_parquet(str(path)).to_list()
    if path.exists():
        raise ValueError(f"data.path: {path} is not .json, .jsonl or .parquet, nor the name of a hub dataset")
    return datasets.load_dataset(config.path, config.subset, split=config.split).to_list()


def _rename(row: Any, number: int, config: DataConfig) -> Task:
    if not isinstance(row, dict):
        raise ValueError(f"data.path: row {number} of {config.path} is a {type(row).__name__}, not an object")
    row = dict(row)
    for new, old in config.columns.items():
        if old not in row:
            raise ValueError(
                f"data.columns.{new}: row {number} of {config.path} has no field {old!r}; it has {sorted(row)}"
            )
        row[new] = row.pop(old)
    if "question" not in row and "messages" not in row:
        raise ValueError(
            f"data.path: row {number} of {config.path} has neither 'question' nor 'messages' but {sorted(row)}; "
            "rename one with data.columns, such as data.columns.question=problem"
        )
    return row


def opening_messages(task: Task, system_prompt: str | None) -> list[Message]:
    """The messages that open a chain on `task`."""
    messages: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
    if "messages" in task:
        return messages + [dict(message) for message in task["messages"]]
    return [*messages, {"role": "user", "content": str(task["question"])}]


@dataclass(frozen=True, order=True)
class Place:
    """A place in the order of tasks, and which attempt at it this is."""

    position: int
    attempt: int = 0

    @property
    def group_id(self) -> str:
        """The id of the group that is run there."""
        return f"g{self.position:06d}" + (f"-{self.attempt}" if self.attempt else "")

    @classmethod
    def of(cls, group_id: str) -> "Place":
        """The place of a group. Raises ValueError for what is no group's id."""
        found = re.fullmatch(r"g(\d{6,})(?:-(\d+))?", group_id)
        if found is None:
            raise ValueError(f"{group_id!r} is not the id of a group, such as g000012 or g000012-1")
        return cls(int(found[1]), int(found[2] or 0))


class TaskOrder:
    """Endless, reproducible order of tasks: each epoch is its own shuffle of all of them.

    The n-th task depends on (seed, n) alone, so that a position is all that a resumed run needs.
    """

    def __init__(self, tasks: list[Task], seed: int, shuffle: bool):
        self.tasks = tasks
        self.seed = seed
        self.shuffle = shuffle
        self._epoch = -1
        self._order = list(range(len(tasks)))

    def __getitem__(self, position: int) -> Task:
        return self.tasks[self.row(position)]

    def row(self, position: int) -> int:
        """Where the task at `position` stands in the data, from 0."""
        epoch, index = divmod(position, len(self.tasks))
        if self.shuffle and epoch != self._epoch:
            self._order = list(range(len(self.tasks)))
            random.Random(f"tasks/{self.seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._order[index]
