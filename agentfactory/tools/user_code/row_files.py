"""Files that a data row puts into a chain's workspace."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def load_files(files: Any, folder: Path | None, most_mb: int) -> dict[str, bytes]:
    """Return name -> content of a row's `files`: a mapping of name to text, or to `{"base64": ...}`, or a list of names
    below `folder`.

    Raises:
        ValueError: it is neither, or a file does not exist, or is larger than `most_mb` MiB.
    """
    if files is None:
        return {}
    if isinstance(files, Mapping):
        return {str(name): _decode(name, content) for name, content in files.items()}
    if not isinstance(files, Sequence) or isinstance(files, str):
        raise ValueError(f"files: got {files!r}; it must be a mapping of name to text, or a list of names")
    if folder is None:
        raise ValueError(f"files: the row names {list(files)}; set the option `files` to their folder")
    return {str(name): _read(str(name), folder, most_mb) for name in files}


def folder_of_files(files: str | None) -> Path | None:
    """Return the folder that the option `files` names. Raises ValueError if there is none."""
    if files is not None and not Path(files).is_dir():
        raise ValueError(f"files: there is no folder {Path(files).resolve()}")
    return None if files is None else Path(files).resolve()


def _read(name: str, folder: Path, most_mb: int) -> bytes:
    path = (folder / name).resolve()
    if not path.is_relative_to(folder) or not path.is_file():
        raise ValueError(f"files: there is no file {name!r} in {folder}")
    if path.stat().st_size > most_mb << 20:
        raise ValueError(f"files: {name!r} is larger than the workspace; raise disk_mb ({most_mb})")
    return path.read_bytes()


def _decode(name: str, content: Any) -> bytes:
    if isinstance(content, str):
        return content.encode()
    if isinstance(content, Mapping) and isinstance(coded := content.get("base64"), str):
        try:
            return base64.b64decode(coded, validate=True)
        except binascii.Error as error:
            raise ValueError(f"files: {name} is not base64: {error}") from None
    raise ValueError(f'files: {name} is {type(content).__name__}; it must be a text, or {{"base64": ...}}')
