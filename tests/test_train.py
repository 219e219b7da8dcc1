"""`train.py` as users and launchers call it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import QUICKSTART, REPOSITORY

TRAIN = str(REPOSITORY / "train.py")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "missing"),
        ([str(QUICKSTART / "quickstart.yaml")], "agentfactory train"),
        ([str(QUICKSTART / "grpo.yaml")], "agentfactory serve"),
    ],
)
def test_what_train_py_cannot_do_is_told_with_the_command_that_can(
    arguments: list[str], words: str, tmp_path: Path
) -> None:
    result = subprocess.run([sys.executable, TRAIN, *arguments], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 2
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
