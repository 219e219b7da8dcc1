"""What the README shows is what works."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.processes

BLOCK = re.compile(r"```(python|yaml)\n# (\S+)\n(.*?)```", re.DOTALL)


def test_the_readmes_task_and_recipe_pass_the_dry_run(tmp_path: Path) -> None:
    blocks = {name: text for _, name, text in BLOCK.findall((REPOSITORY / "README.md").read_text(encoding="utf-8"))}
    assert set(blocks) == {"my_task.py", "my_recipe.yaml"}
    for name, text in blocks.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "tasks.jsonl").write_text('{"question": "How many km are 3 miles?", "answer": "4.83"}\n')
    command = [sys.executable, "-m", "agentfactory", "train", "my_recipe.yaml", "--dry-run"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "my_task.py:convert" in result.stdout
