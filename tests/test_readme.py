"""The README's examples work."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

TRANSLATIONS = ("README_jp.md", "README_zh-CN.md", "README_zh-TW.md")
BLOCK = re.compile(r"```(python|yaml)\n# (\S+)\n(.*?)```", re.DOTALL)


@pytest.mark.processes
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


def read(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def test_the_readme_is_short_and_starts_with_two_commands() -> None:
    text = read("README.md")
    assert len(text.split()) <= 1400
    first = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)[0]
    assert [line.split("#")[0].strip() for line in first.splitlines()] == ["make quickstart", "make test"]


@pytest.mark.parametrize("name", TRANSLATIONS)
def test_a_translation_says_the_same(name: str) -> None:
    """Same code (but for its comments), same links, pictures, names and numbers, in the same order."""
    english, other = read("README.md"), read(name)
    languages = ["README.md", *TRANSLATIONS]
    for page, text in (("README.md", english), (name, other)):
        assert re.findall(r"\(([^)]*)\)", text.splitlines()[0]) == [link for link in languages if link != page]

    def blocks(text: str) -> list[str]:
        return [re.sub(r"\s*#.*", "", block) for block in re.findall(r"```\w+\n.*?```", text, re.DOTALL)]

    def facts(text: str, pattern: str) -> list[str]:
        prose = re.sub(r"```.*?```", "", text.split("\n", 1)[1], flags=re.DOTALL)
        return sorted(re.findall(pattern, prose))

    assert blocks(other) == blocks(english)
    assert facts(other, r"\]\(([^)]+)\)") == facts(english, r"\]\(([^)]+)\)")
    assert facts(other, r"`([^`]+)`") == facts(english, r"`([^`]+)`")
    assert len(facts(other, r"(?m)^#+ ")) == len(facts(english, r"(?m)^#+ "))
    # numbers may become words in translation and vice versa, but not the numbers of results
    assert facts(other, r"\d+\.\d+") == facts(english, r"\d+\.\d+")
