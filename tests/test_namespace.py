"""All code is `agentfactory.*`, also where strings name it: in commands, registries, entry points and pages."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

LINKS = ("rollout", "tools", "trainers")
OTHERS = {"CHANGELOG.md", "tests/test_namespace.py", "tests/test_users_project.py"}
"""What speaks of old names, or of a user's packages of these names."""
FIELDS = {"rollout.agent", "rollout.concurrency", "rollout.context", "rollout.curriculum"}
"""Fields of a recipe that are called as modules are."""


def texts() -> Iterator[tuple[str, str]]:
    names = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    for name in names.stdout.splitlines():
        path = REPOSITORY / name
        if name not in OTHERS and path.is_file() and not path.is_symlink() and path.suffix != ".png":
            yield name, path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", LINKS)
def test_the_names_at_the_root_are_links_that_hide_no_users_package(name: str) -> None:
    link = REPOSITORY / name
    assert link.is_symlink()
    assert link.readlink() == Path("agentfactory", name)
    # Python prefers a package anywhere on its path to a folder without this file
    assert not (link / "__init__.py").exists()


@pytest.mark.processes
def test_no_string_has_a_module_by_its_old_name() -> None:
    found = []
    for name, text in texts():
        for old in re.finditer(r"(?<![\w./-])((?:trainers|rollout|tools)\.[a-z_]\w*)((?:\.[a-z_]\w*)*)", text):
            module = REPOSITORY / "agentfactory" / old[1].replace(".", "/")
            if old[1] not in FIELDS and (module.is_dir() or module.with_suffix(".py").exists()):
                found.append(f"{name}: {old[0]}")
    assert found == []


@pytest.mark.processes
def test_every_module_that_a_string_names_is_there() -> None:
    missing = []
    for name, text in texts():
        for dotted in re.findall(r"(?<![\w/.-])agentfactory((?:\.[a-z]\w*)+)(?![\w/-])", text):
            *packages, last = dotted.removeprefix(".").split(".")
            folder = REPOSITORY.joinpath("agentfactory", *packages)
            known = (folder / last).is_dir() or (folder / f"{last}.py").is_file()
            # the last part may be what a module defines
            defines = folder.with_suffix(".py").is_file() or (packages and (folder / "__init__.py").is_file())
            if not known and not defines:
                missing.append(f"{name}: agentfactory{dotted}")
    assert missing == []


@pytest.mark.processes
def test_one_place_says_how_our_python_is_started() -> None:
    spelled = re.compile(r"""["'\s]-P["'\s]""")
    assert [name for name, text in texts() if spelled.search(text)] == ["agentfactory/tools/import_path.py"]


@pytest.mark.parametrize(
    ("package", "below"),
    [("tools", {"tools"}), ("rollout", {"tools", "rollout"}), ("trainers", {"tools", "rollout", "trainers"})],
)
def test_imports_go_down_only(package: str, below: set[str]) -> None:
    upwards = []
    for file in (REPOSITORY / "agentfactory" / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            own = [module.split(".")[1] for module in modules if module.startswith("agentfactory.")]
            upwards += [f"{file.relative_to(REPOSITORY)}: {name}" for name in own if name not in below]
    assert upwards == []
