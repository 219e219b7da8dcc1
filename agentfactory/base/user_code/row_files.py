"""Files that a data row puts into a chain's workspace."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from agentfactory.base.files.untrusted_files import create_file, open_file, resolved


def load_files(files: Any, folder: Path | None, most_mb: int) -> dict[str, bytes]:
    """Return name -> content of a row's `files`: a mapping of name to text or `{"base64": ...}`, or names below
    `folder`. Raises ValueError if they are wrong, or exceed `most_mb` MiB."""
    contents = _contents(files, folder, most_mb)
    for name in contents:
        if not is_inside(name) or any(str(parent) in contents for parent in PurePosixPath(name).parents):
            fix = "give a relative path without .., and not below another file"
            raise ValueError(f"files: {name!r} does not name a file of the workspace; {fix}")
    if (size := sum(map(len, contents.values())) / 2**20) > most_mb:
        raise ValueError(f"files: they have {size:.0f} MiB, and a workspace may have {most_mb}; give smaller ones")
    return contents


def names_of(files: Any) -> list[str]:
    """Return the names in a row's `files`, which may be invalid."""
    if isinstance(files, Mapping):
        return [str(name) for name, content in files.items() if content is not None]
    return [] if files is None or isinstance(files, str) or not isinstance(files, Sequence) else [*map(str, files)]


def write_files(contents: Mapping[str, bytes], folder: Path) -> None:
    for name, content in contents.items():
        with create_file(resolved(name, folder), folder) as file:
            file.write(content)


def is_inside(name: str) -> bool:
    """Return whether `name` is a path of a file below the workspace."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _contents(files: Any, folder: Path | None, most_mb: int) -> dict[str, bytes]:
    if files is None:
        return {}
    if isinstance(files, Mapping):
        # columns of parquet files and of hub datasets have null where a row lacks the name
        return {str(name): _decode(name, content) for name, content in files.items() if content is not None}
    if not isinstance(files, Sequence) or isinstance(files, str):
        raise ValueError(f"files: got {files!r}; give a mapping of name to text, or a list of names")
    if folder is None:
        raise ValueError(f"files: the row names {list(files)}; set the option `files` to their folder")
    return {str(name): _read(str(name), folder, most_mb) for name in files}


def folder_of_files(files: str | None) -> Path | None:
    """Return the folder that the option `files` names. Raises ValueError if there is none."""
    if files is not None and not Path(files).is_dir():
        raise ValueError(f"files: there is no folder {Path(files).resolve()}")
    return None if files is None else Path(files).resolve()


def _read(name: str, folder: Path, most_mb: int) -> bytes:
    try:
        with open_file(resolved(name, folder), folder) as file:
            content = file.read((most_mb << 20) + 1)
    except (OSError, ValueError):  # ValueError: the name has a null byte
        raise ValueError(f"files: there is no file {name!r} in {folder}; create it, or correct the name") from None
    if len(content) > most_mb << 20:
        raise ValueError(f"files: {name!r} is larger than the {most_mb} MiB of a workspace; give a smaller one")
    return content


def _decode(name: str, content: Any) -> bytes:
    if isinstance(content, str):
        return content.encode()
    try:
        return base64.b64decode(content["base64"], validate=True)
    except (binascii.Error, ValueError, LookupError, TypeError) as error:
        raise ValueError(f'files: {name} cannot be read: {error!r}; give a text, or {{"base64": ...}}') from None
