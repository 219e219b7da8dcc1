"""Loading what a recipe names as FILE.py:NAME."""

from pathlib import Path

import pytest

from agentfactory.tools.import_path import user_folders
from agentfactory.tools.user_code import UserCodeError, load_object


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
        ("tools:search", "not of the form"),
        ("tools.py:", "not of the form"),
        ("tools.py:a.b", "not of the form"),
        ("missing.py:search", "missing.py:search: there is no file .*missing.py"),
        ("mine.py:serach", "defines no serach; it defines search, Index"),
        ("empty.py:x", "it defines no function and no class"),
        ("broken.py:x", "broken.py fails when it is loaded: ZeroDivisionError: division by zero"),
        ("syntax.py:x", "syntax.py fails when it is loaded: SyntaxError"),
    ],
)
def test_errors(tmp_path: Path, reference: str, reason: str) -> None:
    (tmp_path / "mine.py").write_text("import os\ndef search(): pass\nclass Index: pass\n_hidden = 1\n")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "syntax.py").write_text("def (\n")
    with pytest.raises(UserCodeError, match=reason):
        load_object(reference, tmp_path)


def test_a_file_imports_what_stands_beside_it(tmp_path: Path) -> None:
    """Behind everything that is installed: `json.py` is not the library, and the library comes first."""
    (tmp_path / "beside.py").write_text("VALUE = 1\n")
    (tmp_path / "json.py").write_text("raise RuntimeError('taken for the library')\n")
    (tmp_path / "mine.py").write_text("import json\nfrom beside import VALUE\n")
    assert load_object("mine.py:VALUE", tmp_path) == 1
    assert user_folders()[-1] == str(tmp_path)


def test_of_two_modules_of_one_name_the_second_is_told(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "steps_of.py").write_text(f"VALUE = '{folder}'\n")
        (tmp_path / folder / "mine.py").write_text("from steps_of import VALUE\n")
    assert load_object("one/mine.py:VALUE", tmp_path) == "one"
    with pytest.raises(
        UserCodeError, match=r"two/mine.py imports steps_of, .*one/steps_of.py was imported .*another name"
    ):
        load_object("two/mine.py:VALUE", tmp_path)
    # the same module, by another file
    (tmp_path / "one" / "other.py").write_text("from steps_of import VALUE\n")
    assert load_object("one/other.py:VALUE", tmp_path) == "one"


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("import no_such_module", r"No module named 'no_such_module'; fix: install it, or .* import_path; .* in .*/"),
        ("from viewer import runs", "No module named 'viewer'; fix: write agentfactory.viewer"),
        ("1 / 0", "division by zero; fix: correct the file"),
    ],
)
def test_what_a_file_lacks_is_told_with_the_fix(tmp_path: Path, line: str, fix: str) -> None:
    (tmp_path / "lacks.py").write_text(f"{line}\n")
    with pytest.raises(UserCodeError, match=fix):
        load_object("lacks.py:x", tmp_path)
