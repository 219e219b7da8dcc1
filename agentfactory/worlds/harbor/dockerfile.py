"""A parser for tasks' Dockerfiles: image, working folder, variables and copied files."""

import json
import posixpath
import re
import shlex
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field

_IGNORED = frozenset({"CMD", "EXPOSE", "LABEL", "MAINTAINER", "HEALTHCHECK", "STOPSIGNAL", "VOLUME", "SHELL"})
"""Instructions that affect neither the file system nor single commands."""
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")
_MOST_TEXT = 1 << 20
"""Characters of all expanded texts of a file: `ENV A=$A$A` doubles with each line."""
_LONGEST_PATH = 4096
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")


class Unsupported(ValueError):
    """An instruction cannot be honoured. Has its `line` in the file, the problem and a fix."""

    def __init__(self, line: int, problem: str, fix: str) -> None:
        super().__init__(problem)
        self.line, self.problem, self.fix = line, problem, fix


@dataclass(frozen=True)
class Copy:
    """A COPY of files from the task's `environment/` to their place in the image."""

    sources: list[str]
    target: str
    into: bool
    """True if the target is a folder that the sources are copied into."""
    mode: int | None
    line: int


@dataclass
class Dockerfile:
    """A parsed Dockerfile. RUN instructions are not executed: `runs` lists their line numbers and commands."""

    image: str = ""
    workdir: str = "/"
    env: dict[str, str] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)
    runs: list[tuple[int, str]] = field(default_factory=list)


def parse(text: str) -> Dockerfile:
    """Parse a Dockerfile with a single stage. Raises Unsupported, and ValueError if its texts or paths are too long."""
    found = Dockerfile()
    arguments: dict[str, str] = {}
    scope = _Scope(ChainMap(found.env, arguments))
    for line, name, value in _instructions(text):
        if name == "ARG":
            arguments.update({key: scope.expanded(given) for key, given in _pairs(line, name, value).items()})
        elif name == "FROM":
            if found.image:
                raise Unsupported(line, "a second FROM: it has several stages", "keep the last stage only")
            words = [word for word in value.split() if not word.startswith("--")]
            found.image = scope.expanded(words[0]) if words else ""
            if not found.image:
                raise Unsupported(line, "FROM names no image", "name one")
        elif not found.image:
            raise Unsupported(line, f"{name} comes before FROM", "begin with FROM")
        elif name == "WORKDIR":
            found.workdir = joined(found.workdir, scope.expanded(value))
        elif name == "ENV":
            found.env.update({key: scope.expanded(given) for key, given in _pairs(line, name, value).items()})
        elif name in ("COPY", "ADD"):
            found.copies.append(_copy(line, name, value, scope, found.workdir))
        elif name == "RUN":
            found.runs.append((line, value))
        elif name == "USER":
            if scope.expanded(value).partition(":")[0] not in ("root", "0"):
                raise Unsupported(line, f"USER {value}: there is one user, named root", "remove it")
        elif name not in _IGNORED:
            raise Unsupported(line, f"{name} is not supported", "remove it, or do it in the root file system")
    if not found.image:
        raise Unsupported(1, "there is no FROM", "begin with FROM")
    return found


def joined(base: str, path: str) -> str:
    """Return the absolute path of `path` relative to `base`, without `..`. Raises ValueError if it is too long."""
    whole = posixpath.join("/", base, path)
    if len(whole) > _LONGEST_PATH:
        raise ValueError(f"it has a path of {len(whole)} characters; use {_LONGEST_PATH} at most")
    return "/" + posixpath.normpath(whole).lstrip("/")


def _instructions(text: str) -> list[tuple[int, str, str]]:
    """Return (first line number, name, value) of each instruction, with continuation lines joined."""
    found: list[tuple[int, str, str]] = []
    parts: list[str] = []
    first = 0
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("#") or not stripped:
            continue
        first = first if parts else number
        if stripped.endswith("\\"):
            parts.append(stripped[:-1].strip())
            continue
        name, _, value = " ".join([*parts, stripped]).partition(" ")
        parts = []
        if re.search(r"<<-?[\"']?\w", value) and name.upper() in ("RUN", "COPY", "ADD"):
            raise Unsupported(first, f"{name} with a here-document", "put the text into a file of environment/")
        found.append((first, name.upper(), value.strip()))
    return found


def _copy(line: int, name: str, value: str, scope: "_Scope", workdir: str) -> Copy:
    flags: dict[str, str] = {}
    while value.startswith("--"):
        flag, _, value = value.partition(" ")
        key, _, given = flag[2:].partition("=")
        flags[key], value = given, value.strip()
    if "from" in flags:
        raise Unsupported(
            line, f"{name} --from={flags['from']}", "put the files into environment/ or the root file system"
        )
    # the only user owns all files, so chown has no effect
    if unknown := set(flags) - {"chown", "chmod", "link"}:
        raise Unsupported(line, f"{name} --{unknown.pop()} is not supported", "remove it")
    mode = None
    if chmod := flags.get("chmod"):
        if not re.fullmatch(r"0?[0-7]{3}", chmod):
            raise Unsupported(line, f"{name} --chmod={chmod}", "give the permissions in three octal digits")
        mode = int(chmod, 8)
    words = json.loads(value) if value.startswith("[") else shlex.split(value)
    *sources, target = [scope.expanded(str(word)) for word in words] or [""]
    if not sources:
        raise Unsupported(line, f"{name} {value}: it names no source or no target", "name both")
    for source in sources:
        if re.match(r"\w+://", source) or (name == "ADD" and source.endswith(_ARCHIVES)):
            raise Unsupported(line, f"{name} {source}", "put the files themselves into environment/, and use COPY")
    into = len(sources) > 1 or target.endswith("/") or target in (".", "..")
    return Copy(sources, joined(workdir, target), into, mode, line)


def _pairs(line: int, name: str, value: str) -> dict[str, str]:
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise Unsupported(line, f"{name} {value}: {error}", "correct it") from None
    if name == "ENV" and words and "=" not in words[0]:
        return {words[0]: " ".join(words[1:])}
    # an ARG without a default is empty, because builds get no arguments
    return {key: given for key, _, given in (word.partition("=") for word in words)}


class _Scope:
    """The variables of a Dockerfile. Those of this machine are not among them."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values, self._left = values, _MOST_TEXT

    def expanded(self, text: str) -> str:
        """Return a text with its variables replaced. Raises ValueError above _MOST_TEXT."""

        def value(match: re.Match[str]) -> str:
            found = self._values.get(match[1] or match[3], match[2] or "")
            self._left -= len(found)
            if self._left < 0:
                raise ValueError(f"its variables expand to more than {_MOST_TEXT >> 20} MiB")
            return found

        return _VARIABLE.sub(value, text)
