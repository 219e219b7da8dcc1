"""Composition of recipes: extends, overrides, paths, placeholders, stages."""

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from agentfactory.base.errors import SettingError
from agentfactory.recipe.checks import Purpose
from agentfactory.recipe.composition import RECIPES, resolve_saved
from agentfactory.recipe.load import default_name
from tests.project import load_and_check, refused

TASK = '{"question": "1 + 1?", "answer": "2"}\n'
CONVERSATION = '{"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]}\n'


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def loaded(path: Path | str, *overrides: str) -> Any:
    return load_and_check(path, overrides)


def test_defaults_follow_from_the_file(project: Path) -> None:
    recipe = loaded("recipe.yaml")
    assert (recipe.name, recipe.output) == ("recipe", project / "runs" / "recipe")
    assert recipe.model.path == str(project / "model")
    assert recipe.tools == [f"{project}/my_tools.py:search"]
    assert not (project / "runs").exists()


def test_recipes_of_different_folders_have_different_run_folders(project: Path) -> None:
    files = [file for file in RECIPES.glob("*/*.yaml") if file.parent.name != "accelerate"]
    names = [default_name(file) for file in files]
    assert {"quickstart", "quickstart-ppo", "webshop-small", "alfworld-small", "multi-node"} <= {*names}
    assert len({*names}) == len(names) > 40
    write(project / "sub" / "recipe.yaml", "extends: ../recipe.yaml\n")
    assert loaded("sub/recipe.yaml").output == project / "runs" / "sub-recipe"
    assert loaded(project / "recipe.yaml").output == project / "runs" / "recipe"


def test_extends_merges_sections_and_keeps_each_files_base(project: Path) -> None:
    write(project / "sub" / "child.yaml", "extends: ../recipe.yaml\nname: small\ndata: {path: own.jsonl, limit: 2}\n")
    write(project / "sub" / "own.jsonl", TASK)
    recipe = loaded("sub/child.yaml", "train.steps=3")
    assert recipe.name == "small"
    assert (recipe.data.path, recipe.data.limit) == (str(project / "sub" / "own.jsonl"), 2)
    assert recipe.model.path == str(project / "model")
    assert (recipe.train.steps, recipe.train.learning_rate) == (3, 1e-5)
    # a parent's name is not inherited
    write(project / "grandchild.yaml", "extends: sub/child.yaml\n")
    assert loaded("grandchild.yaml").name == "grandchild"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tools: [a\nmodel: m\n", "line 2, column 6: while parsing a flow sequence (line 1, column 8): expected ','"),
        ("model: m\nmodel: n\n", "line 2, column 1: key 'model' is given twice"),
        ("model: m\nname: 2024-13-45\n", "line 2, column 7: '2024-13-45' is no timestamp: month must be in 1..12"),
        ("model: m\nname: {{ x }}\n", "line 2, column 8: a key is a list or a mapping; put quotes around"),
        ("model: m\nname: !!python/name:os {}\n", "line 2, column 7: could not determine a constructor"),
        ("model: m\nname: \x07\n", "line 2: character U+0007 is not allowed"),
        ('model: m\nname: "\\U00110000"\n', "line 2, column 10: chr() arg not in range"),
        ("model: m\n---\nmodel: n\n", "line 2, column 1: expected a single document in the stream (line 1, column 1)"),
    ],
)
def test_what_is_no_yaml_is_named_by_file_and_line(project: Path, text: str, message: str) -> None:
    write(project / "broken.yaml", text)
    write(project / "child.yaml", "extends: broken.yaml\n")
    for file in ("broken.yaml", "child.yaml"):
        error = refused("^" + re.escape(f"broken.yaml: not YAML: {message}"), path=file)
        assert "<unicode string>" not in str(error)


@pytest.mark.parametrize("value", ["[a", "'a", "%a", "{a: 1, a: 2}", "2024-13-45", "\x07"])
def test_an_override_that_is_no_yaml_is_named(project: Path, value: str) -> None:
    error = refused(r"^command line: name: .* is not YAML: line 1.*'name=\"TEXT\"'$", f"name={value}")
    assert "<unicode string>" not in str(error)


