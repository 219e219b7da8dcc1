"""Loading of tasks, which are rows of a file, a hub dataset or a source."""

import errno
import gc
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

from agentfactory.base.errors import SettingError, short
from agentfactory.base.messages import Message, ToolSpec
from agentfactory.base.user_code.extension import Extension, load_extension
from agentfactory.base.user_code.watch import announced
from agentfactory.rollout.config import DataConfig
from agentfactory.rollout.data.conversations import (
    HALF,
    Findings,
    Tools,
    clean_messages,
    fix_for_conversation,
    fix_for_task,
    has_half_surrogate,
    is_messages,
    specs_of,
)
from agentfactory.rollout.data.files import RowFile, is_columnar, is_data_file, rows_of, unreadable
from agentfactory.rollout.data.notices import tell_findings
from agentfactory.rollout.images.parts import clean_row

Task = dict[str, Any]
"""A row with `question` or `messages`, and any other fields."""

_UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)
TOO_DEEP = "its messages or tools have too many levels"
_IN_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|content|from)["']\s*:""")
"""The beginning of messages as JSON text, or as Python writes them."""


def load_tasks(config: DataConfig, section: str = "data", tell: bool = False) -> list[Task]:
    """Load the rows of `config`, with columns renamed; each has `question`, or `messages` in the OpenAI format, with
    call arguments as objects and without padding nulls. `tell`: notify the user of these changes. Raise SettingError
    with a field of `section`, file and row for invalid ones."""
    with _without_collector() if config.path is not None else nullcontext():
        try:
            rows, columnar = _read(config)
            if config.limit is not None:
                rows = rows[: config.limit]
            if not rows:
                raise SettingError(_origin(config), f"{_named(config)} holds no rows", "use data with rows")
            column = config.columns.get("images", "images")
            has_images = any(isinstance(row, dict) and column in row for row in rows)
            found = [_task(row, number, config, has_images, columnar) for number, row in enumerate(rows, 1)]
        except SettingError as error:
            texts = [text.replace("data.columns", f"{section}.columns") for text in (error.problem, error.fix)]
            raise SettingError(f"{section}.{error.field}", texts[0], texts[1], error.source) from error.__cause__
    if tell:
        tell_findings([findings for _, findings in found], section, columnar)
    return [task for task, _ in found]


@contextmanager
def _without_collector() -> Iterator[None]:
    """Suspend the collector of cycles, which takes half of the time to load a file, and finds none: rows have none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def conversation_of(task: Task, number: int) -> tuple[list[Message], list[ToolSpec]]:
    """Return the messages and tools of a row for supervised fine-tuning. Raise SettingError if it has none."""
    if "messages" not in task:
        problem = f"row {number} has no 'messages' but {sorted(task)}"
        raise SettingError("data.path", problem, fix_for_conversation(task))
    with _faults_of(f"row {number}", "data.path"):
        return task["messages"], specs_of(task.get("tools"))


@contextmanager
def _faults_of(row_name: str, field: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, RecursionError) as error:
        reason = TOO_DEEP if isinstance(error, RecursionError) else error
        raise SettingError(field, f"{row_name}: {reason}", "correct it") from error


def check_source(config: DataConfig, section: str) -> None:
    """Raise SettingError if `source` cannot be loaded or does not accept `options`. The source is not called."""
    if config.source is not None:
        load_extension(f"{section}.source", config.source, {}, (), config)


def _called(config: DataConfig) -> list[Any]:
    if config.registered is not None:
        field, section = config.registered
        source = Extension(section.rows, (), {}, field, f"{type(section).__name__}.rows")
    else:
        source = load_extension("source", config.source or "", {}, (), config)
    with source.blamed(), announced(f"reading the rows of {source.name}"):
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


def _read(config: DataConfig) -> tuple[list[Any], bool]:
    """Return the rows, and whether they are a table's, which has null where a row lacks a nested field."""
    if config.path is None:
        return _called(config), False
    path = Path(config.path)
    if is_data_file(path):
        return [row for _, row in RowFile(path)], is_columnar(path)
    if path.exists() or os.path.isabs(config.path) or set("*?[") & set(config.path):
        raise unreadable(path)
    # takes seconds to import
    import datasets

    try:
        found = datasets.load_dataset(config.path, config.subset, split=config.split)
        return rows_of(found.with_format("arrow")[:]), True
    except (ValueError, OSError, RecursionError, datasets.exceptions.DatasetsError) as error:
        problem = f"{config.path} is not a file, and cannot be read as a hub dataset: {error}"
        fix = "correct the name, data.subset or data.split, or name a file"
        if isinstance(error, OSError) and error.errno in _UNWRITABLE:
            fix = "set HF_HOME to a folder that can be written, with enough space"
        raise SettingError("path", problem, fix) from error


