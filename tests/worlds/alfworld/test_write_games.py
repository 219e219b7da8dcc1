"""Errors on the command line of write_games are reported before anything is written."""

import re
import sys
from pathlib import Path

import pytest

from agentfactory.worlds.alfworld import write_games

pytestmark = pytest.mark.processes

MISTAKES = {
    "no games": ([], "no games are requested; fix: give --train N or --valid_seen N"),
    "fewer than none": (["--train", "-1"], "--train: got -1; fix: give 0 to 3000"),
    "more than there are": (["--valid_seen", "151"], "--valid_seen: got 151; fix: give 0 to 150"),
    "no Python": (["--train", "1", "--python", "/no"], "--python: /no cannot be run: .*; fix: name a Python that has"),
    "a file": (["--train", "1"], "games is a file; fix: name a folder"),
    "no value": (["--train", "1", "--python", "$NO_SUCH"], "the variable NO_SUCH is not set; fix: .*alfworld"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_told(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, told = MISTAKES[case]
    folder = tmp_path / "games"
    if case == "a file":
        folder.touch()
    monkeypatch.setattr(sys, "argv", ["write_games", str(folder), *arguments])
    with pytest.raises(SystemExit, match="2"):
        write_games.main()
    assert re.search(told, capsys.readouterr().err)
    assert not folder.is_dir()
