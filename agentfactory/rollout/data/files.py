"""Reading of rows from files, by their endings."""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentfactory.tools.errors import SettingError

FORMATS = ".jsonl, .json, .csv or .parquet"
"""The endings of data files, in upper case too; all but parquet may be compressed as .gz."""
_MOST_BYTES = 1 << 26
"""Maximum bytes of a file that is read before the start. It takes about a second, in every trainer process."""
_EXPANSION = 8
"""Typical ratio of a gzip file's content to its size."""
_LONGEST_CELL = 1 << 30
_BY_DATASETS = "convert it: python -c 'import datasets; datasets.{read}.to_json(\"rows.jsonl\")'"
_BY_PANDAS = 'convert it: python -c \'import pandas; pandas.{read}.to_json("rows.jsonl", "records", lines=True)\''
_CONVERSIONS = {
    ".arrow": _BY_DATASETS.format(read='Dataset.from_file("{file}")'),
    ".bz2": "decompress it: bunzip2 {file}",
    ".feather": _BY_PANDAS.format(read='read_feather("{file}")'),
    ".jsonlines": "rename it to .jsonl",
    ".ndjson": "rename it to .jsonl",
    ".tsv": _BY_PANDAS.format(read='read_csv("{file}", sep="\\t", dtype=str)'),
    ".txt": "rename it to the ending of its content: .jsonl, .json or .csv",
    ".xlsx": _BY_PANDAS.format(read='read_excel("{file}")'),
    ".xz": "decompress it: unxz {file}",
    ".zip": "decompress it: unzip {file}",
    ".zst": "decompress it: unzstd {file}",
}


def read_file(path: Path) -> list[Any]:
    """Return the rows of a file. Raise SettingError for `path`, with the line and the fix, if it cannot be read."""
    read = _READERS.get(_format(path))
    if read is None:
        raise unreadable(path)
    return read(path)


def is_data_file(path: Path) -> bool:
    """Return whether the file exists and has the ending of a data file."""
    return path.is_file() and _format(path) in _READERS


def unreadable(path: Path) -> SettingError:
    """Return the error for a file or folder that is not a data file, with the command that makes it one."""
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


def _jsonl(path: Path) -> list[Any]:
    # split bytes: text would also be split at U+2028, which a JSON string may contain
    lines = enumerate(_bytes_of(path).splitlines(), 1)
    return [_parse(line, path, number) for number, line in lines if not line.isspace() and line]


def _json(path: Path) -> list[Any]:
    rows = _parse(_bytes_of(path), path, 1)
    if not isinstance(rows, list):
        problem = f"{path} holds a {type(rows).__name__}, not a list of rows"
        lists = [name for name, value in rows.items() if isinstance(value, list)] if isinstance(rows, dict) else []
        inside = f": it has one in {', '.join(lists)}" if lists else ""
        raise SettingError("path", problem, f"make it a list{inside}")
    return rows


def _csv(path: Path) -> list[Any]:
    csv.field_size_limit(_LONGEST_CELL)
    rows = csv.DictReader(io.StringIO(_text(_bytes_of(path), path, 1), newline=""), strict=True)
    try:
        header = list(rows.fieldnames or [])
        if len(header) == 1 and (separator := next((mark for mark in ";\t|" if mark in header[0]), None)):
            problem = f"{path} separates its columns by {separator!r}"
            raise SettingError("path", problem, "save it with commas")
        if len(set(header)) < len(header) or "" in header:
            raise SettingError("path", f"{path}:1 names its columns {header}", "give each another name")
        found = []
        for row in rows:
            if None in row or None in row.values():
                problem = f"{path}:{rows.line_num} does not have {len(header)} cells, as its first line"
                raise SettingError("path", problem, "correct it, and put text with commas or quotes in quotes")
            found.append(row)
    except csv.Error as error:
        raise SettingError("path", f"{path}:{rows.line_num + 1} is not CSV: {error}", "correct it") from error
    return found


def _parquet(path: Path) -> list[Any]:
    # takes seconds to import
    import datasets

    try:
        return datasets.Dataset.from_parquet(str(path)).to_list()
    except (ValueError, datasets.exceptions.DatasetGenerationError) as error:
        problem = f"{path} cannot be read as parquet: {error.__cause__ or error}"
        raise SettingError("path", problem, "correct it") from error


_READERS: dict[str, Callable[[Path], list[Any]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}


def _bytes_of(path: Path) -> bytes:
    """Return the content of a file, decompressed if it is compressed, without a byte order mark."""
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix.lower() == ".gz" else content
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise SettingError("path", f"{path} is damaged: {error}", "fetch or compress it again") from error
    except OSError as error:
        raise SettingError("path", f"{path} cannot be read: {error.strerror}", "make it readable") from error
    return content.removeprefix(b"\xef\xbb\xbf")


def _text(content: bytes, path: Path, first_line: int) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + content.count(b"\n", 0, error.start)
        raise SettingError("path", f"{path}:{line} is not UTF-8: {error.reason}", "save it as UTF-8") from None


def _parse(content: bytes, path: Path, first_line: int) -> Any:
    """Parse `content` as JSON; it begins at line `first_line` (from 1) of `path`."""
    try:
        return json.loads(_text(content, path, first_line))
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        problem = f"{path}:{line} is not JSON: {error.msg} at column {error.colno}"
        raise SettingError("path", problem, _fix(path, content, first_line, error)) from None
    except (RecursionError, ValueError) as error:  # too deep, or a number of thousands of digits
        raise SettingError("path", f"{path}:{first_line} cannot be read as JSON: {error}", "correct it") from None


def _fix(path: Path, content: bytes, first_line: int, error: json.JSONDecodeError) -> str:
    if _format(path) == ".json" and error.msg == "Extra data":
        return "rename it to .jsonl if it has one object per line"
    if _format(path) == ".jsonl" and first_line == 1 and content.strip() in (b"[", b"{"):
        return "rename it to .json if it is one list, or write one object per line"
    return "correct it"
