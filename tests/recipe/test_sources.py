"""`data.sources`: settings of each source, their fields in errors, and the recipe as it is saved."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentfactory.base.errors import SettingError
from agentfactory.launching.resumption import check_recipe
from agentfactory.launching.run_folder import RunFolder
from agentfactory.recipe.schema import Recipe
from tests.project import load_and_check, refused

REWARD = """\
from agentfactory import Environment, reward, tool

@reward
def right(prediction, answer):
    return float(prediction == answer)

class Hall(Environment):
    def reset(self, question):
        pass

    @tool
    def walk(self) -> str:
        "Walk."
        return "here"

    def reward(self):
        return 1.0
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    """Write a recipe with these sources of `data` and of `eval.data`, in a folder of its own, and load it."""
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "mine.py").write_text(REWARD)
    (tmp_path / "task" / "model").mkdir()
    for name in ("sums", "halls"):
        (tmp_path / "task" / f"{name}.jsonl").write_text('{"question": "go", "answer": "1"}\n')
    monkeypatch.chdir(tmp_path)

    def load(sources: Any, held_out: Any = None, **fields: Any) -> Recipe:
        recipe = {"model": {"path": "model"}, "data": {"sources": sources}, "train": {"steps": 1}}
        recipe |= {"rollout": {"system_prompt": "Think.", "max_turns": 5}, "rewards": ["mine.py:right"]}
        recipe |= {"server": {"engine": "embedded"}, **fields}
        if held_out is not None:
            recipe["eval"] = {"data": {"sources": held_out}}
        path = tmp_path / "task" / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe))
        return load_and_check(path)

    return load


SUMS = {"name": "sums", "path": "sums.jsonl"}
HALLS = {"name": "halls", "path": "halls.jsonl", "tools": ["mine.py:Hall"], "rewards": [], "system_prompt": None}


def test_each_source_has_its_own_settings_and_otherwise_the_recipes(write: Callable[..., Recipe]) -> None:
    held_out = [{**SUMS, "max_turns": 1}, {**HALLS, "name": "others"}, {"name": "halls", "path": "sums.jsonl"}]
    recipe = write([{**SUMS, "weight": 2}, {**HALLS, "max_turns": 3, "limits": {"calls": 4}}], held_out)
    sums, halls = [part.recipe for part in recipe.parts()]
    assert (sums.rollout.system_prompt, sums.rollout.max_turns, sums.tools) == ("Think.", 5, [])
    assert (halls.rollout.system_prompt, halls.rollout.max_turns, halls.rewards) == (None, 3, [])
    assert (sums.limits.calls, halls.limits.calls) == (None, 4)
    assert [Path(tool).name for tool in halls.tools] == ["mine.py:Hall"]
    assert halls.data.file.is_absolute()
    tried, others, same = recipe.held_out_parts()
    assert (tried.recipe.rollout.max_turns, tried.recipe.rollout.system_prompt) == (1, "Think.")
    assert (others.recipe.rollout.max_turns, others.recipe.limits.calls) == (5, None)
    assert same.acts_like(recipe.parts()[1])
    assert not tried.acts_like(recipe.parts()[0])


