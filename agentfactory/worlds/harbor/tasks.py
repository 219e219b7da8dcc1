"""`data.harbor`: load and check tasks in Harbor's format, as data rows."""

import difflib
import os
import re
import shutil
import stat
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from pydantic import field_validator, model_validator

from agentfactory.base.config import Section
from agentfactory.base.errors import SettingError, short
from agentfactory.base.files.untrusted_files import RefusedFileError, TreeCopy, entries_of, printable, read_file
from agentfactory.base.processes.environment import is_named
from agentfactory.rollout.config import TaskSource
from agentfactory.tools.sandbox.bubblewrap import place_in
from agentfactory.worlds.harbor.dockerfile import Copy, Dockerfile, Unsupported, joined, parse
from agentfactory.worlds.harbor.harbor_task import HarborTask, Image, matching, names_without_default

_SECTIONS = {
    *("schema_version", "version", "task", "source", "metadata", "verifier", "agent", "environment", "solution"),
    "artifacts",
}
_UNSUPPORTED = {
    "environment": ("gpus", "tpu", "mcp_servers", "healthcheck"),
    "verifier": ("environment", "collect"),
}
"""Fields for features that a sandbox lacks."""
_HONOURED = {
    "agent": ("timeout_sec", "user"),
    "verifier": ("timeout_sec", "env", "user", "environment_mode"),
    "environment": ("memory_mb", "storage_mb", "workdir", "env", "docker_image", "os"),
    "solution": ("env",),
}
"""Fields with an effect here. Others may be Harbor's own; they are ignored, unless they look like a typo of these."""
_MOST_BYTES = 1 << 18
_OWN = ("/tests", "/logs", "/solution", "/proc", "/dev", "/sys", "/run")
"""Paths reserved for the format or the sandbox."""


def load_rows(folder: Path, images: Mapping[str, Image], field: str) -> list[dict[str, Any]]:
    """Return a row for each task in `folder`, or for `folder` itself if it is a task, sorted by name. A row has
    `question` (the instruction), `task` (its name) and `harbor` (the sandbox's settings). Raises SettingError below
    `field`, with the task's name, the file and a fix."""
    if not folder.is_dir():
        raise SettingError(f"{field}.folder", f"there is no folder {folder}", "name one with a subfolder per task")
    folder = Path(os.path.abspath(folder))
    found = [place for place in (folder, *map(folder.joinpath, entries_of(folder, folder)))]
    found = [place for place in found if any(map(os.path.isfile, (place / "task.toml", place / "instruction.md")))]
    if not found:
        raise SettingError(f"{field}.folder", f"no folder in {folder} has a task.toml", "name a folder of Harbor tasks")
    if found[0] == folder:
        found = [folder]
    return [_Reader(path, folder, images, field).row() for path in found]


def _without_canary(text: str) -> str:
    lines = text.split("\n")
    while lines and (not (line := lines[0].strip().lower()) or _is_canary(line)):
        lines.pop(0)
    return "\n".join(lines)


def _is_canary(line: str) -> bool:
    return "canary" in line and (line.startswith("#") or (line.startswith("<!--") and line.endswith("-->")))


