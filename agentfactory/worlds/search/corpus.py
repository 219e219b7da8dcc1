"""`Corpus`: the passages of a file or a hub data set, streamed."""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentfactory.base.errors import SettingError, short
from agentfactory.rollout.data.files import RowFile, has_known_ending
from agentfactory.rollout.model_hub import HubName, check_names, is_hub_name
from agentfactory.worlds.search.passage import Passage


class Corpus:
    """Passages in source order from a file of the kinds of `data.path`, or from a hub data set. A row has either
    `contents`, whose first line is the title, or `text` and optionally `title`. It may have `id` or `_id` (default: the
    row's index, from 0) and `url`. Iterating raises SettingError for an invalid row, with the file, the line and the
    field. `path`: the file, a hub data set's name, or a folder that `datasets` can read. `subset`, `split`: the data
    set's configuration name and split. Raises SettingError if the file does not exist, or its suffix is unsupported."""

    def __init__(self, path: str, subset: str | None = None, split: str = "train") -> None:
        self._path, self._subset, self._split = path, subset, split
        self._file: RowFile | None = None
        file = Path(path)
        if not file.exists() and has_known_ending(file):
            raise SettingError("corpus", f"there is no file {path}", "correct the path")
        if not file.is_file():
            # a folder's files may change; a hub data set has none here
            files = sorted((str(each), each.stat().st_mtime_ns) for each in file.rglob("*"))
            self.name = f"{path} {subset or ''} {split} {zlib.crc32(repr(files).encode())}"
            return
        try:
            self._file = RowFile(file)
        except SettingError as error:
            raise error.at("corpus") from None
        about = file.stat()
        self.name = f"{file.resolve()} {about.st_size} {about.st_mtime_ns}"
        """Differs between corpora with different contents, as far as path, size and time can tell."""

    @property
    def share(self) -> float | None:
        """The fraction of the corpus read so far, from 0 to 1; None if unknown."""
        return None if self._file is None else self._file.share

    def __iter__(self) -> Iterator[Passage]:
        try:
            for number, (place, row) in enumerate(self._data_set() if self._file is None else self._file):
                yield _passage(row, place, number)
        except SettingError as error:
            raise error.at("corpus") from error.__cause__

    def _data_set(self) -> Iterator[tuple[str, Any]]:
        if is_hub_name(self._path):
            check_names([HubName("corpus", self._path, "dataset")])
        import datasets

        try:
            rows = datasets.load_dataset(self._path, self._subset, split=self._split, streaming=True)
            for number, row in enumerate(rows, 1):
                yield f"{self._path}: row {number}", row
        except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
            problem = f"{self._path} is not a file, and cannot be read as a hub data set: {error}"
            raise SettingError("corpus", problem, "name one that exists, with its --subset and --split") from None


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