def test_a_saved_recipe_means_the_same(write: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = write([SUMS, {**HALLS, "agent": None}], [SUMS])
    (tmp_path / "saved.yaml").write_text(recipe.to_yaml())
    again = load_and_check(tmp_path / "saved.yaml", [f"output={recipe.output}", f"name={recipe.name}"])
    assert again.model_copy(update={"import_path": recipe.import_path}) == recipe
    assert again.parts()[1].recipe.rollout == recipe.parts()[1].recipe.rollout


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"path": "nothing.jsonl"}, "data.sources.1.path: task/nothing.jsonl: no such file"),
        ({"weight": 0}, "data.sources.1.weight: got 0; fix: it must be greater than 0"),
        ({"tools": ["mine.py:Hal"]}, "data.sources.1.tools.0: unknown: "),
        ({"name": "sums"}, "data.sources.1.name: two sources are called 'sums'; fix: rename one"),
        ({"name": "a/b"}, "data.sources.1.name: got 'a/b'; fix: use letters"),
        ({"max_total_tokens": 100_000}, "data.sources.1.max_total_tokens: got 100000, more than rollout.max_total"),
        ({"tools": []}, "data.sources.1.rewards: empty, and no environment gives a reward"),
        ({"agent": {"command": ["nobody"]}}, "data.sources.1.agent.command.0: no program 'nobody'"),
        ({"harbor": "tasks"}, "data.sources.1: got path="),
        ({"teacher_url": "http://127.0.0.1:1"}, "data.sources.1.teacher_url: got 'http://127.0.0.1:1' without teacher"),
        ({"group_size": 1}, "data.sources.1.group_size: got 1: grpo compares the chains of a task; fix: use at least"),
    ],
)
def test_errors_name_the_field_of_the_source(write: Callable[..., Recipe], changes: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingError) as error:
        write([SUMS, {**HALLS, **changes}])
    assert told in str(error.value)
    assert str(error.value).startswith("task/recipe.yaml: ")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"held_out": [{**SUMS, "weight": 2}]}, "eval.data.sources.0.weight: got 2, but each held-out task is visited"),
        ({"held_out": [{**SUMS, "rewards": []}]}, "eval.data.sources.0.rewards: empty, and no environment gives a"),
        # the field is of the whole recipe
        (
            {"sources": [{**SUMS, "rewards": ["mine.py:right"]}], "held_out": [{**SUMS, "name": "b"}], "rewards": []},
            r"rewards: empty, .*, in eval.data.sources.0 \(b\); fix: ",
        ),
        (
            {"data": {"path": "sums.jsonl", "sources": [SUMS]}},
            r"data: got path=.* and sources=\['sums'\]; fix: set one",
        ),
        ({"data": {"path": "sums.jsonl", "curriculum": {}}}, "data.curriculum: is set without data.sources"),
        ({"train": {"steps": 1, "algorithm": "sft"}}, "data.sources: set, but sft reads the conversations of one file"),
    ],
)
def test_errors_name_the_field_of_the_recipe(write: Callable[..., Recipe], given: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingError, match=told):
        write(**{"sources": [SUMS, HALLS], **given})


def test_resume_refuses_another_mixture_but_not_another_pool(write: Callable[..., Recipe], tmp_path: Path) -> None:
    slow = {**HALLS, "tools": [], "mcp_servers": {"hall": {"module": "mine.py:Hall", "timeout_seconds": 5}}}
    before = write([SUMS, slow])
    folder = RunFolder.create(before.output, before.to_saved())
    check_recipe(write([SUMS, json.loads(json.dumps(slow).replace("5", "9"))]), folder, None)
    check_recipe(write([SUMS, {**slow, "timeout_seconds": 9}]), folder, None)
    taught = {"teacher": {"url": "http://127.0.0.1:1"}, "output": "taught"}
    taught_folder = RunFolder.create((first := write([SUMS, slow], **taught)).output, first.to_saved())
    check_recipe(write([SUMS, {**slow, "teacher_url": "http://127.0.0.1:2"}], **taught), taught_folder, None)
    for changes, told in (
        ({"weight": 3}, r"data.sources.1.weight: got 3.0, but .* was trained with 1.0"),
        ({"system_prompt": "Run."}, r"data.sources.1.system_prompt: got 'Run.', but .* was trained with None"),
        ({"name": "rooms"}, r"data.sources.1.name: got 'rooms', but .* was trained with 'halls'"),
    ):
        with pytest.raises(SettingError, match=told):
            check_recipe(write([SUMS, {**slow, **changes}]), folder, None)
    with pytest.raises(SettingError, match=r"data.sources.1.\S+: missing, but .* was trained with"):
        check_recipe(write([SUMS]), folder, None)


def test_overrides_set_a_field_of_a_source_by_number_or_name(write: Callable[..., Recipe], tmp_path: Path) -> None:
    write([SUMS, HALLS])
    changes = ["data.sources.1.weight=3", "data.sources.sums.limits.calls=4", "data.sources.0.path=task/halls.jsonl"]
    recipe = load_and_check(path := tmp_path / "task" / "recipe.yaml", changes)
    sums, halls = recipe.data.sources
    assert (sums.name, sums.weight, halls.weight) == ("sums", 1.0, 3.0)
    assert sums.file == tmp_path / "task" / "halls.jsonl"
    assert recipe.parts()[0].recipe.limits.calls == 4
    for wrong in ("data.sources.2.weight=3", "data.sources.hall.weight=3", "data.sources.0=3"):
        refused(r"data.sources.\w+: the entries are 0 \(sums\), 1 \(halls\)", wrong, path=path)
