"""`Corpus`: the passages of a file or a hub data set, streamed."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from agentfactory.rollout.model_hub import HubName, check_names, is_hub_name
from agentfactory.tools.errors import SettingError, short
from agentfactory.worlds.search.passage import Passage

_LINES = (".jsonl", ".jsonl.gz")
_KINDS = (*_LINES, ".parquet")


class Corpus:
    """Passages in source order from a .jsonl, .jsonl.gz or .parquet file, or from a hub data set.

    A row has either `contents`, whose first line is the title, or `text` and optionally `title`. It may have `id` or
    `_id` (default: the row's index, from 0) and `url`. Iterating raises SettingError for an invalid row, with the file,
    the line and the field.

    Args:
        path: The file, a hub data set's name, or a folder that `datasets` can read.
        subset: The data set's configuration name.
        split: The data set's split.

    Raises:
        SettingError: the file does not exist, or has an unsupported suffix.
    """

    def __init__(self, path: str, subset: str | None = None, split: str = "train") -> None:
        self.share: float | None = None
        """The fraction of the corpus read so far, from 0 to 1; None if unknown."""
        self._path, self._subset, self._split = path, subset, split
        file = Path(path)
        if not file.exists() and path.endswith(_KINDS):
            raise SettingError("corpus", f"there is no file {path}", "correct the path")
        if not file.is_file():
            self._read = self._data_set
            # a folder's files may change; a hub data set has none here
            files = sorted((str(each), each.stat().st_mtime_ns) for each in file.rglob("*"))
            self.name = f"{path} {subset or ''} {split} {zlib.crc32(repr(files).encode())}"
            return
        if file.name.endswith(_LINES):
            self._read = self._lines
        elif file.suffix == ".parquet":
            self._read = self._parquet
        else:
            fix = f"use a file {', '.join(_KINDS)}, or the name of a hub data set"
            raise SettingError("corpus", f"{path} has an unsupported suffix", fix)
        about = file.stat()
        self.name = f"{file.resolve()} {about.st_size} {about.st_mtime_ns}"
        """Differs between corpora with different contents, as far as path, size and time can tell."""

    def __iter__(self) -> Iterator[Passage]:
        self.share = None
        for number, (place, row) in enumerate(self._read()):
            yield _passage(row, place, number)
        self.share = 1.0

    def _lines(self) -> Iterator[tuple[str, Any]]:
        size = max(1, Path(self._path).stat().st_size)
        with open(self._path, "rb") as raw:
            lines = gzip.GzipFile(fileobj=raw) if self._path.endswith(".gz") else raw
            try:
                for number, line in enumerate(lines, 1):
                    if number % 1000 == 0:
                        self.share = min(1.0, raw.tell() / size)
                    if not line.isspace():
                        place = f"{self._path}:{number}"
                        yield place, _parse(line, place)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise SettingError("corpus", f"{self._path} is cut off or damaged: {error}", "fetch it again") from None

    def _parquet(self) -> Iterator[tuple[str, Any]]:
        # takes a moment to import
        import pyarrow
        from pyarrow.parquet import ParquetFile

        try:
            with ParquetFile(self._path) as file:
                total, number = max(1, file.metadata.num_rows), 0
                for batch in file.iter_batches(1024):
                    for row in batch.to_pylist():
                        number += 1
                        yield f"{self._path}: row {number}", row
                    self.share = number / total
        except (pyarrow.ArrowException, OSError) as error:
            raise SettingError("corpus", f"{self._path} cannot be read as parquet: {error}", "correct it") from None

    def _data_set(self) -> Iterator[tuple[str, Any]]:
        if is_hub_name(self._path):
            check_names([HubName("corpus", self._path, "dataset")])
        # takes seconds to import
        import datasets

        try:
            rows = datasets.load_dataset(self._path, self._subset, split=self._split, streaming=True)
            for number, row in enumerate(rows, 1):
                yield f"{self._path}: row {number}", row
        except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
            problem = f"{self._path} is not a file, and cannot be read as a hub data set: {error}"
            raise SettingError("corpus", problem, "name one that exists, with its --subset and --split") from None


def _parse(line: bytes, place: str) -> Any:
    try:
        return msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    # json also accepts lone surrogates, and its errors have the column
    try:
        return json.loads(line)
    except UnicodeDecodeError as error:
        raise SettingError("corpus", f"{place} is not UTF-8: {error.reason}", "save it as UTF-8") from None
    except json.JSONDecodeError as error:
        raise SettingError(
            "corpus", f"{place} is not JSON: {error.msg} at column {error.colno}", "correct it"
        ) from None
    except RecursionError:
        raise SettingError("corpus", f"{place} is nested too deeply", "correct it") from None


def _passage(row: Any, place: str, number: int) -> Passage:
    if not isinstance(row, dict):
        raise SettingError("corpus", f"{place} is a {type(row).__name__}, not an object", "give it id and contents")
    contents = row.get("contents")
    if contents is None:
        text, title = _text(row, "text", place), _text(row, "title", place)
        if text is None:
            problem = f"{place} has neither contents nor text but {', '.join(row) or 'nothing'}"
            raise SettingError("corpus", problem, "rename a field to one of them")
        contents = f'"{title}"\n{text}' if title else f"\n{text}"
    elif not isinstance(contents, str):
        raise _unfit("contents", contents, place)
    id = next((row[name] for name in ("id", "_id") if row.get(name) is not None), number)
    if not isinstance(id, (str, int)) or isinstance(id, bool):
        raise _unfit("id", id, place)
    return Passage(str(id), contents, url=_text(row, "url", place))


def _text(row: dict[str, Any], field: str, place: str) -> str | None:
    value = row.get(field)
    if value is not None and not isinstance(value, str):
        raise _unfit(field, value, place)
    return value


def _unfit(field: str, value: Any, place: str) -> SettingError:
    return SettingError("corpus", f"{place}: {field} is {short(value)}, not a string", f"make {field} a string")