def test_circular_extends_is_refused(project: Path) -> None:
    write(project / "a.yaml", "extends: b.yaml\n")
    write(project / "b.yaml", "extends: a.yaml\n")
    refused("extends", path="a.yaml")


@pytest.mark.parametrize(
    ("text", "value"), [("1e-5", 1e-5), ("2E+1", 20.0), ("1.5e-3", 1.5e-3), (".5", 0.5), ("3", 3.0)]
)
def test_numbers_as_people_write_them(project: Path, text: str, value: float) -> None:
    assert loaded("recipe.yaml", f"train.learning_rate={text}").train.learning_rate == value


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ('train.learning_rate="1e-5"', "got '1e-5', which is text; fix: write it without quotes: 1e-5"),
        ("train.learning_rate=-0", "got 0; fix: it must be greater than 0"),
        ('train.steps="7"', "got '7', which is text; fix: write it without quotes: 7"),
        ('eval.greedy="no"', "got 'no', which is text; fix: write it without quotes: no"),
        ("train.learning_rate=small", "got 'small'; fix: it must be a valid number"),
    ],
)
def test_a_quoted_number_is_told_to_lose_its_quotes(project: Path, setting: str, told: str) -> None:
    refused(f"^command line: {setting.partition('=')[0]}: {re.escape(told)}$", setting)


def test_a_python_file_is_no_recipe(project: Path) -> None:
    write(project / "mine.py", "def f(x) -> int:\n    return 1\n")
    refused(r"mine\.py is a Python file; fix: .*`tools: \[mine\.py:NAME\]`", path="mine.py", purpose="tools")


def test_overrides_reach_every_depth(project: Path) -> None:
    write(project / "elsewhere" / "more.jsonl", TASK)
    given = ["output=elsewhere/run", "model.lora.rank=8", "train.optimizer.betas=[0.9, 0.99]"]
    recipe = loaded("recipe.yaml", "seed=7", *given, "data.path=elsewhere/more.jsonl")
    assert (recipe.seed, recipe.output) == (7, project / "elsewhere" / "run")
    assert (recipe.model.lora.rank, recipe.train.optimizer.betas) == (8, (0.9, 0.99))
    assert recipe.data.path == str(project / "elsewhere" / "more.jsonl")


def test_overrides_are_relative_to_the_current_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(project / "other" / "here.jsonl", TASK)
    monkeypatch.chdir(project / "other")
    assert loaded("../recipe.yaml", "data.path=here.jsonl").data.path == str(project / "other" / "here.jsonl")


def test_hub_names_stay(project: Path) -> None:
    recipe = loaded("recipe.yaml", "model.path=Qwen/Qwen3-0.6B", "data.path=openai/gsm8k")
    assert (recipe.model.path, recipe.data.path) == ("Qwen/Qwen3-0.6B", "openai/gsm8k")


def test_an_mcp_command_starts_beside_its_recipe_by_this_python(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(project))
    server = "mcp_servers: {files: {command: python, args: [server.py], environment: {}}}"
    write(project / "sub" / "r.yaml", f"extends: ../recipe.yaml\n{server}\n")
    files = loaded("sub/r.yaml").mcp_servers["files"]
    assert (files.cwd, files.command) == (str(project / "sub"), "python")
    refused("no program 'python3'", "mcp_servers.files.command=python3", path="sub/r.yaml")


def test_what_is_prepared_need_not_exist_yet(project: Path) -> None:
    write(project / "make.py", "import no_such_package\ndef make(folder, seed): ...\n")
    made = ["model.path=${prepared}/model", "data.path=${prepared}/a.jsonl"]
    recipe = loaded("recipe.yaml", "prepare=make.py:make", *made)
    assert recipe.prepare == f"{project}/make.py:make"
    assert recipe.model.path == str(project / "runs" / "recipe" / "prepared" / "model")


