"""`agentfactory new`: what it writes works as it stands."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.commands.main import main
from agentfactory.commands.new import TEMPLATES, write_task

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", params=TEMPLATES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task("my_own", tmp_path_factory.mktemp("new") / "deep" / "task", kind=request.param)


def test_the_command_says_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums").mkdir()  # an empty folder may be there
    assert main(["new", "sums"]) == 0
    said = re.findall(r"sums/\S+", capsys.readouterr().out)
    assert len(said) == 4
    for path in said:
        assert (tmp_path / path).is_file()
    # what is there is left as it is
    (tmp_path / "sums" / "sums.py").write_text("mine")
    assert main(["new", "sums"]) == 2
    assert "sums already exists; fix: choose another --output" in capsys.readouterr().err
    assert (tmp_path / "sums" / "sums.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, "must be a valid name of a Python file") for name in ("My-Task", "class")),
        *((name, "a module of Python's or AgentFactory's") for name in ("json", "agentfactory", "make_pictures")),
        ("yaml", "the name of an installed package"),
    ],
)
def test_names_that_would_hide_a_module_are_refused(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        write_task(name, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.extended
def test_its_own_tests_pass(folder: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_own.py"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert result.returncode == 0, result.stdout
    assert re.search(r"^(5|15) passed", result.stdout, re.MULTILINE)


def test_no_held_out_task_is_trained(folder: Path) -> None:
    trained, held_out = (
        [json.loads(line) for line in (folder / file).read_text().splitlines()]
        for file in ("tasks.jsonl", "heldout.jsonl")
    )
    assert len(trained) >= 900
    assert len(held_out) == 100
    # the same is asked of every picture, and of all fish of a kind
    pictures = [path.read_bytes() for path in folder.glob("pictures/*")]
    assert len(set(pictures)) == len(pictures)
    assert sum(map(len, pictures)) < 2**20
    for subject in ("images",) if "images" in trained[0] else ("question",):
        assert not {str(row[subject]) for row in trained} & {str(row[subject]) for row in held_out}
