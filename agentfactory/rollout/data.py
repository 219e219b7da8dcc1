"""Loading and ordering of tasks, which are rows of a file, a hub dataset or a source."""

import json
import os
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from agentfactory.rollout.config import DataConfig
from agentfactory.rollout.images.parts import clean_row
from agentfactory.tools.errors import SettingError, short
from agentfactory.tools.user_code.extension import Extension, load_extension

Task = dict[str, Any]
"""A row with `question` or `messages`, and any other fields."""

_ROLES = ("system", "developer", "user", "assistant", "tool")


def load_tasks(config: DataConfig, section: str = "data") -> list[Task]:
    """Load the rows of `config`, with columns renamed; each has `question` or `messages`. Errors refer to `config` as
    `section`.

    Raise SettingError with the file and the row if a row has neither, or if the file cannot be read as rows.
    """
    try:
        rows = _read(config)
        if config.limit is not None:
            rows = rows[: config.limit]
        if not rows:
            raise SettingError(_origin(config), f"{_named(config)} holds no rows", "use data with rows")
        column = config.columns.get("images", "images")
        has_images = any(isinstance(row, dict) and column in row for row in rows)
        return [_rename(row, number, config, has_images) for number, row in enumerate(rows, 1)]
    except SettingError as error:
        raise error.at(f"{section}.{error.field}") from error.__cause__


def check_source(config: DataConfig, section: str) -> None:
    """Raise SettingError if `source` cannot be loaded or does not accept `options`. The source is not called."""
    if config.source is not None:
        load_extension(f"{section}.source", config.source, {}, (), config)


def _called(config: DataConfig) -> list[Any]:
    """Return the rows of a source as JSON values."""
    if config.registered is not None:
        field, section = config.registered
        source = Extension(section.rows, (), {}, field, f"{type(section).__name__}.rows")
    else:
        assert config.source is not None
        source = load_extension("source", config.source, {}, (), config)
    with source.blamed():
        rows = source()
        if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
            raise SettingError(source.field, f"{source.name} returned {short(rows)}", "return or yield rows")
        rows = list(islice(rows, config.limit))
    # images may be bytes or objects
    images = [row.get("images") if isinstance(row, dict) else None for row in rows]
    bare = [row if found is None else {**row, "images": []} for row, found in zip(rows, images, strict=True)]
    try:
        plain = json.loads(json.dumps(bare))
    except (TypeError, ValueError) as error:
        raise SettingError(source.field, f"{source.name} returned non-JSON rows: {error}", "correct it") from error
    return [row if found is None else {**row, "images": found} for row, found in zip(plain, images, strict=True)]


def _read(config: DataConfig) -> list[Task]:
    if config.path is None:
        return _called(config)
    path = Path(config.path)
    if path.suffix == ".jsonl" and path.is_file():
        # split bytes: text would also be split at U+2028, which a JSON string may contain
        return [_parse(line, path, number) for number, line in enumerate(_bytes_of(path).splitlines(), 1)]
    if path.suffix == ".json" and path.is_file():
        rows = _parse(_bytes_of(path), path, 1)
        if not isinstance(rows, list):
            raise SettingError("path", f"{path} holds a {type(rows).__name__}, not a list of rows", "make it a list")
        return rows
    # datasets takes seconds to import, and only these two cases need it
    import datasets

    if path.suffix == ".parquet" and path.is_file():
        try:
            return datasets.Dataset.from_parquet(str(path)).to_list()
        except (ValueError, datasets.exceptions.DatasetGenerationError) as error:
            problem = f"{path} cannot be read as parquet: {error.__cause__ or error}"
            raise SettingError("path", problem, "correct it") from error
    if path.exists():
        problem = f"{path} is neither a .json, .jsonl or .parquet file nor the name of a hub dataset"
        raise SettingError("path", problem, "name one of those")
    return datasets.load_dataset(config.path, config.subset, split=config.split).to_list()


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingError("path", f"{path} cannot be read: {error.strerror}", "make it readable") from error


def _parse(content: bytes, path: Path, first_line: int) -> Any:
    """Parse `content` as JSON; it begins at line `first_line` (from 1) of `path`."""
    try:
        return json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = first_line + content.count(b"\n", 0, error.start)
        raise SettingError("path", f"{path}:{line} is not UTF-8: {error.reason}", "save it as UTF-8") from None
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        problem = f"{path}:{line} is not JSON: {error.msg} at column {error.colno}"
        raise SettingError("path", problem, "correct it") from None