def test_folders_and_variables_of_servers_are_checked_with_the_recipe(project: Path) -> None:
    write(project / "make.py", "def make(folder, seed): ...\n")
    recipe = (project / "recipe.yaml").read_text()
    servers = {"x": {"command": "python", "args": ["-m", "x", "${chain}"], "workspace": "desk"}}
    write(project / "recipe.yaml", recipe + yaml.safe_dump({"mcp_servers": servers}))
    refused(r"mcp_servers\.x\.workspace: .*desk is not a folder; fix: name an existing")
    loaded("recipe.yaml", "prepare=make.py:make", "mcp_servers.x.workspace=${prepared}/desk")
    (project / "desk").mkdir()
    loaded("recipe.yaml")
    refused(r"mcp_servers\.x\.env\.A: the environment variable NOPE_X is not set", "mcp_servers.x.env={A: '${NOPE_X}'}")
    (project / "loop").symlink_to("loop")
    refused(r"mcp_servers\.x\.workspace: .*loop is not a folder", "mcp_servers.x.workspace=loop")


def test_the_resolved_recipe_runs_as_it_stands(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(project / "make.py", "def make(folder, seed): ...\n")
    recipe = loaded("recipe.yaml", "prepare=make.py:make", "model.path=${prepared}/model", "seed=3")
    stored = write(project / "far" / "away" / "recipe.yaml", recipe.to_yaml())
    monkeypatch.chdir("/")
    assert load_and_check(stored) == recipe
    # another output takes what is prepared along
    moved = loaded(stored, f"output={project}/other")
    assert moved.model.path == str(project / "other" / "prepared" / "model")


@pytest.fixture
def stages(project: Path) -> Path:
    write(project / "make.py", "def make(folder, seed): ...\n")
    write(
        project / "warm.yaml",
        "seed: 9\nmodel: {path: '${prepared}/model', dtype: float32}\n"
        "data: {path: '${prepared}/talks.jsonl'}\ntrain: {algorithm: sft, steps: 5}\n",
    )
    write(project / "rl.yaml", "extends: recipe.yaml\neval: {data: {path: '${prepared}/heldout.jsonl'}}\n")
    return write(project / "both.yaml", "prepare: make.py:make\nstages: [warm.yaml, rl.yaml]\n")


def test_stages_get_seed_output_and_the_last_ones_checkpoint(stages: Path, project: Path) -> None:
    recipe = loaded(stages, "seed=4", "output=out")
    warm, rl = recipe.stages
    assert (recipe.name, recipe.output) == ("both", project / "out")
    assert (warm.name, warm.seed, warm.output) == ("warm", 4, project / "out" / "warm")
    assert (rl.name, rl.seed, rl.output) == ("rl", 4, project / "out" / "rl")
    assert warm.model.path == str(project / "out" / "prepared" / "model")
    assert rl.model.path == str(project / "out" / "warm" / "checkpoints")


def test_overrides_reach_one_stage_or_all(stages: Path) -> None:
    warm, rl = loaded(stages, "rl.train.steps=20", "train.max_grad_norm=0.5", "rl.model.lora.rank=8").stages
    assert (warm.train.steps, rl.train.steps) == (5, 20)
    assert warm.train.max_grad_norm == rl.train.max_grad_norm == 0.5
    assert warm.model.lora is None
    assert rl.model.lora is not None


def test_a_resolved_staged_recipe_runs_as_it_stands(stages: Path, project: Path) -> None:
    recipe = loaded(stages, "seed=4")
    stored = write(project / "far" / "recipe.yaml", recipe.to_yaml())
    assert load_and_check(stored) == recipe
    stage = recipe.stages[0]
    prepared = recipe.output / "prepared"
    (prepared / "model").mkdir(parents=True)
    write(prepared / "talks.jsonl", CONVERSATION)
    assert load_and_check(write(project / "stage.yaml", stage.to_yaml())) == stage


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("stages: []", "stages"),
        ("stages: [no_such.yaml]", "stages.0"),
        ("stages: [warm.yaml, warm.yaml]", "stages.1"),
        ("stages: [both.yaml]", "stages"),
        ("stages: [warm.yaml]\nmodel: {path: x}", "model"),
        ("stages: [{train: {steps: 1}}]", "stages.0"),
    ],
)
def test_broken_stages(stages: Path, project: Path, text: str, field: str) -> None:
    broken = write(project / "broken.yaml", text + "\n")
    assert refused("fix: ", path=broken).field == field