class _Reader:
    def __init__(self, folder: Path, within: Path, images: Mapping[str, Image], field: str) -> None:
        self.folder, self.within, self.images, self.field = folder, within, images, field
        if printable(folder.name) != folder.name:
            raise self.error("the folder's name", "it has unprintable characters", "rename it")
        try:
            self.config = tomllib.loads(self.text("task.toml"))
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise self.error("task.toml", f"it is not TOML: {error}", "correct it") from None

    def row(self) -> dict[str, Any]:
        instruction = _without_canary(self.text("instruction.md")).strip()
        if not instruction:
            raise self.error("instruction.md", "it is empty", "describe the task there")
        return {"question": instruction, "task": self.folder.name, "harbor": self.task().to_json()}

    def error(self, file: str, problem: str, fix: str) -> SettingError:
        # texts of others can hold the control sequences of a terminal
        return SettingError(self.field, printable(f"task {self.folder.name}: {file}: {problem}"), fix)

    def text(self, name: str) -> str:
        try:
            text = read_file(self.folder / name, _MOST_BYTES, self.within).decode()
        except FileNotFoundError:
            raise self.error(name, "there is no such file", "add it, or remove the task") from None
        except (RefusedFileError, UnicodeDecodeError) as error:
            raise self.refusal(name, error) from None
        except OSError as error:
            raise self.error(name, f"it cannot be read: {error.strerror}", "make it readable") from None
        if "\0" in text:
            raise self.error(name, "it has a null character", "correct it")
        return text

    def refusal(self, name: str, error: Exception) -> SettingError:
        if isinstance(error, RefusedFileError):
            at = os.path.relpath(error.filename, self.folder)
            place = {name: "it", ".": "the task's folder"}.get(at, at)
            return self.error(name, f"{place} {error.problem}", error.fix)
        return self.error(name, f"it cannot be read: {error}", "correct it")

    def section(self, name: str) -> dict[str, Any]:
        section = self.config.get(name, {})
        if not isinstance(section, dict):
            raise self.error("task.toml", f"{name}: got {short(section)}", f"write a table [{name}]")
        return section

    def number(self, section: str, name: str) -> float | None:
        value = self.section(section).get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            raise self.error("task.toml", f"{section}.{name}: got {short(value)}", "give a number above 0")
        return float(value)

    def whole(self, section: str, name: str, older: str) -> int | None:
        """Return a size in MiB; `older` is the field's former name, whose value is text such as 2G."""
        text = self.section(section).get(older)
        if text is None:
            value = self.number(section, name)
            return None if value is None else int(value)
        found = re.fullmatch(r"(\d{1,9}(?:\.\d*)?)\s*([GMK])", str(text).strip().upper())
        if found is None:
            raise self.error("task.toml", f"{section}.{older}: got {short(text)}", "give a size such as 512M or 2G")
        return max(1, int(float(found[1]) * {"G": 1024, "M": 1, "K": 1 / 1024}[found[2]]))

    def variables(self, section: str) -> dict[str, str]:
        given = self.section(section).get("env", {})
        if not isinstance(given, dict):
            raise self.error("task.toml", f"{section}.env: got {short(given)}", "write a table of names and strings")
        texts = {str(name): str(text) for name, text in given.items()}
        for name, text in texts.items():
            if not re.fullmatch(r"[^=\0]+", name) or "\0" in text:
                raise self.error("task.toml", f"{section}.env: got {short({name: text})}", "correct it")
            for needed in names_without_default(text):
                if not is_named(needed):
                    problem = f"{section}.env.{name}: the recipe does not name the variable {needed}"
                    fix = f"add it to the recipe if these tasks may have its value: env: [{needed}]; or remove it here"
                    raise self.error("task.toml", problem, fix)
                if needed not in os.environ:
                    problem = f"{section}.env.{name}: the environment variable {needed} is not set"
                    raise self.error("task.toml", problem, "export it")
        return texts

    def task(self) -> HarborTask:
        self._check_config()
        self._check_files()
        dockerfile = self._dockerfile()
        image = self._image(dockerfile)
        given = self.section("environment").get("workdir") or "."
        if not isinstance(given, str) or "\0" in given:
            raise self.error("task.toml", f"environment.workdir: got {short(given)}", "give a path")
        workdir = self._place(0, "WORKDIR", given, image, dockerfile.workdir)
        copies = [
            replace(copy, target=self._place(copy.line, "COPY to", copy.target, image)) for copy in dockerfile.copies
        ]
        if workdir == "/":
            problem = "no WORKDIR: commands would start in /, which is read-only"
            raise self.error("environment/Dockerfile", problem, "add WORKDIR /app, or environment.workdir to task.toml")
        return HarborTask(
            folder=str(self.folder),
            name=self.folder.name,
            root=image.root,
            workdir=workdir,
            env=dockerfile.env,
            copies=copies,
            writable=self._writable(workdir, copies, image),
            agent_seconds=self.number("agent", "timeout_sec"),
            verifier_seconds=self.number("verifier", "timeout_sec") or 600.0,
            environment_env=self.variables("environment"),
            verifier_env=self.variables("verifier"),
            solution_env=self.variables("solution"),
            memory_mb=self.whole("environment", "memory_mb", "memory"),
            storage_mb=self.whole("environment", "storage_mb", "storage"),
        )

    def _check_config(self) -> None:
        for name in self.config:
            if name not in _SECTIONS:
                fix = "split it into tasks of one step" if name == "steps" else "remove it"
                raise self.error("task.toml", f"{name} is not supported", fix)
        for section, names in _HONOURED.items():
            for name in self.section(section).keys() - {*names}:
                if meant := difflib.get_close_matches(name, names, 1, cutoff=0.85):
                    problem = f"{section}.{name}: there is no such field"
                    raise self.error("task.toml", problem, f"did you mean {section}.{meant[0]}?")
        for section, names in _UNSUPPORTED.items():
            for name in names:
                if self.section(section).get(name):
                    problem = f"{section}.{name}: got {short(self.section(section)[name])}, which sandboxes lack"
                    raise self.error("task.toml", problem, "remove it, or remove the task")
        if (system := str(self.section("environment").get("os", "linux")).lower()) != "linux":
            raise self.error("task.toml", f"environment.os: got {system!r}", "only linux tasks run here")
        if (mode := self.section("verifier").get("environment_mode", "shared")) != "shared":
            problem = f"verifier.environment_mode: got {mode!r}; tests run on the agent's files, after its processes"
            raise self.error("task.toml", problem, "set shared")
        for section in ("agent", "verifier"):
            if (user := self.section(section).get("user")) not in (None, "root", 0):
                raise self.error("task.toml", f"{section}.user: got {user!r}; there is one user, root", "remove it")

    def _check_files(self) -> None:
        tree = TreeCopy(self.folder)
        for name in ("environment", "tests", "solution"):
            try:
                if os.path.lexists(self.folder / name):
                    tree.folder(self.folder / name, None)
            except (RefusedFileError, OSError) as error:
                raise self.refusal(name, error) from None
        if tree.size > shutil.disk_usage(tempfile.gettempdir()).free:
            problem = f"they have {tree.size / 2**20:.0f} MiB, more than {tempfile.gettempdir()} has left"
            raise self.error("its files", problem, "make them smaller, or set TMPDIR")
        self.text("tests/test.sh")
        for name in ("docker-compose.yaml", ".dockerignore"):
            if os.path.lexists(self.folder / "environment" / name):
                raise self.error(f"environment/{name}", "it is not supported", "remove it, or remove the task")

    def _dockerfile(self) -> Dockerfile:
        image = self.section("environment").get("docker_image")
        if image and not os.path.lexists(self.folder / "environment" / "Dockerfile"):
            return Dockerfile(image=str(image))
        name = "environment/Dockerfile"
        text = self.text(name)
        try:
            return parse(text)
        except Unsupported as error:
            raise self.error(f"{name}, line {error.line}", error.problem, error.fix) from None
        except (ValueError, RecursionError) as error:
            raise self.error(name, str(error), "correct it") from None

    def _image(self, dockerfile: Dockerfile) -> Image:
        image = self.images.get(dockerfile.image)
        if image is None:
            known = ", ".join(self.images) or "none"
            problem = (
                f"FROM {dockerfile.image}, and {self.field}.images names no root file system for it (it has {known})"
            )
            raise self.error(
                "environment/Dockerfile",
                problem,
                f'set images: {{"{dockerfile.image}": FOLDER}}, or / for this machine\'s',
            )
        if not os.path.lexists(Path(image.root, "bin/sh")):
            problem = f"images.{dockerfile.image}: got {image.root}, which has no /bin/sh"
            raise SettingError(self.field, problem, "name a folder with a root file system, or /")
        if dockerfile.runs and not image.run_done:
            line, command = dockerfile.runs[0]
            problem = f"RUN {command[:80]}: images are not built, so RUN is not executed"
            fix = f"do it in the root file system, and set run_done: true for {dockerfile.image} in {self.field}.images"
            raise self.error(f"environment/Dockerfile, line {line}", problem, fix)
        return image

    def _place(self, line: int, what: str, path: str, image: Image, base: str = "/") -> str:
        """Return a path of the image that chains may change, with the links of the root file system followed in it."""
        file = f"environment/Dockerfile, line {line}" if line else "environment/Dockerfile"
        try:
            place = place_in(Path(image.root), joined(base, path))
        except RefusedFileError as error:
            raise self.error(file, f"{what} {path}: it {error.problem}", error.fix) from None
        except ValueError as error:
            raise self.error(file, f"{what}: {error}", "correct it") from None
        if any(PurePosixPath(place).is_relative_to(own) for own in _OWN):
            raise self.error(file, f"{what} {place}: this path is reserved", "use a folder such as /app")
        return place

    def _writable(self, workdir: str, copies: Sequence[Copy], image: Image) -> list[str]:
        places = {workdir, "/root", "/tmp", "/logs/agent", "/logs/artifacts", *image.writable}
        for copy in copies:
            name = f"environment/Dockerfile, line {copy.line}"
            is_folder = copy.into
            for source in copy.sources:
                try:
                    found = matching(self.folder, source)
                except (RefusedFileError, ValueError) as error:
                    raise self.refusal(name, error) from None
                if not found:
                    raise self.error(name, f"COPY {source}: there is no such file in environment/", "add it")
                is_folder |= len(found) > 1 or stat.S_IFDIR in found.values()
            place = copy.target if is_folder else str(PurePosixPath(copy.target).parent)
            if place == "/":
                raise self.error(name, f"COPY to {copy.target}: this path is reserved", "use a folder such as /app")
            places.add(place)
        return sorted(p for p in places if not any(PurePosixPath(q) in PurePosixPath(p).parents for q in places))


