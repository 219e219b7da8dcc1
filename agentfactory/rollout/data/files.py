"""Reading of rows from files, by their endings."""

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from agentfactory.base.errors import SettingError

FORMATS = ".jsonl, .json, .csv or .parquet"
"""The endings of data files, in upper case too; all but parquet may be compressed as .gz."""
_MOST_BYTES = 1 << 26
"""Maximum bytes of a file that is read before the start, in about a second in every trainer process."""
_EXPANSION = 8
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SEVERAL = "join the files, or read them with data.source"
_BY_DATASETS = "convert it: python -c 'import datasets; datasets.{read}.to_json(\"rows.jsonl\")'"
_BY_PANDAS = 'convert it: python -c \'import pandas; pandas.{read}.to_json("rows.jsonl", "records", lines=True)\''
_CONTENTS = {
    b"version https://git-lfs": "it is a pointer of Git LFS: run git lfs pull, or download the file itself",
    **dict.fromkeys((b"<!doctype", b"<html"), "it is a page of a website: download the file itself"),
    b"\x1f\x8b": "it is compressed: rename it to {file}.gz",
    b"PAR1": "it is parquet: rename it to .parquet",
    b"PK\x03\x04": "it is a zip archive or a spreadsheet: unpack or convert it",
}
"""Beginning of a file whose ending is wrong -> fix."""
_CONVERSIONS = {
    ".arrow": _BY_DATASETS.format(read='Dataset.from_file("{file}")'),
    ".bz2": "decompress it: bunzip2 {file}",
    ".feather": _BY_PANDAS.format(read='read_feather("{file}")'),
    **dict.fromkeys((".jsonlines", ".ndjson"), "rename it to .jsonl"),
    ".tsv": _BY_PANDAS.format(read='read_csv("{file}", sep="\\t", dtype=str)'),
    ".txt": "rename it to the ending of its content: .jsonl, .json or .csv",
    ".xlsx": _BY_PANDAS.format(read='read_excel("{file}")'),
    ".xz": "decompress it: unxz {file}",
    ".zip": "decompress it: unzip {file}",
    ".zst": "decompress it: unzstd {file}",
}