def test_a_fault_in_a_stage_is_named_as_whoever_set_it_would(stages: Path, project: Path) -> None:
    refused("^command line: rl.train.steps: got 'many'", "rl.train.steps=many", path=stages)
    refused("^command line: warm.train.steps: got 0", "warm.train.steps=0", path=stages)
    refused("^command line: rl.data.path: ", "rl.data.path=none.jsonl", path=stages)
    inline = {**yaml.safe_load((project / "warm.yaml").read_text()), "name": "warm", "train": {"algorithm": "sft"}}
    whole = write(project / "inline.yaml", yaml.safe_dump({"prepare": "make.py:make", "stages": [inline]}))
    refused(r"^inline\.yaml: warm\.train\.steps: missing", path=whole)
    text = (project / "warm.yaml").read_text()
    write(project / "warm.yaml", text.replace("steps: 5", "steps: -5"))
    refused(r"^warm\.yaml: train\.steps: got -5", path=stages)


def test_a_saved_recipe_may_have_fields_that_have_become_constants(project: Path) -> None:
    recipe = loaded("recipe.yaml", "rollout.curriculum={}")
    data = yaml.safe_load(recipe.to_yaml())
    data["server"]["startup_seconds"], data["track"]["credit"] = 600.0, True
    data["rollout"]["curriculum"] |= {"solved": 0.95, "hopeless": 0.05}
    data["rollout"]["context"] = {"policy": "keep", "options": {}, "keep_images": None}
    assert resolve_saved(data, project)["track"] == recipe.track.model_dump()
    assert resolve_saved(data, project)["rollout"] == recipe.rollout.model_dump(mode="json")
    # not options of the user's own
    own = {"own": {"module": "a.py:A", "options": {"cache": False, "context": {"options": 1}, "keep_workspaces": None}}}
    assert resolve_saved({"mcp_servers": own}, project) == {"mcp_servers": own}
    sources = {"data": {"sources": [{"name": "a", "context": {"policy": "keep", "options": {}}}]}}
    assert resolve_saved(sources, project)["data"]["sources"][0]["context"] == {"policy": "keep", "keep_turns": 2}
    saved = write(project / "saved.yaml", yaml.safe_dump(data))
    assert load_and_check(saved) == recipe
    refused(r"track\.credit: unknown key 'credit'; fix: remove it: it is always on", "track.credit=false", path=saved)
    refused(r"rollout\.context\.options: .*fix: write its fields", "rollout.context.options=[1]", path=saved)
    data["rollout"]["context"] = {"policy": "truncate", "options": {"keep_turns": 3}}
    old = write(project / "old.yaml", yaml.safe_dump(data))
    assert [loaded(old, *more).rollout.context.keep_turns for more in ((), ("rollout.context.keep_turns=4",))] == [3, 4]


def test_a_recipe_needs_no_training_except_to_train(project: Path) -> None:
    data = yaml.safe_load((project / "recipe.yaml").read_text())
    del data["train"]
    (project / "recipe.yaml").write_text(yaml.safe_dump(data))
    for purpose in get_args(Purpose):
        if purpose != "train":
            load_and_check("recipe.yaml", purpose=purpose)
    refused("train: missing")


