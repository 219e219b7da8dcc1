"""The README's examples work."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentfactory.rollout.model_hub import hub_answers, is_downloaded
from tests.conftest import REPOSITORY, embedded_server
from tests.project import Command

TRANSLATIONS = ("README_jp.md", "README_zh-CN.md", "README_zh-TW.md")
BLOCK = re.compile(r"```(python|yaml)\n# (\S+)\n(.*?)```", re.DOTALL)


AGENTFACTORY = [sys.executable, "-m", "agentfactory"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    blocks = {name: text for _, name, text in BLOCK.findall((REPOSITORY / "README.md").read_text(encoding="utf-8"))}
    assert set(blocks) == {"my_task.py", "my_recipe.yaml"}
    for name, text in blocks.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "tasks.jsonl").write_text('{"question": "How many km are 3 miles?", "answer": "4.83"}\n')
    return tmp_path


@pytest.mark.processes
def test_the_readmes_task_and_recipe_pass_the_dry_run(folder: Path) -> None:
    command = [*AGENTFACTORY, "train", "my_recipe.yaml", "--dry-run"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "my_task.py:convert" in result.stdout
    # this machine has no such model, which the start would refuse
    if not is_downloaded("Qwen/Qwen2.5-3B-Instruct", "model") and not hub_answers("Qwen/Qwen2.5-3B-Instruct"):
        assert "# would be refused here: model.path: Qwen/Qwen2.5-3B-Instruct is not on this machine" in result.stdout


@pytest.mark.extended
def test_the_readmes_commands_serve_and_train(
    folder: Path, warm_start: Path, monkeypatch: pytest.MonkeyPatch, agentfactory: Command
) -> None:
    """In one folder, with a small model, on the README's recipe with its settings but for sizes."""
    monkeypatch.chdir(folder)
    shown = r"agentfactory (serve my_recipe.yaml server.url=null server.port=)8000"
    serve = re.search(shown, read("my_recipe.yaml", folder))
    train = re.search(r"`agentfactory (train my_recipe.yaml)`", read("README.md"))
    small = [f"model.path={warm_start}", "model.dtype=float32", "server.engine=embedded"]
    small += ["server.max_model_len=2048", "rollout.max_total_tokens=2048"]
    agentfactory(*f"{serve[1]}0".split(), *small, "--dry-run", status=0)
    shorter = ["train.steps=1", "train.warmup_steps=0", "train.batch_size=1", "rollout.max_turns=1"]
    with embedded_server(warm_start, "--max-model-len", "2048") as url:
        agentfactory(*train[1].split(), f"server.url={url}", *small, *shorter, status=0)
    assert {"checkpoints", "recipe.yaml", "summary.json"} <= {path.name for path in Path("runs/my_recipe").iterdir()}


def read(name: str, folder: Path = REPOSITORY) -> str:
    return (folder / name).read_text(encoding="utf-8")


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
