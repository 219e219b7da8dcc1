"""A parser for tasks' Dockerfiles: image, working folder, variables and copied files."""

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import PurePosixPath

_IGNORED = frozenset({"CMD", "EXPOSE", "LABEL", "MAINTAINER", "HEALTHCHECK", "STOPSIGNAL", "VOLUME", "SHELL"})
"""Instructions that affect neither the file system nor single commands."""
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")
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
    """Parse a Dockerfile with a single stage. Raises Unsupported."""
    found = Dockerfile()
    arguments: dict[str, str] = {}
    for line, name, value in _instructions(text):
        scope = {**arguments, **found.env}
        if name == "ARG":
            arguments.update({key: _expanded(given, scope) for key, given in _pairs(line, name, value).items()})
        elif name == "FROM":
            if found.image:
                raise Unsupported(line, "a second FROM: it has several stages", "keep the last stage only")
            words = [word for word in value.split() if not word.startswith("--")]
            found.image = _expanded(words[0], scope) if words else ""
            if not found.image:
                raise Unsupported(line, "FROM names no image", "name one")
        elif not found.image:
            raise Unsupported(line, f"{name} comes before FROM", "begin with FROM")
        elif name == "WORKDIR":
            found.workdir = str(PurePosixPath(found.workdir, _expanded(value, scope)))
        elif name == "ENV":
            found.env.update({key: _expanded(given, scope) for key, given in _pairs(line, name, value).items()})
        elif name in ("COPY", "ADD"):
            found.copies.append(_copy(line, name, value, scope, found.workdir))
        elif name == "RUN":
            found.runs.append((line, value))
        elif name == "USER":
            if _expanded(value, scope).partition(":")[0] not in ("root", "0"):
                raise Unsupported(line, f"USER {value}: there is one user, named root", "remove it")
        elif name not in _IGNORED:
            raise Unsupported(line, f"{name} is not supported", "remove it, or do it in the root file system")
    if not found.image:
        raise Unsupported(1, "there is no FROM", "begin with FROM")
    return found


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


def _copy(line: int, name: str, value: str, scope: dict[str, str], workdir: str) -> Copy:
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
        if not re.fullmatch(r"[0-7]{3,4}", chmod):
            raise Unsupported(line, f"{name} --chmod={chmod}", "give the mode in octal digits")
        mode = int(chmod, 8)
    words = json.loads(value) if value.startswith("[") else shlex.split(value)
    *sources, target = [_expanded(word, scope) for word in words]
    if not sources:
        raise Unsupported(line, f"{name} {value}: it names no source or no target", "name both")
    for source in sources:
        if re.match(r"\w+://", source) or (name == "ADD" and source.endswith(_ARCHIVES)):
            raise Unsupported(line, f"{name} {source}", "put the files themselves into environment/, and use COPY")
    into = len(sources) > 1 or target.endswith("/") or target in (".", "..")
    return Copy(sources, str(PurePosixPath(workdir, target)), into, mode, line)


def _pairs(line: int, name: str, value: str) -> dict[str, str]:
    try:
        words = shlex.split(value)
    except ValueError as error:
        raise Unsupported(line, f"{name} {value}: {error}", "correct it") from None
    if name == "ENV" and words and "=" not in words[0]:
        return {words[0]: " ".join(words[1:])}
    # an ARG without a default is empty, because builds get no arguments
    return {key: given for key, _, given in (word.partition("=") for word in words)}


def _expanded(text: str, scope: dict[str, str]) -> str:
    return _VARIABLE.sub(lambda match: scope.get(match[1] or match[3], match[2] or ""), text)
