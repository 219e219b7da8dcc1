"""Loading of objects that a recipe names: from a user's files as `FILE.py:NAME`, or prebuilt ones by name alone."""

import filecmp
import hashlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from agentfactory.base.errors import SettingError, is_interruption
from agentfactory.base.user_code.entry_points import load_named
from agentfactory.base.user_code.extras import OWN_ENVIRONMENT
from agentfactory.base.user_code.import_path import append_folders, user_folders
from agentfactory.base.user_code.source_files import imports_of
from agentfactory.base.user_code.watch import announced


class UserCodeError(SettingError):
    """A `FILE.py:NAME` that cannot be loaded: `problem` names the invalid part and the existing alternatives."""

    def __init__(self, problem: str, fix: str = "name an object that a file defines, as FILE.py:NAME") -> None:
        super().__init__("", problem, fix)


def load_object(reference: str, base: Path, prebuilt: Mapping[str, str] | None = None) -> Any:
    """Load `NAME` from `FILE.py`, a path relative to `base`, or from `prebuilt` (name -> `package.module:NAME`). The
    file is executed once per process, under its own name if `import FILE` finds it. Raises UserCodeError."""
    if prebuilt is not None and reference in prebuilt:
        return load_named(prebuilt[reference])
    file, separator, name = reference.rpartition(":")
    if prebuilt is not None and not separator:
        raise UserCodeError(f"{reference!r} is not prebuilt ({', '.join(prebuilt)}), nor of the form FILE.py:NAME")
    if not separator or not file.endswith(".py") or not name.isidentifier():
        raise UserCodeError(f"{reference!r} is not of the form FILE.py:NAME")
    path = (base / file).resolve()
    if not path.is_file():
        raise UserCodeError(f"{reference}: there is no file {path}")
    module = load_module(path)
    try:
        return getattr(module, name)
    except AttributeError:
        own = [known for known, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        defined = ", ".join(known for known in own if not known.startswith("_")) or "no function and no class"
        raise UserCodeError(f"{reference}: {path} defines no {name}; it defines {defined}") from None


def load_for(field: str, reference: str, base: Path, prebuilt: Mapping[str, str] | None = None) -> Any:
    """Load what a recipe's `field` names, as `load_object` does. Raises SettingError, which names the field."""
    try:
        return load_object(reference, base, prebuilt)
    except UserCodeError as error:
        raise SettingError(field, f"unknown: {error.problem}", error.fix) from error.__cause__


def load_module(path: Path) -> ModuleType:
    """Execute the file `path` like `load_object`. Raises UserCodeError if it fails."""
    append_folders([path.parent], of_file=True)
    private = f"_agentfactory_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    origin = _origin(path.stem)
    name = path.stem if origin is not None and Path(origin).exists() and path.samefile(origin) else private
    if name in sys.modules:
        return sys.modules[name]
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None  # a path that ends in .py always has one, and a loader
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # dataclasses and get_type_hints look it up
    try:
        with announced(f"importing {path.name}"):
            specification.loader.exec_module(module)
        _check_neighbours(path)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, UserCodeError | KeyboardInterrupt):
            raise
        if is_interruption(error):
            raise KeyboardInterrupt from error
        problem = f"{path} fails on import: {type(error).__name__}: {_said(error)}{_place(error, path)}"
        raise UserCodeError(problem, _fix(error)) from error
    return module


def _origin(name: str) -> str | None:
    """Return the file from which the module `name` is or would be imported; None if there is none."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__file__", None)
    # this imports parent packages, which may fail
    with suppress(Exception):
        specification = importlib.util.find_spec(name)
        return specification.origin if specification and specification.has_location else None
    return None


def _place(error: BaseException, path: Path) -> str:
    """Return the last location of the error in the file `path` or a helper of it; "" if the message has it."""
    if isinstance(error, SyntaxError):
        # its message ends with the line number and the file's name, without its folder
        file, line = error.filename, error.lineno
        is_helper = file is not None and file != str(path) and str(Path(file).parent) in user_folders()
        return f" ({file}, line {line})" if is_helper else ""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    users = [(file, line) for file, line in frames if file == str(path) or str(Path(file).parent) in user_folders()]
    if not users:
        return ""
    file, line = users[-1]
    return f" (line {line})" if file == str(path) else f" ({file}, line {line})"


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # boundary: the user's own class
        return "an error whose __str__ raises another"


def fix_of_old_mcp(text: str) -> str | None:
    """Return the fix of an error, in `text`, that code for version 1 of mcp raises with version 2; None for others."""
    is_one = re.search(r"'Server' object has no attribute '\w+'|(?:ModuleNotFound|Import)Error: .*['\"]mcp\b", text)
    fix = "AgentFactory needs version 2 of mcp: change the code (https://py.sdk.modelcontextprotocol.io/v2/migration/)"
    return fix if is_one else None


def _fix(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return "do not end the program when the file is imported"
    if (fix := fix_of_old_mcp(f"{type(error).__name__}: {_said(error)}")) is not None:
        return f"{fix}, or {OWN_ENVIRONMENT}"
    if not isinstance(error, ImportError):
        return "correct the file"
    first = (error.name or "").partition(".")[0]
    if "no known parent package" in _said(error):
        return "import a file of the same folder by `import NAME`, without a dot"
    if not isinstance(error, ModuleNotFoundError):
        return "correct the import" + (f"; the library {first} comes before a file of that name" if first else "")
    places = ", ".join(folder + ("" if Path(folder).is_dir() else " (no folder)") for folder in user_folders())
    return f"install it, or name its folder in import_path; it is not an installed package, nor in {places}"


def _check_neighbours(path: Path) -> None:
    """Raise UserCodeError if a module of this folder imports a name of a file there and gets another module."""
    files, folder = [path], f"{path.parent}{os.sep}"
    for module in [*sys.modules.values()]:
        file = getattr(module, "__file__", None)
        # thousands of modules may be loaded: no Path for each
        if file and file.startswith(folder) and file.endswith(".py") and os.sep not in file[len(folder) :]:
            files += [Path(file)] if file != str(path) else []
    for file in files:
        for name in sorted(imports_of(file.read_bytes())):
            place = path.parent.joinpath(*name.split("."))
            own = next((each for each in (place / "__init__.py", place.with_suffix(".py")) if each.is_file()), None)
            found = _origin(name) if own else None
            # libraries take precedence by design, and a user's folder may contain a virtual environment
            if not own or not found or "site-packages" in Path(found).parts:
                continue
            is_users = any(Path(found).is_relative_to(each) for each in user_folders())
            # either works if it is a copy
            if is_users and not filecmp.cmp(found, own, shallow=False):
                problem = f"{file} imports {name} from its own folder, but Python finds {found} under that name"
                raise UserCodeError(problem, "give one of the two another name")
