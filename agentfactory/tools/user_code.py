"""Objects that a recipe names: out of a user's own files as `FILE.py:NAME`, or prebuilt ones by a name alone."""

import ast
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from agentfactory.tools.import_path import append_folders, user_folders


class UserCodeError(ValueError):
    """A `FILE.py:NAME` that cannot be loaded: `problem` says which part is wrong and what there is instead."""

    def __init__(self, problem: str, fix: str = "name what a file defines, as FILE.py:NAME") -> None:
        super().__init__(f"{problem}; fix: {fix}")
        self.problem, self.fix = problem, fix


def load_object(reference: str, base: Path, prebuilt: Mapping[str, str] | None = None) -> Any:
    """Load `NAME` out of `FILE.py`, a path relative to `base`; or what `prebuilt` (name -> `package.module:NAME`) has.

    The file is executed once per process, under a private module name, so that it can neither shadow nor be shadowed
    by another module. It may import what is installed, and what stands beside it: its folder is appended to the import
    path.

    Raises:
        UserCodeError: malformed reference, no such file, the file fails when executed, or it does not define the name.
    """
    if prebuilt is not None and reference in prebuilt:
        module_name, _, attribute = prebuilt[reference].partition(":")
        return getattr(importlib.import_module(module_name), attribute)
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
        raise UserCodeError(f"{reference}: {path} defines no {name}; it defines {_defined_names(module)}") from None


def load_module(path: Path) -> ModuleType:
    """Execute the file `path`, as `load_object` does. Raises UserCodeError where it fails."""
    append_folders([path.parent])
    private_name = f"_agentfactory_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if private_name in sys.modules:
        return sys.modules[private_name]
    specification = importlib.util.spec_from_file_location(private_name, path)
    assert specification is not None  # a path that ends in .py always has one, and a loader
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[private_name] = module  # dataclasses and get_type_hints look it up
    try:
        specification.loader.exec_module(module)
        _check_neighbours(path)
    except UserCodeError:
        del sys.modules[private_name]
        raise
    except Exception as error:
        del sys.modules[private_name]
        problem = f"{path} fails when it is loaded: {type(error).__name__}: {error}"
        raise UserCodeError(problem, _fix(error)) from error
    return module


def _fix(error: Exception) -> str:
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return "correct the file"
    first, *_ = error.name.split(".")
    if (Path(__file__).parents[1] / first).is_dir():
        return f"write agentfactory.{first}, if AgentFactory's own is meant"
    places = ", ".join(user_folders())
    return f"install it, or name its folder in import_path; after what is installed it was looked for in {places}"


def _check_neighbours(path: Path) -> None:
    """Raise UserCodeError where `path` imports a module that lies beside it and has got another one of the same name,
    which a file in another folder has imported before: Python has one module of a name."""
    wanted = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            wanted |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            wanted.add(node.module.partition(".")[0])
    for name in sorted(wanted):
        own = [file for file in (path.parent / f"{name}.py", path.parent / name / "__init__.py") if file.is_file()]
        found = getattr(sys.modules.get(name), "__file__", None)
        if own and found and not own[-1].samefile(found) and _is_users(found):
            raise UserCodeError(
                f"{path} imports {name}, which lies beside it, but {found} was imported under that name before",
                "give one of the two another name",
            )


def _is_users(file: str) -> bool:
    # of a library that bears the name, its own folder among others comes first by intention
    return bool({str(Path(file).parent), str(Path(file).parents[1])} & {*user_folders()})


def _defined_names(module: ModuleType) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    return ", ".join(names) or "no function and no class"
