"""All code is in `agentfactory.*`, including names in strings: commands, registries, entry points and pages."""

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Collection, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from agentfactory.base.user_code.entry_points import COMMANDS, REWARDS, SERVICES, SOURCES, WORLDS, registered
from agentfactory.recipe.schema import Recipe
from benchmarks.house import loaded, size
from benchmarks.settings import options, settings
from tests.conftest import REPOSITORY

LINKS = ("rollout", "tools", "trainers")
OTHERS = {"CHANGELOG.md", "tests/test_namespace.py", "tests/test_users_project.py"}
"""Files that mention old names, or a user's packages with these names."""
BINARY = {".desc", ".parquet", ".png", ".zst"}
FIELDS = {"rollout.agent", "rollout.concurrency", "rollout.context", "rollout.curriculum", "rollout.workers"}
"""Recipe fields with the same names as modules."""


def texts(others: Collection[str] = OTHERS) -> Iterator[tuple[str, str]]:
    names = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    for name in names.stdout.splitlines():
        path = REPOSITORY / name
        if name not in others and path.is_file() and not path.is_symlink() and path.suffix not in BINARY:
            yield name, path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", LINKS)
def test_the_names_at_the_root_are_links_that_hide_no_users_package(name: str) -> None:
    link = REPOSITORY / name
    assert link.is_symlink()
    assert link.readlink() == Path("agentfactory", name)
    # Python prefers any package on its path to a folder without this file
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
            if f"agentfactory{dotted}" in (SOURCES, SERVICES, REWARDS):  # groups of entry points
                continue
            *packages, last = dotted.removeprefix(".").split(".")
            folder = REPOSITORY.joinpath("agentfactory", *packages)
            known = (folder / last).is_dir() or (folder / f"{last}.py").is_file()
            # the last part may be an attribute of a module
            defines = folder.with_suffix(".py").is_file() or (packages and (folder / "__init__.py").is_file())
            if not known and not defines:
                missing.append(f"{name}: agentfactory{dotted}")
    assert missing == []


FOREIGN = re.compile(
    # by a command, or as a requirement; the last part leaves out agentfactory-rl, files and folders
    r"(?:\binstall|\buv add|\buvx|\bpipx run)\b[^`\n;#|&]*[ \"']agentfactory(?![\w/-]|\.\w)"
    r"|(?<![\w.-])agentfactory ?(?:\\?\[|[=~<>!]=|@ )"
)
"""A text that installs `agentfactory`, which is another project on the package index; ours is `agentfactory-rl`."""


@pytest.mark.processes
def test_nothing_installs_the_foreign_package_of_our_name() -> None:
    planted = ["uv pip install -q 'agentfactory'", "needs agentfactory[dense]", "agentfactory>=0.2", "uvx agentfactory"]
    assert [text for text in planted if not FOREIGN.search(text)] == []
    files = texts({"tests/test_namespace.py"})
    assert [f"{name}: {found[0]}" for name, text in files for found in FOREIGN.finditer(text)] == []


@pytest.mark.processes
def test_one_place_says_how_our_python_is_started() -> None:
    spelled = re.compile(r"""["'\s]-P["'\s]""")
    assert [name for name, text in texts() if spelled.search(text)] == ["agentfactory/base/user_code/import_path.py"]


LAYERS = (
    *("base", "tools", "rollout", "worlds", "trainers", "recipe", "placement", "launching", "train"),
    *("tinker", "people", "cluster", "__init__", "audit", "viewer", "commands", "worlds.commands", "__main__"),
)
"""The packages from the lowest to the highest layer; each imports only from itself and earlier ones."""


def imports() -> dict[str, set[str]]:
    """Module -> its imported modules, including indented imports; names without `agentfactory.`."""
    package = REPOSITORY / "agentfactory"
    files = {
        ".".join(file.relative_to(package).with_suffix("").parts).removesuffix(".__init__"): file
        for file in package.rglob("*.py")
        if not {"recipes", "templates"} & {*file.relative_to(package).parts}
    }
    found: dict[str, set[str]] = {}
    for module, file in files.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
        own = {name.removeprefix("agentfactory.") for name in names if name.startswith("agentfactory.")}
        found[module] = {name if name in files else name.rpartition(".")[0] or "__init__" for name in own} & {*files}
    return found


