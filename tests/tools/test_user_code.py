"""Loading what a recipe names as FILE.py:NAME."""

from pathlib import Path

import pytest

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
