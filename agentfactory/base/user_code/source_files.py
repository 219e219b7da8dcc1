"""The files of user code that a recipe runs: those that it names, and the files that they import."""

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

_SCRIPTS = (".py", ".js", ".mjs", ".cjs", ".ts", ".sh")


def source_files(named: Mapping[str, Any], base: Path, import_path: Iterable[Path] = ()) -> dict[Path, str]:
    """Return the files of code in the values `named` (field -> value), and what they import, with who names each."""
    found: dict[Path, str] = {}
    for field, value in named.items():
        for text in _texts(value):
            reference = re.fullmatch(r"(?P<file>.+\.py):[A-Za-z_]\w*", text)
            file = reference["file"] if reference else text if text.endswith(_SCRIPTS) else None
            if file is not None and (path := (base / file).resolve()).is_file():
                found.setdefault(path, field)
    waiting = [*found]
    while waiting:
        file = waiting.pop()
        for path in _imported_by(file, [file.parent, *import_path]):
            if path not in found:
                found[path] = f"imported by {file.name}"
                waiting.append(path)
    return found


def variables_read(file: Path) -> set[str]:
    """Return the environment variables that a Python file reads by name."""
    names: set[str] = set()
    if file.suffix == ".py":
        # whoever runs the file reports its error
        with suppress(SyntaxError, ValueError):
            for node in ast.walk(ast.parse(file.read_bytes())):
                match node:
                    case ast.Subscript(value=ast.Attribute(attr="environ"), slice=ast.Constant(value=str(name))):
                        names.add(name)
                    case ast.Call(func=ast.Attribute(attr=called), args=[ast.Constant(value=str(name)), *_]):
                        if called == "getenv" or (called == "get" and ast.unparse(node.func).endswith("environ.get")):
                            names.add(name)
    return names


def digests_of(files: Iterable[Path]) -> dict[str, str]:
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for each in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _texts(each)


def _imported_by(file: Path, folders: Iterable[Path]) -> Iterator[Path]:
    names: set[str] = set()
    with suppress(SyntaxError, ValueError):
        names = imports_of(file.read_bytes(), relative=True) if file.suffix == ".py" else names
    for name in sorted(names):
        for folder in folders:
            place = folder.joinpath(*name.split("."))
            for path in (place.with_suffix(".py"), place / "__init__.py"):
                if path.is_file():
                    yield path.resolve()


@lru_cache
def imports_of(source: bytes, relative: bool = False) -> set[str]:
    """Return every module, with its packages, that a file may import; `relative`: from its own package, too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (relative or node.level == 0):
            parent = [node.module] if node.module else []
            found |= {".".join([*parent, alias.name]) for alias in node.names} | {*parent}
    # importing a module imports its parent packages
    return {".".join(name.split(".")[: end + 1]) for name in found for end in range(name.count(".") + 1)}