class HarborImage(Section):
    """The root file system used for an image of Harbor tasks. A path alone means {root: PATH}."""

    root: str
    """Folder with a root file system, shown read-only; `/` shows this machine's programs, libraries and /etc."""
    run_done: bool = False
    """true: the root already has the results of its tasks' RUN instructions. false: tasks with RUN are refused."""
    writable: list[str] = []
    """Additional folders that tasks may change; each chain gets a copy. The tasks' WORKDIR, the targets of COPY, /root
    and /tmp are always copied."""


class HarborSource(TaskSource):
    """Tasks in Harbor's format (docs/harbor.md). A path alone means {folder: PATH}."""

    world = "harbor"
    paths: ClassVar[tuple[str, ...]] = ("", "folder", "images.*", "images.*.root")

    folder: str
    """Folder with a subfolder per task, or the folder of a single task."""
    images: dict[str, HarborImage] = {}
    """FROM image of the tasks' Dockerfiles -> the root file system to use for it."""

    @model_validator(mode="before")
    @classmethod
    def _folder_alone(cls, given: Any) -> Any:
        return {"folder": given} if isinstance(given, str) else given

    @field_validator("images", mode="before")
    @classmethod
    def _root_alone(cls, images: Any) -> Any:
        if not isinstance(images, dict):
            return images
        return {name: {"root": image} if isinstance(image, str) else image for name, image in images.items()}

    def rows(self) -> list[dict[str, Any]]:
        images = {name: Image(image.root, image.run_done, tuple(image.writable)) for name, image in self.images.items()}
        return load_rows(Path(self.folder), images, "harbor")