def test_imports_go_down_only() -> None:
    rooms = {m: "worlds.commands" if m.startswith("worlds.commands") else m.split(".")[0] for m in imports()}
    assert {*rooms.values()} == {*LAYERS}
    upwards = [
        f"{module} imports {name}"
        for module, names in imports().items()
        for name in names
        if LAYERS.index(rooms[name]) > LAYERS.index(rooms[module])
    ]
    assert upwards == []


def test_imports_go_down_only_between_the_floors_of_a_room() -> None:
    """A folder without subfolders is one layer; in a folder with subfolders, each module is a layer."""
    found = imports()
    houses = {module.rpartition(".")[0].rpartition(".")[0] for module in found}
    homes = {module: module if (home := module.rpartition(".")[0]) in houses else home for module in found}
    floors: dict[str, set[str]] = defaultdict(set)
    for module, names in found.items():
        floors[homes[module]] |= {homes[name] for name in names} - {homes[module]}
    try:
        [*TopologicalSorter(floors).static_order()]
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_a_folder_can_be_read_at_a_glance() -> None:
    package = REPOSITORY / "agentfactory"
    folders = [package, *(path for path in package.rglob("*") if path.is_dir() and not path.is_symlink())]
    entries = {
        folder.relative_to(package): [
            entry.name for entry in folder.iterdir() if not entry.is_symlink() and entry.name not in _NO_ENTRIES
        ]
        for folder in folders
        if not _DATA & {*folder.relative_to(package).parts}
    }
    assert {str(folder): len(names) for folder, names in entries.items() if len(names) > MOST_ENTRIES} == {}


LINES = {"core": 57_180, "all": 82_443, "files": 557, "tests": 65_339}
"""Bounds that only go down: a capability deletes as much as it adds."""


@pytest.mark.processes
def test_the_house_does_not_grow() -> None:
    assert {name: count for name, count in size().items() if count > LINES[name]} == {}


def test_a_recipe_has_few_settings() -> None:
    assert len(settings(Recipe)) + len(options(Recipe)) <= 192


@pytest.mark.processes
def test_loading_a_recipe_imports_few_modules() -> None:
    assert loaded() <= 40


MOST_ENTRIES = 16
_NO_ENTRIES = {"__pycache__", "__init__.py"}
_DATA = {"__pycache__", "chat_templates", "pages", "page", "shapes", "templates"}


@pytest.mark.processes
def test_the_core_names_no_world() -> None:
    worlds = {at.name for at in (REPOSITORY / "agentfactory" / "worlds").iterdir() if (at / "__init__.py").exists()}
    named = {name for point in (WORLDS, SOURCES, COMMANDS) for name in registered(point)}
    # also the names of sections, commands and protocols
    others = {"audit", "images", "index", "judge", "openenv", "replay", "search", "verifiers", "worlds"}
    quoted = re.compile("|".join(f"[\"']{name}[\"']" for name in sorted((worlds | named) - others)))
    core = [found for found in texts() if re.match(r"agentfactory/(?!worlds/|people/|cluster/).*\.py$", found[0])]
    assert [name for name, text in core if quoted.search(text) or "agentfactory.worlds." in text] == []


EXTENSIONS = {
    **{name: (name,) for name in ("worlds", "audit", "viewer", "placement", "cluster", "tinker", "people")},
    "doctor": ("commands.doctor",),
    "gateway": ("rollout.gateway",),
    "sglang": ("rollout.inference.sglang",),
    # also the tools and rewards that run models' code
    "sandbox": (
        "tools.sandbox",
        *("tools.prebuilt.code_interpreter", "tools.prebuilt.shell"),
        *("rollout.rewards.code_tests", "rollout.rewards.math_equal"),
    ),
}
"""Extension -> its modules and folders. The core names them in strings, which are loaded on first use: entry points,
tables of prebuilt tools and rewards, and `entry_points.load_named`."""


def test_the_core_imports_no_extension() -> None:
    def extension(module: str) -> str | None:
        places = ((name, place) for name, known in EXTENSIONS.items() for place in known)
        return next((name for name, place in places if f"{module}.".startswith(f"{place}.")), None)

    found = imports()
    assert {extension(module) for module in found} == {*EXTENSIONS, None}
    core = {module: names for module, names in found.items() if extension(module) is None}
    assert [f"{module} imports {name}" for module, names in core.items() for name in names if extension(name)] == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    try:
        [*TopologicalSorter({module: names - {module} for module, names in imports().items()}).static_order()]
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))
