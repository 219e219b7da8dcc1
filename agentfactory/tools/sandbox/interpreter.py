"""Selection of the Python inside sandboxes, and of the installed packages that it can import."""

import json
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from agentfactory.base.processes.sandbox_limits import NO_SANDBOX, SandboxUnavailable

_PROBE = "import json, sys; print(json.dumps([*sys.version_info[:2], sys.prefix]))"


@dataclass(frozen=True)
class Interpreter:
    """A Python outside any virtual environment."""

    executable: Path
    prefix: Path
    version: tuple[int, int]


@cache
def find_interpreter(user: int | None) -> Interpreter:
    """Return a Python that the user id of sandboxes can read: ours or the system's. Raises SandboxUnavailable."""
    own = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    system = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    reasons = []
    for candidate in dict.fromkeys([own, *([Path(system)] if system else [])]):
        executable = Path(os.path.realpath(candidate))
        if user is not None and not is_public(executable):
            reasons.append(f"{candidate} is in a folder that only its owner may enter")
            continue
        try:
            command = [str(executable), "-I", "-S", "-c", _PROBE]
            probe = subprocess.run(command, user=user, capture_output=True, check=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            reasons.append(f"{candidate}: {error}")
            continue
        major, minor, prefix = json.loads(probe.stdout)
        if (major, minor) >= (3, 8):
            return Interpreter(executable, Path(prefix), (major, minor))
        reasons.append(f"{candidate} is Python {major}.{minor}, older than 3.8")
    problem = f"no usable Python for sandboxes: {'; '.join(reasons)}"
    fix = f"install the system's python3, or a Python in a folder that every user can read, {NO_SANDBOX}"
    raise SandboxUnavailable(problem, fix)


def package_paths(packages: tuple[str, ...], interpreter: Interpreter) -> dict[str, Path]:
    """Return name -> installed path of `packages` and their dependencies. Raises ValueError if one cannot be used."""
    if packages and interpreter.version != sys.version_info[:2]:
        problem = f"packages: they are for another Python than the sandbox's, {interpreter.executable}"
        raise ValueError(f"{problem}; use a Python in a folder that every user can read, or remove the packages")
    paths: dict[str, Path] = {}
    pending, seen = [*map(canonicalize_name, packages)], set[str]()
    while pending:
        if (name := pending.pop()) in seen:
            continue
        seen.add(name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            raise ValueError(f"packages: {name} is not installed here; `pip install {name}`, or remove it") from None
        for file in distribution.files or []:
            first = file.parts[0]
            if first not in ("..", "__pycache__"):
                paths[first] = Path(str(distribution.locate_file(first)))
        for text in distribution.requires or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                pending.append(canonicalize_name(requirement.name))
    return paths


def library_folders(interpreter: Interpreter) -> list[Path]:
    """Return the folders with the standard library and the shared libraries that the interpreter loads."""
    names = dict.fromkeys(("lib", "lib64", sysconfig.get_config_var("platlibdir") or "lib"))
    own = [interpreter.prefix / name for name in names]
    system = [Path("/usr/lib"), Path("/usr/lib64")]
    return [folder for folder in dict.fromkeys((*system, *own)) if folder.is_dir() and not folder.is_symlink()]


def is_public(path: Path) -> bool:
    """Return whether every user can read `path` and enter every folder above it."""
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in path.parents) and bool(
        path.stat().st_mode & stat.S_IROTH
    )