class RowFile:
    """A stream of the rows of a file, each with its place: the file and line, or the row's number. Iterating raises
    SettingError for `path`, with the line and the fix, if the file cannot be read."""

    def __init__(self, path: Path) -> None:
        read = _READERS.get(_format(path))
        if read is None:
            raise unreadable(path)
        self.path = path
        self.share = 0.0
        self._read = read

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        self.share = 0.0
        yield from self._read(self)
        self.share = 1.0

    @contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        path = self.path
        try:
            with path.open("rb") as raw:
                yield gzip.GzipFile(fileobj=raw) if path.suffix.lower() == ".gz" else raw  # type: ignore[misc]
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise SettingError("path", f"{path} is damaged: {error}", "fetch or compress it again") from error
        except OSError as error:
            raise SettingError("path", f"{path} cannot be read: {error.strerror}", "make it readable") from error

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the lines with their numbers, from 1, without a byte order mark."""
        size = max(1, self.path.stat().st_size)
        with self.opened() as file:
            raw = file.fileobj if isinstance(file, gzip.GzipFile) else file
            number = 0
            for chunk in file:
                # bytes: text would also be split at U+2028, which a JSON string may contain
                for line in chunk.splitlines(keepends=True):
                    number += 1
                    yield number, line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
                if number % 1000 == 0 and raw is not None:
                    self.share = min(1.0, raw.tell() / size)


def has_known_ending(path: Path) -> bool:
    return _format(path) in _READERS


def is_data_file(path: Path) -> bool:
    return path.is_file() and has_known_ending(path)


def unreadable(path: Path) -> SettingError:
    """Return the error for a file or folder that is not a data file, with the command that makes it one."""
    if any(mark in path.name for mark in "*?[") and not path.exists():
        return SettingError("path", f"{path} is a pattern, not the name of a file", _SEVERAL)
    if path.is_dir():
        fix = "name one of its files"
        if (path / "dataset_info.json").is_file():
            fix = _BY_DATASETS.format(read=f'load_from_disk("{path}")')
        return SettingError("path", f"{path} is a folder, not a {FORMATS} file", fix)
    fix = _CONVERSIONS.get(path.suffix.lower(), "convert it to one of those").replace("{file}", path.name)
    return SettingError("path", f"{path} is neither a {FORMATS} file nor the name of a hub dataset", fix)


def is_columnar(path: Path) -> bool:
    """Return whether the file is a table whose rows have null where they lack a nested field."""
    return _format(path) == ".parquet"


def is_quick(path: Path) -> bool:
    """Return whether the file takes at most about a second to read."""
    size = path.stat().st_size * (_EXPANSION if path.suffix.lower() == ".gz" else 1)
    return not is_columnar(path) and size <= _MOST_BYTES


def _format(path: Path) -> str:
    name = path.name.lower()
    ending = Path(name.removesuffix(".gz")).suffix
    return path.suffix.lower() if ending == ".parquet" else ending


def _jsonl(file: RowFile) -> Iterator[tuple[str, Any]]:
    for number, line in file.lines():
        if not line.isspace() and line:
            yield f"{file.path}:{number}", _parse(line.rstrip(), file.path, number)


def _json(file: RowFile) -> Iterator[tuple[str, Any]]:
    path = file.path
    with file.opened() as opened:
        content = opened.read().removeprefix(_BYTE_ORDER_MARK)
    rows = _parse(content, path, 1)
    if not isinstance(rows, list):
        problem = f"{path} holds a {type(rows).__name__}, not a list of rows"
        lists = [name for name, value in rows.items() if isinstance(value, list)] if isinstance(rows, dict) else []
        inside = f": it has one in {', '.join(lists)}" if lists else ", such as by orient='records' of pandas"
        raise SettingError("path", problem, f"make it a list{inside}")
    for number, row in enumerate(rows, 1):
        yield f"{path}: row {number}", row


def _csv(file: RowFile) -> Iterator[tuple[str, Any]]:
    path = file.path
    csv.field_size_limit(1 << 30)
    rows = csv.DictReader((_text(line, path, number) for number, line in file.lines()), strict=True)
    try:
        header = list(rows.fieldnames or [])
        if len(header) == 1 and (separator := next((mark for mark in ";\t|" if mark in header[0]), None)):
            raise SettingError("path", f"{path} separates its columns by {separator!r}", "save it with commas")
        if len(set(header)) < len(header) or "" in header:
            fix = "give each another name" + (" (pandas: index=False)" if header[0] == "" else "")
            raise SettingError("path", f"{path}:1 names its columns {header}", fix)
        for row in rows:
            if None in row or None in row.values():
                problem = f"{path}:{rows.line_num} does not have {len(header)} cells, as its first line"
                raise SettingError("path", problem, "correct it, and put text with commas or quotes in quotes")
            yield f"{path}:{rows.line_num}", row
    except csv.Error as error:
        raise SettingError("path", f"{path}:{rows.line_num + 1} is not CSV: {error}", "correct it") from error


def _parquet(file: RowFile) -> Iterator[tuple[str, Any]]:
    # takes a moment to import
    import pyarrow
    from pyarrow.parquet import ParquetFile

    path, number = file.path, 0
    try:
        with ParquetFile(path) as opened:
            names = opened.schema_arrow.names
            if len(set(names)) < len(names):
                raise SettingError("path", f"{path} names its columns {names}", "give each another name")
            for batch in opened.iter_batches(1024):
                for row in rows_of(batch):
                    number += 1
                    yield f"{path}: row {number}", row
                file.share = number / max(1, opened.metadata.num_rows)
    except (ValueError, OSError, RecursionError, pyarrow.ArrowException) as error:
        if isinstance(error, SettingError):
            raise
        problem = f"{path} cannot be read as parquet: {error}"
        raise SettingError("path", problem, _fix_of(path) or "fetch or write it again") from error


def rows_of(table: Any) -> list[Any]:
    """Return the rows of an Arrow table or batch. Those of the type Json of `datasets` are read here, exactly: its own
    reader makes 0.30000000000000004 of 0.3. Raise ValueError if one is not JSON."""
    rows: list[Any] = table.to_pylist()
    if "arrow.json" in str(table.schema):
        rows = [{field.name: _value(field.type, row[field.name]) for field in table.schema} for row in rows]
    return rows


def _value(kind: Any, value: Any) -> Any:
    if value is not None and getattr(kind, "extension_name", None) == "arrow.json":
        return json.loads(value)
    if isinstance(value, dict) and (fields := getattr(kind, "fields", None)) is not None:
        return {field.name: _value(field.type, value[field.name]) for field in fields}
    if isinstance(value, list):
        return [_value(getattr(kind, "value_type", None), each) for each in value]
    return value


_READERS: dict[str, Callable[[RowFile], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}


def _text(content: bytes, path: Path, first_line: int) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + content.count(b"\n", 0, error.start)
        fix = _fix_of(path) or "save it as UTF-8"
        raise SettingError("path", f"{path}:{line} is not UTF-8: {error.reason}", fix) from None


def _parse(content: bytes, path: Path, first_line: int) -> Any:
    """Parse `content` as JSON; it begins at line `first_line` (from 1) of `path`."""
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(content)
    text = _text(content, path, first_line)
    # json also reads NaN and half of a surrogate pair, and its errors have the column
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        problem = f"{path}:{line} is not JSON: {error.msg} at column {error.colno}"
        raise SettingError("path", problem, _fix(path, content, first_line, error)) from None
    except (RecursionError, ValueError) as error:  # too deep, or a number of thousands of digits
        raise SettingError("path", f"{path}:{first_line} cannot be read as JSON: {error}", "correct it") from None


def _fix_of(path: Path) -> str:
    """Return the fix for a file with the ending of another kind; empty if its content does not tell."""
    with path.open("rb") as file:
        head = file.read(64)
    found = next((fix for start, fix in _CONTENTS.items() if head.lower().startswith(start.lower())), "")
    is_of_its_kind = path.suffix.lower() == ".gz" or (is_columnar(path) and head.startswith(b"PAR1"))
    return "" if is_of_its_kind else found.replace("{file}", path.name)


def _fix(path: Path, content: bytes, first_line: int, error: json.JSONDecodeError) -> str:
    if first_line == 1 and (found := _fix_of(path)):
        return found
    if _format(path) == ".json" and error.msg == "Extra data":
        return "rename it to .jsonl if it has one object per line"
    if _format(path) == ".jsonl" and first_line == 1 and content.strip() in (b"[", b"{"):
        return "rename it to .json if it is one list, or write one object per line"
    return "correct it"
