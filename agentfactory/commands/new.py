"""`agentfactory new`: write the folder of a small working task, for the user to adapt."""

import argparse
import importlib.util
import json
import keyword
import random
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from agentfactory.base.errors import SettingError
from agentfactory.recipe.composition import RECIPES, display

_TEMPLATES = Path(__file__).parent / "templates"
_NAME = "my_task"  # the name of the task in the templates and in their file names
_FILES = ("README.md", "my_task.py", "test_my_task.py", "recipe.yaml", "tiny/recipe.yaml", "tiny/prepare.py")
_TINY_MODEL = ("quickstart/tiny_model.py", "quickstart/chat_template.jinja")
_OURS = ("agentfactory", "tiny", "prepare", "tiny_model", "seeing_model", "make_pictures", "make_tasks")
_QUESTIONS = {
    "add": "{name} has {left} {things} and gets {right} more. How many is that?",
    "subtract": "{name} has {left} {things} and gives {right} away. How many are left?",
    "multiply": "{name} fills {left} bags with {right} {things} each. How many is that?",
}
_ROWS, _HELD_OUT = 1500, 100


class _Template(NamedTuple):
    """A folder below `templates`, the `maker` of its rows, and the files that create its tiny network."""

    folder: str
    told: str
    maker: str | None = None
    model: tuple[str, ...] = _TINY_MODEL


TEMPLATES = {
    "text": _Template("", "a tool, a reward"),
    "vision": _Template(
        "vision", "a tool that returns images, a reward", "make_pictures.py", (*_TINY_MODEL, "zoom/seeing_model.py")
    ),
    "environment": _Template("environment", "a world with its state, tool and reward", "make_tasks.py"),
}


def write_task(task: str, output: Path | None, kind: str = "text") -> Path:
    """Write a task of a kind of TEMPLATES into a new or empty folder, and return it. Raises SettingError."""
    template = TEMPLATES[kind]
    fix = "choose another name, such as word_problems"
    if not re.fullmatch(r"[a-z][a-z0-9_]*", task) or keyword.iskeyword(task):
        problem = f"got {task!r}, which must be a valid name of a Python file"
        raise SettingError("TASK", problem, f"{fix}: a-z, 0-9 and _")
    if task in sys.stdlib_module_names or task in _OURS:
        raise SettingError("TASK", f"{task!r} is the name of a module of Python's or AgentFactory's", fix)
    folder = (output or Path(task)).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingError("", f"{folder} already exists", "choose another --output, or another name")
    # the test imports the task by its name; a folder that happens to have this name (no origin) is not a package
    if (found := importlib.util.find_spec(task)) is not None and found.origin is not None:
        raise SettingError("TASK", f"{task!r} is the name of an installed package", "choose another name")
    try:
        (folder / "tiny").mkdir(parents=True, exist_ok=True)
        for file in (*_FILES, template.maker) if template.maker else _FILES:
            text = (_TEMPLATES / template.folder / file).read_text(encoding="utf-8")
            (folder / file.replace(_NAME, task)).write_text(text.replace(_NAME, task), encoding="utf-8")
        for file in template.model:
            shutil.copyfile(RECIPES / file, folder / "tiny" / Path(file).name)
        if template.maker:
            runpy.run_path(str(folder / template.maker))["make"](folder)
        else:
            rng, made = random.Random(0), dict[str, dict[str, Any]]()
            while len(made) < _ROWS + _HELD_OUT:
                operation, left, right = rng.choice(list(_QUESTIONS)), rng.randint(10, 99), rng.randint(2, 9)
                name, things = rng.choice(("Ann", "Ben", "Mia", "Tom")), rng.choice(("apples", "books", "coins"))
                question = _QUESTIONS[operation].format(left=left, right=right, name=name, things=things)
                answer = {"add": left + right, "subtract": left - right, "multiply": left * right}[operation]
                made[question] = dict(question=question, left=left, operation=operation, right=right, answer=answer)
            rows = list(made.values())
            _write_rows(folder / "heldout.jsonl", rows[:_HELD_OUT])
            _write_rows(folder / "tasks.jsonl", rows[_HELD_OUT:])
    except OSError as error:
        raise SettingError("", f"{folder}: {error.strerror}: {error.filename}", "choose another --output") from None
    return folder


def describe(folder: Path, task: str, kind: str) -> str:
    place = display(folder.resolve())
    return f"""\
wrote {place}: {TEMPLATES[kind].told}, data, two recipes and a test
  agentfactory train {place}/tiny/recipe.yaml   # a minute or two on any CPU, without a download
  agentfactory train {place}/recipe.yaml   # a model of the hub, on a GPU
  {place}/README.md explains the files; begin with {place}/{task}.py"""


def run(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    say(describe(write_task(options.task, options.output, options.kind), options.task, options.kind))


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