def _origin(config: DataConfig) -> str:
    """Return the name of the field of `config` that gives the rows."""
    if config.registered is not None:
        return config.registered[0]
    return "source" if config.path is None else "path"


def _named(config: DataConfig) -> str:
    return config.path or config.source or f"data.{_origin(config)}"


def _rename(row: Any, number: int, config: DataConfig, has_images: bool) -> Task:
    """Return a row with its columns renamed and checked. `has_images`: some rows have images, but this one may lack
    the column."""
    if not isinstance(row, dict):
        problem = f"row {number} of {_named(config)} is a {type(row).__name__}, not an object"
        raise SettingError(_origin(config), problem, "correct it")
    row = dict(row)
    for new, old in config.columns.items():
        if old not in row:
            problem = f"row {number} of {_named(config)} has no field {old!r} but {sorted(row)}"
            raise SettingError(f"columns.{new}", problem, "name one of those")
        row[new] = row.pop(old)
    given = [name for name in ("question", "messages") if name in row]
    if given and all(row[name] is None for name in given):
        columns = " and ".join(config.columns.get(name, name) for name in given)
        are = "is" if len(given) == 1 else "are"
        problem = f"row {number} of {_named(config)}: {columns} {are} null, so there is no task"
        raise SettingError(_origin(config), problem, "write the task there, or leave the row out")
    # tables have None in the columns that a row lacks
    row = {name: value for name, value in row.items() if value is not None or name not in ("question", "messages")}
    if "question" not in row and "messages" not in row:
        problem = f"row {number} of {_named(config)} has neither 'question' nor 'messages' but {sorted(row)}"
        fix = "rename one with data.columns, such as data.columns.question=problem"
        raise SettingError(_origin(config), problem, fix)
    if has_images:
        row.setdefault("images", None)
    try:
        if "messages" in row:
            _check_messages(row["messages"])
        return clean_row(row, _folder(config))
    except ValueError as error:
        problem = f"row {number} of {_named(config)}: {error}"
        raise SettingError(_origin(config), problem, "correct it") from error


def _check_messages(messages: Any) -> None:
    """Raise ValueError unless `messages` is a list of messages with a role and content."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages: got {short(messages)}, not a list of {{role: ..., content: ...}}")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or "role" not in message:
            raise ValueError(f"messages.{number}: got {short(message)}, not {{role: ..., content: ...}}")
        if message["role"] not in _ROLES:
            raise ValueError(f"messages.{number}.role: got {short(message['role'])}, not one of {', '.join(_ROLES)}")
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            raise ValueError(f"messages.{number}.content: got {short(content)}, not text or a list of parts")


def _folder(config: DataConfig) -> Path:
    """Return the folder to which paths in rows are relative."""
    file = config.path or (config.source or "").partition(".py:")[0]
    return Path(file).parent.absolute() if os.path.isabs(file) or Path(file).is_file() else Path.cwd()


@dataclass(frozen=True, order=True)
class Place:
    """A position in the task order, and the number of the attempt at it."""

    position: int
    attempt: int = 0

    @property
    def group_id(self) -> str:
        """The id of the group at this place."""
        return f"g{self.position:06d}" + (f"-{self.attempt}" if self.attempt else "")

    @classmethod
    def of(cls, group_id: str) -> "Place":
        """Return the place of a group. Raise ValueError if `group_id` is not a group's id."""
        found = re.fullmatch(r"g(\d{6,})(?:-(\d+))?", group_id)
        if found is None:
            raise ValueError(f"{group_id!r} is not the id of a group, such as g000012 or g000012-1")
        return cls(int(found[1]), int(found[2] or 0))


@dataclass(frozen=True)
class Share:
    """The positions in the task order that one of several workers runs: every `of`-th, starting at `number`."""

    number: int
    of: int

    def __contains__(self, position: int) -> bool:
        return position % self.of == self.number

    def part(self, count: int) -> int:
        """Return this worker's part of `count`, which all workers share; at least 1."""
        return max(1, count // self.of + (self.number < count % self.of))


WHOLE = Share(0, 1)


class TaskOrder:
    """An endless, reproducible order of tasks, reshuffled each epoch.

    The n-th task depends only on (seed, n), so a resumed run needs only the position.
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
        """Return the index of the row at `position`; both count from 0."""
        epoch, index = divmod(position, len(self.tasks))
        if self.shuffle and epoch != self._epoch:
            self._order = list(range(len(self.tasks)))
            random.Random(f"tasks/{self.seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._order[index]
