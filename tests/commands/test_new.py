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
from agentfactory.launching.prepare import prepare
from agentfactory.recipe.schema import Recipe, StagedRecipe
from tests.forked import TRAINER, Forked, start_engine
from tests.project import load_and_check

pytestmark = pytest.mark.processes

SHORT = [
    *("sft.train.steps=60", "sft.train.warmup_steps=5"),
    *("grpo.train.steps=1", "grpo.train.warmup_steps=0", "grpo.train.batch_size=2", "grpo.eval.data=null"),
]


@pytest.fixture(scope="module", params=TEMPLATES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new task of each kind."""
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
        ("My-Task", "must be a valid name of a Python file"),
        ("class", "must be a valid name of a Python file"),
        ("json", "a module of Python's or AgentFactory's"),
        ("agentfactory", "a module of Python's or AgentFactory's"),
        ("make_pictures", "a module of Python's or AgentFactory's"),
        ("yaml", "the name of an installed package"),
    ],
)
def test_names_that_would_hide_a_module_are_refused(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        write_task(name, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match=r"Not a directory.*--output"):
        write_task("divisions", tmp_path / "file" / "new")


def test_nothing_is_left_of_the_templates_name(folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert folder / "my_own.py" in files
    for path in files:
        assert "my_task" not in path.name
        assert b"my_task" not in path.read_bytes()


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


@pytest.mark.long
def test_the_tiny_recipe_trains_to_a_reward(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the stages as `agentfactory train` runs them; the command itself, and how well it learns: tests/learn/learn_new.py
    monkeypatch.chdir(tmp_path)
    recipe = load_and_check(folder / "tiny" / "recipe.yaml", SHORT)
    assert isinstance(recipe, StagedRecipe)
    assert recipe.prepare is not None
    prepare(recipe.prepare, recipe.output / "prepared", recipe.seed)
    sft, grpo = recipe.stages
    trainer = Forked(TRAINER, write(sft, tmp_path), log=tmp_path / "sft.log")
    assert trainer.wait() == 0, trainer.log.read_text()
    checkpoint = sft.output / "checkpoints" / "step-000060"
    engine, url = start_engine(checkpoint, "--dtype", "float32", "--max-model-len", "256", log=tmp_path / "engine.log")
    try:
        options = [f"model.path={checkpoint}", f"server.url={url}"]
        trainer = Forked(TRAINER, write(grpo, tmp_path), *options, log=tmp_path / "grpo.log")
        assert trainer.wait() == 0, trainer.log.read_text()
    finally:
        engine.kill()
    assert re.search(r"step 1/1 +reward [\d.]+ +success [\d.]+ +turns 2", trainer.log.read_text())
    metrics = [json.loads(line) for line in (grpo.output / "metrics.jsonl").read_text().splitlines()]
    # most calls are well-formed after as little: the chain of a call and a last word ends by itself
    assert next(line["trajectory/tool_calls"] for line in metrics if "trajectory/tool_calls" in line) > 0.5


def write(stage: Recipe, folder: Path) -> str:
    """The resolved recipe of a stage as a file."""
    path = folder / f"{stage.name}.yaml"
    path.write_text(stage.to_yaml())
    return str(path)