def test_rows_are_read_where_that_is_quick(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "tasks.jsonl").write_text("[1]\n")
    refused(r"data\.path: row 1 of .* is a list, not an object; fix: correct it")
    (project / "tasks.jsonl").write_bytes(b'{"question": "caf\xe9"}\n')
    refused(r"data\.path: .*tasks\.jsonl:1 is not UTF-8: .*; fix: save it as UTF-8")
    # who does not use them does not read them
    load_and_check("recipe.yaml", purpose="eval")
    load_and_check("recipe.yaml", ["data=null"], purpose="serve")
    load_and_check("recipe.yaml", ["train.from_trajectories=heldout.jsonl"])
    monkeypatch.setattr("agentfactory.rollout.data.files._MOST_BYTES", 3)
    load_and_check("recipe.yaml")


def test_images_that_are_not_there_are_told_before_anything_starts(project: Path) -> None:
    (project / "seen.png").write_text("any")
    part = {"type": "image_url", "image_url": {"url": "lost.png"}}
    for lost in ({"question": "?", "images": ["lost.png"]}, {"messages": [{"role": "user", "content": [part]}]}):
        rows = [{"question": "?", "images": ["seen.png", "data:image/png;base64,AAAA"]}, lost]
        (project / "tasks.jsonl").write_text("".join(json.dumps({**row, "answer": "2"}) + "\n" for row in rows))
        refused(r"data: row 2: the image lost\.png: no such file; fix: correct it")


@pytest.mark.processes
def test_what_is_not_installed_is_appended_where_asked(project: Path) -> None:
    programs = ["mcp_servers.a.command=no-such-program", "server.engine=vllm"]
    lacks: list[SettingError] = []
    load_and_check("recipe.yaml", programs, lacks=lacks)
    program, vllm = map(str, lacks)
    assert program.startswith("mcp_servers.a.command: no program 'no-such-program'; fix: install it")
    assert vllm.startswith("server.engine: got 'vllm', which is not installed")


@pytest.mark.parametrize("section", ["mcp_servers={a: {command: %s}}", "rollout.agent={command: [%s]}"])
def test_a_program_that_is_not_executable_is_named(project: Path, section: str) -> None:
    script = project / "program.sh"
    script.write_text("#!/bin/sh\n")
    for named in (script, "program.sh"):
        told = f"command.* is a file, but no program on PATH, or not executable; fix: .*{script}, after chmod"
        refused(told, "tools=[]", section % named, lacks=[])


def test_a_question_without_text_is_refused_unless_something_else_gives_the_task(project: Path) -> None:
    write(project / "data.jsonl", TASK + '{"question": " ", "answer": "2"}\n')
    given = ["data.path=data.jsonl", "eval.data=null", "eval.every=0"]
    refused(r"data: row 2: question has no text, .*; fix: write the task there, or leave", *given)
    load_and_check("recipe.yaml", [*given, "rollout.system_prompt=Add 1 and 1."])
    load_and_check("recipe.yaml", [*given, "tools=['my_tools.py:World']"])
    write(project / "data.jsonl", '{"messages": [{"role": "user", "content": ""}], "answer": "2"}\n')
    refused("data: row 1: messages has no text", *given)


def test_user_code_imports_from_the_folders_of_the_recipes_files(project: Path) -> None:
    (project / "deep").mkdir()
    (project / "deep" / "recipe.yaml").write_text("extends: ../recipe.yaml\n")
    assert loaded("deep/recipe.yaml").import_path == [project / "deep", project]
    assert loaded("recipe.yaml", "import_path=[deep]").import_path == [project / "deep"]
    (project / "both.yaml").write_text("name: both\nstages: [{name: one, extends: deep/recipe.yaml}]\n")
    assert loaded("both.yaml").stages[0].import_path == [project, project / "deep"]
    whole = loaded("both.yaml", "import_path=[here]", "one.import_path=['${prepared}/lib']")
    assert whole.import_path == whole.stages[0].import_path == [project / "here", whole.output / "prepared" / "lib"]
    for wrong in ("import_path=lib", "one.import_path=[1]", "one.import_path={a: b}"):
        refused(r"import_path: got .*, not a list of folders; fix: write it as \[FOLDER", wrong, path="both.yaml")
