"""The command: what it refuses and how, what it prints, and what it does not import."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

Command = Callable[..., subprocess.CompletedProcess[str]]

# what is appended to the recipe or replaced in it, overrides, and the field, value and fix that the message names
BROKEN = {
    "unknown key": ({"1e-5": "1e-5, lr: 3"}, [], ["recipe.yaml: train.lr", "'lr'", "fix"]),
    "misspelt key": ({"steps": "stepz"}, [], ["train.stepz", "did you mean train.steps?"]),
    "key of another section": ({}, ["learning_rate=1e-3"], ["command line: learning_rate", "train.learning_rate"]),
    "wrong type": ({"1e-5": "abc"}, [], ["recipe.yaml: train.learning_rate", "'abc'", "valid number"]),
    "text for a number": ({"steps: 10": "steps: '10'"}, [], ["train.steps", "'10'", "valid integer"]),
    "number for a section": ({}, ["model.lora=8"], ["model.lora", "8", "indented"]),
    "out of range": ({}, ["train.steps=0"], ["train.steps", "0", "greater than 0"]),
    "not one of the choices": ({}, ["model.dtype=fp8"], ["model.dtype", "'fp8'", "'bfloat16'"]),
    "missing field": ({"path: model, ": ""}, [], ["recipe.yaml: model.path", "missing", "Hub name or folder"]),
    "missing data file": ({}, ["data.path=none.jsonl"], ["data.path", "none.jsonl", "no such file", "fix"]),
    "missing model": ({"path: model": "path: ./none"}, [], ["recipe.yaml: model.path", "none", "hub name"]),
    "missing chat template": ({}, ["model.chat_template=t.jinja"], ["model.chat_template", "t.jinja", "Jinja"]),
    "missing saved rows": ({}, ["train.from_trajectories=old"], ["train.from_trajectories", "old", "JSONL"]),
    "missing parent": ({"\nmodel": "\nextends: base.yaml\nmodel"}, [], ["extends", "base.yaml", "fix"]),
    "unknown tool": ({}, ["tools=[my_tools.py:serch]"], ["tools.0", "serch", "search, exact, World"]),
    "missing tool file": ({}, ["tools=[none.py:search]"], ["tools.0", "none.py", "FILE.py:NAME"]),
    "not a tool": ({}, ["tools=[my_tools.py:plain]"], ["tools.0", "my_tools.py:plain", "@tool"]),
    "not a reward": ({}, ["rewards=[my_tools.py:plain]"], ["rewards.0", "my_tools.py:plain", "@reward"]),
    "no reward": ({}, ["rewards=[]"], ["rewards", "empty", "Environment"]),
    "no data": ({}, ["data=null"], ["data", "missing", "data.path"]),
    "no program": ({}, ["mcp_servers.a.command=no-such-program"], ["mcp_servers.a.command", "no-such-program"]),
    "two ways to a server": (
        {},
        ["mcp_servers.a={command: python3, url: 'http://127.0.0.1:1'}"],
        ["mcp_servers.a", "exactly one of", "'command', 'url'"],
    ),
    "engine not installed here": ({"embedded": "vllm"}, [], ["server.engine", "'vllm'", "server.url"]),
    "chain longer than the server's": (
        {},
        ["server.max_model_len=4096"],
        ["rollout.max_total_tokens", "8192", "server.max_model_len=4096"],
    ),
    "sync without an adapter": ({}, ["sync.backend=lora"], ["sync.backend", "'lora'", "model.lora.rank"]),
    "file sync of an adapter": (
        {},
        ["model.lora.rank=8", "sync.backend=file"],
        ["sync.backend", "'file'", "use lora or auto"],
    ),
    "caches of adapters kept": ({}, ["model.lora.rank=8", "rollout.inflight=keep"], ["rollout.inflight", "adapter"]),
    "caches kept of no turn": ({}, ["rollout.inflight=keep"], ["rollout.inflight", "rollout.max_staleness=0"]),
    "adapters that turns still use": (
        {},
        ["model.lora.rank=8", "rollout.max_staleness=4"],
        ["server.max_loras", "got 4", "at least 6"],
    ),
    "float16 training": ({}, ["model.dtype=float16"], ["model.dtype", "'float16'", "bfloat16"]),
    "processes without strategy": ({}, ["train.processes=2"], ["train.strategy", "'single'", "ddp"]),
    "best of what nobody measures": (
        {},
        ["train.keep_last=2", "train.keep_best=eval/sampled/success"],
        ["train.keep_best", "eval.every"],
    ),
    "best of no metric": ({}, ["train.keep_last=2", "train.keep_best=sucess"], ["train.keep_best", "no metric"]),
    "best of all": ({}, ["train.keep_best=reward"], ["train.keep_best", "train.keep_last"]),
    "group of one": ({}, ["rollout.group_size=1"], ["rollout.group_size", "1", "at least 2"]),
    "evaluation without tasks": ({}, ["eval.data=null", "eval.every=5"], ["eval.every", "5", "eval.data.path"]),
    "public address": ({}, ["server.host=0.0.0.0"], ["server.host", "'0.0.0.0'", "127.0.0.1"]),
    "address without a scheme": ({}, ["server.url=localhost:8000"], ["server.url", "'localhost:8000'", "http://"]),
    "a server named twice": ({}, ["server.url=[http://a:1,http://a:1]"], ["server.url", "each server once"]),
    "key given twice": ({"steps: 10": "steps: 10, steps: 20"}, [], ["recipe.yaml", "'steps'", "twice"]),
    "not YAML": ({"train: {": "train: ["}, [], ["recipe.yaml", "not YAML", "line 8"]),
    "override without a value": ({}, ["seed"], ["'seed'", "key=value"]),
    "policy for what has no reward": (
        {},
        ["rollout.on_outcome={reward_error: mask}"],
        ["on_outcome.reward_error", "got mask", "use drop or retry"],
    ),
    "nothing left of groups": (
        {},
        ["rollout.group_size=1", "rollout.equal_rewards=refill"],
        ["equal_rewards", "group_size=1", "use keep"],
    ),
}


def everything_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_recipe_ends_with_one_message_and_nothing_written(
    case: str, project: Path, agentfactory: Command
) -> None:
    replacements, overrides, said = BROKEN[case]
    text = (project / "recipe.yaml").read_text()
    for old, new in replacements.items():
        assert old in text
        text = text.replace(old, new)
    (project / "recipe.yaml").write_text(text)
    before = everything_in(project)
    result = agentfactory("train", "recipe.yaml", *overrides)
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    for part in said:
        assert part in result.stderr
    assert everything_in(project) == before


def test_a_recipe_that_is_not_there(project: Path, agentfactory: Command) -> None:
    result = agentfactory("train", "recipes.yaml")
    assert result.returncode == 2
    assert "recipes.yaml: no such file" in result.stderr


def test_dry_run_prints_the_resolved_recipe_and_writes_nothing(project: Path, agentfactory: Command) -> None:
    before = everything_in(project)
    result = agentfactory("train", "recipe.yaml", "--dry-run", "train.steps=3", "output=elsewhere")
    assert result.returncode == 0, result.stderr
    recipe = yaml.safe_load(result.stdout)
    assert recipe["train"]["steps"] == 3
    assert recipe["output"] == str(project / "elsewhere")
    assert everything_in(project) == before


def test_a_folder_in_use_is_refused(project: Path, agentfactory: Command) -> None:
    (project / "used").mkdir()
    (project / "used" / "thesis.tex").write_text("years of work")
    for arguments in (["output=used"], ["output=used", "--overwrite"]):
        result = agentfactory("train", "recipe.yaml", *arguments)
        assert result.returncode == 2
        assert "output=OTHER" in result.stderr
    assert (project / "used" / "thesis.tex").exists()


@pytest.mark.parametrize("arguments", [[], ["fly", "recipe.yaml"], ["train"], ["train", "recipe.yaml", "--owerwrite"]])
def test_usage_errors(project: Path, agentfactory: Command, arguments: list[str]) -> None:
    assert agentfactory(*arguments).returncode == 2


def test_other_commands_check_what_they_need(project: Path, agentfactory: Command) -> None:
    result = agentfactory("eval", "recipe.yaml", "eval.data=null")
    assert result.returncode == 2
    assert "eval.data" in result.stderr
    result = agentfactory("eval", "recipe.yaml", "--checkpoint", "none")
    assert result.returncode == 2
    assert "--checkpoint" in result.stderr
    # serving needs neither tasks nor rewards
    assert agentfactory("serve", "recipe.yaml", "data=null", "rewards=[]", "--dry-run").returncode == 0


def imported_by(code: str, cwd: Path) -> set[str]:
    code += "\nimport sys; print('\\n'.join(sys.modules))"
    result = subprocess.run([sys.executable, "-P", "-c", code], cwd=cwd, capture_output=True, text=True, check=True)
    return set(result.stdout.split())


HEAVY = {"torch", "transformers", "datasets", "accelerate", "mcp", "matplotlib", "aiohttp"}


def test_public_names_and_recipes_load_without_heavy_packages(project: Path) -> None:
    names = "Environment, Group, Outcome, Trajectory, reward, tool"
    assert not HEAVY & imported_by(f"from agentfactory import {names}", project)
    check = "from agentfactory.cli import main; main(['train', 'recipe.yaml', '--dry-run'])"
    assert not HEAVY & imported_by(check, project)
    assert not HEAVY & imported_by("import agentfactory.launcher", project)


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(ImportError, match="agentfactory"):
        from agentfactory import no_such_name  # noqa: F401


@pytest.mark.parametrize("name", ["tools.py", "rollout.py", "trainers/__init__.py"])
def test_a_users_file_of_our_packages_name_is_told(project: Path, name: str) -> None:
    (project / name).parent.mkdir(exist_ok=True)
    (project / name).write_text("print('mine')\n")
    command = [sys.executable, "-m", "agentfactory", "train", "recipe.yaml", "--dry-run"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert str(project / name) in result.stderr
    assert "-P" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_the_installed_command_is_not_shadowed(project: Path) -> None:
    (project / "tools.py").write_text("print('mine')\n")
    command = [str(Path(sys.executable).with_name("agentfactory")), "train", "recipe.yaml", "--dry-run"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "mine" not in result.stdout
