"""Tests of loading objects that a recipe names as FILE.py:NAME."""

from pathlib import Path

import pytest

from agentfactory.base.user_code.import_path import user_folders
from agentfactory.base.user_code.loading import UserCodeError, load_object


def test_loads_once_under_a_private_name(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("import json\nloads = json.loads\nclass Thing: pass\n")
    thing = load_object("json.py:Thing", tmp_path)
    assert load_object(str(tmp_path / "json.py") + ":Thing", Path("elsewhere")) is thing
    assert load_object("json.py:loads", tmp_path)("[1]") == [1]
    assert thing.__module__.startswith("_agentfactory_user_json_")


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("tools.py", "'tools.py' is not of the form FILE.py:NAME"),
        ("tools.py:a.b", "not of the form"),
        ("missing.py:search", "missing.py:search: there is no file .*missing.py"),
        ("mine.py:serach", "defines no serach; it defines search, Index"),
        ("broken.py:x", r"broken.py fails on import: ZeroDivisionError: division by zero \(line 1\); fix: correct the"),
        ("syntax.py:x", r"SyntaxError: .*syntax.py, line 1\); fix: correct the file$"),
        ("bare.py:f", r"@tool f: parameter x has no annotation; write x: str.*\(line 2\); fix: correct"),
    ],
)
def test_errors(tmp_path: Path, reference: str, reason: str) -> None:
    (tmp_path / "mine.py").write_text("import os\ndef search(): pass\nclass Index: pass\n_hidden = 1\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "syntax.py").write_text("def (\n")
    (tmp_path / "bare.py").write_text("from agentfactory import tool\n@tool\ndef f(x): pass\n")
    with pytest.raises(UserCodeError, match=reason):
        load_object(reference, tmp_path)


def test_a_file_imports_what_stands_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 1\n")
    (tmp_path / "json.py").write_text("raise RuntimeError('taken for the library')\n")
    (tmp_path / "mine.py").write_text("import json\nfrom beside import VALUE\n")
    assert load_object("mine.py:VALUE", tmp_path) == 1
    assert user_folders()[-1] == str(tmp_path)


def test_an_import_of_version_1_of_mcp_is_told_with_the_way_to_start_it(tmp_path: Path) -> None:
    low_level = "from mcp.server import Server\nserver = Server('notes')\n@server.list_resources()\ndef none(): ...\n"
    theirs = r"AgentFactory needs version 2 of mcp: change the code .*, or give it .* \(rollout\.agent\.command\)"
    for name, text in (("fast", "from mcp.server.fastmcp import FastMCP\n"), ("low", low_level)):
        (tmp_path / f"{name}.py").write_text(text)
        with pytest.raises(UserCodeError, match=theirs):
            load_object(f"{name}.py:server", tmp_path)


IMPORTS = {
    "at its beginning": "from {name} import VALUE\n",
    "later": "def value():\n    from {name} import VALUE\n    return VALUE\nVALUE = 0\n",
    "of a folder": "from {name}.inner import VALUE\n",
    "by another": "from by_{name} import VALUE\n",
}


@pytest.mark.parametrize("kind", IMPORTS)
def test_of_two_modules_of_one_name_the_second_is_told(tmp_path: Path, kind: str) -> None:
    name = f"helpers_{[*IMPORTS].index(kind)}"
    for folder in ("one", "two"):
        (tmp_path / folder / name).mkdir(parents=True)
        (tmp_path / folder / f"by_{name}_{folder}.py").write_text(f"from {name} import VALUE\n")
        (tmp_path / folder / name / "inner.py").write_text(f"VALUE = '{folder}'\n")
        if kind != "of a folder":
            (tmp_path / folder / f"{name}.py").write_text(f"VALUE = '{folder}'\n")
        text = IMPORTS[kind].format(name=name)
        (tmp_path / folder / "mine.py").write_text(text.replace(f"by_{name}", f"by_{name}_{folder}"))
    assert load_object("one/mine.py:VALUE", tmp_path) in ("one", 0)
    told = (
        rf"two/.*\.py imports {name}.* from its own folder, but Python finds .*one/{name}.* under that name; fix: give"
    )
    with pytest.raises(UserCodeError, match=told):
        load_object("two/mine.py:VALUE", tmp_path)


def test_a_file_that_others_import_is_the_same_module(tmp_path: Path) -> None:
    (tmp_path / "world_of.py").write_text("LIMIT = 3\nclass World: pass\nfrom helps_world import make\n")
    text = "import world_of\nfrom world_of import LIMIT\ndef make(): return world_of.World()\n"
    (tmp_path / "helps_world.py").write_text(text)
    world, make = (load_object(f"world_of.py:{name}", tmp_path) for name in ("World", "make"))
    assert isinstance(make(), world)


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        (
            "import no_such_module",
            r"No module named 'no_such_module' \(line 1\); fix: install it, or .* import_path; .*/",
        ),
        ("from no_such.place import x", r"No module named 'no_such' \(line 1\); fix: install it"),
        ("import broken_helper", r"SyntaxError: .*broken_helper.py, line 1\); fix: correct the file"),
        ("from yaml import mine", "correct the import; the library yaml comes before a file of that name"),
        ("raise SystemExit(3)", r"SystemExit: 3 \(line 1\); fix: do not end the program"),
    ],
)
def test_what_a_file_lacks_is_told_with_the_fix(tmp_path: Path, line: str, fix: str) -> None:
    (tmp_path / "lacks.py").write_text(f"{line}\n")
    (tmp_path / "broken_helper.py").write_text("def (\n")
    (tmp_path / "yaml.py").write_text("mine = 1\n")
    with pytest.raises(UserCodeError, match=fix):
        load_object("lacks.py:x", tmp_path)
