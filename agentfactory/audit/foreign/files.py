"""Lines and other parts of files, with errors that name the file, the line and a fix."""

from collections.abc import Iterable, Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
from pydantic_core import from_json

from agentfactory.base.errors import SettingError
from agentfactory.base.files.untrusted_files import lines_of, open_file, read_json

_FIX = "copy the file again, or remove this line"


def malformed(file: Path, number: int, error: object, part: str = "line") -> SettingError:
    return SettingError("", f"{part} {number} of {file} cannot be read: {_described(error)}", _FIX)


def _described(error: object) -> str:
    if isinstance(error, KeyError):
        return f"it has no {error.args[0]}"
    return str(error) or type(error).__name__


def convert(value: Any, kind: Any) -> Any:
    """Return parsed JSON as the msgspec type `kind`. Raise ValueError that names the field if it has another form."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def rows_of(file: Path, within: Path | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number, from 1, and the object of each line of a file of JSON lines, which may be compressed by zstd.
    An incomplete last line is left out: it is still being written, or its writer was killed. Raises SettingError at any
    other line that holds no object, and if the file cannot be opened."""
    number = 0
    try:
        with open_file(file, within) as plain:
            for number, line in enumerate(lines_of(_decompressed(plain) if file.suffix == ".zst" else plain), 1):
                if not line.strip():
                    continue
                try:
                    row = from_json(line)
                except ValueError:
                    if not line.endswith(b"\n"):
                        return
                    raise
                if not isinstance(row, dict):
                    raise ValueError("it is no JSON object")
                yield number, row
    except SettingError:
        raise
    except (OSError, ValueError) as error:
        raise malformed(file, max(number, 1), error) from error


def _decompressed(file: BufferedReader) -> BinaryIO:
    import pyarrow

    # reads one frame after the other, and skips the table of frames at the end
    return BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd"))


def object_of(file: Path, within: Path | None = None) -> dict[str, Any]:
    """Return the object in a JSON file. Raises SettingError if it cannot be read."""
    try:
        return cast(dict[str, Any], read_json(file, within))
    except (OSError, ValueError) as error:
        raise SettingError("", f"{file} cannot be read: {error}", "copy the file again") from error


def first_row(file: Path) -> dict[str, Any]:
    """Return the first object of a file of JSON lines; an empty one if the file may be anything else."""
    try:
        return next((row for _, row in rows_of(file)), {})
    except SettingError:
        return {}


def numbers_of(found: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in found.items() if isinstance(value, (int, float)) and type(value) is not bool}


def metric_lines(found: Iterable[Mapping[str, float]], ours: Mapping[str, str] | None = None) -> list[dict[str, float]]:
    """Return a line for each `step` of these numbers, with those that `ours` names (name there -> ours) under both."""
    lines: dict[float, dict[str, float]] = {}
    for row in found:
        if isinstance(step := row.get("step"), int):
            mine = {name: row[theirs] for theirs, name in (ours or {}).items() if theirs in row}
            lines.setdefault(step, {}).update({**row, **mine})
    return [lines[step] for step in sorted(lines)]