def _origin(config: DataConfig) -> str:
    if config.registered is not None:
        return config.registered[0]
    return "source" if config.path is None else "path"


def _named(config: DataConfig) -> str:
    return config.path or config.source or f"data.{_origin(config)}"


def _task(row: Any, number: int, config: DataConfig, has_images: bool, columnar: bool) -> tuple[Task, Findings]:
    """Return a row with its columns renamed and its conversation checked, and what was found. `has_images`: some rows
    have images, but this one may lack the column. `columnar`: it is the row of a table."""
    row_name, field = f"row {number} of {_named(config)}", _origin(config)
    if not isinstance(row, dict):
        raise SettingError(field, f"{row_name} is a {type(row).__name__}, not an object", "correct it")
    row = _renamed(row, row_name, config)
    if row.get("messages") == "":  # an empty cell
        row["messages"] = None
    given = [name for name in ("question", "messages") if name in row]
    if given and all(row[name] is None for name in given):
        columns = " and ".join(config.columns.get(name, name) for name in given)
        problem = f"{row_name}: {columns} {'is' if len(given) == 1 else 'are'} null, so there is no task"
        raise SettingError(field, problem, "write the task there, or leave the row out")
    # tables have None in the columns that a row lacks
    row = {name: value for name, value in row.items() if value is not None or name not in ("question", "messages")}
    if "messages" not in row and is_messages(row.get("question")):
        row["messages"] = row.pop("question")
    if "question" not in row and "messages" not in row:
        problem = f"{row_name} has neither 'question' nor 'messages' but {sorted(row)}"
        raise SettingError(field, problem, fix_for_task(row))
    if has_images:
        row.setdefault("images", None)
    findings = Findings()
    with _faults_of(row_name, field):
        if "messages" in row:
            row["messages"] = clean_messages(row["messages"], _tools(row, findings, columnar), findings)
        elif isinstance(question := row["question"], str):
            if _IN_TEXT.match(question):
                told = f"got the text {short(question)}, which is messages"
                raise ValueError(f"question: {told}; use data.columns.messages")
            if has_half_surrogate(question):
                raise ValueError(f"question: it has {HALF}")
        elif isinstance(question, bool) or not isinstance(question, int):
            raise ValueError(f"question: got {short(question)}, not text; messages belong into the field messages")
        file = config.path or (config.source or "").partition(".py:")[0]
        folder = Path(file).parent.absolute() if os.path.isabs(file) or Path(file).is_file() else Path.cwd()
        return clean_row(row, folder), findings


def _renamed(row: dict[str, Any], row_name: str, config: DataConfig) -> dict[str, Any]:
    row = dict(row)
    for new, old in config.columns.items():
        if old in row:
            row[new] = row.pop(old)
            continue
        # a nested field, such as verl's reward_model.ground_truth, is copied
        value: Any = row
        for name in old.split("."):
            if not isinstance(value, dict) or name not in value:
                problem = f"{row_name} has no field {old!r} but {sorted(row)}"
                raise SettingError(f"columns.{new}", problem, "name one of those")
            value = value[name]
        row[new] = value
    return row


def _tools(row: Task, findings: Findings, columnar: bool) -> Tools:
    given = row.get("tools")
    try:
        specs = specs_of(given, findings, columnar and not isinstance(given, str))
    except (ValueError, RecursionError):
        # in reinforcement learning, `tools` may be any field; sft refuses it
        return {}
    if isinstance(given, list) and findings.nulls.dropped:
        row["tools"] = [spec.to_openai() for spec in specs]
    return {spec.name: spec for spec in specs}
