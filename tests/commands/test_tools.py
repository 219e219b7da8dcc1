"""`agentfactory tools`: what it lists, calls, checks and serves, with no model in sight."""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema.validators import validator_for
from PIL import Image

from agentfactory.commands.main import main
from agentfactory.commands.tried_servers import _example
from tests.chat_tokenizers import make_tokenizer, trl_template
from tests.vision_models import make_vision_model

TOOLS = '''
from typing import Literal

from PIL import Image

from agentfactory import Environment, finish, tool


@tool
def add(a: int, b: int = 2, mode: Literal["fast", "slow"] = "fast", tags: list[str] | None = None) -> int:
    """Add two numbers.

    Args:
        a: the first
    """
    return a + b


@tool
def paint(color: str, times: int = 1) -> list:
    """Paint."""
    return [f"painted {color}", *[Image.new("RGB", (2, 3 + n), color) for n in range(times)]]


@tool
def submit(answer: str) -> object:
    """Submit."""
    return finish({"observation": f"got {answer}", "length": len(answer)})


class World(Environment):
    def reset(self, start: str, **task):
        self.at = start
        return f"You are {start}."

    @tool
    def where(self, name: str) -> str:
        """Say where."""
        return f"{name} is {self.at}"

    def reward(self):
        return {"reward": 1.0, "success": self.at == "there"}
'''
UNFIT = """
from agentfactory import Environment, tool


class Idle(Environment):
    def reset(self, **task):
        pass


class Wrong(Environment):
    def reset(self, **task):
        pass

    @tool
    def look(self) -> str:
        '''Look.'''
        return "here"

    def reward(self):
        return {}["lft"]
"""
SCHEMA = """
import mcp_types
from mcp.server import Server


async def list_tools(context, params):
    tool = mcp_types.Tool(name="odd", description="Odd.", input_schema={"type": "object", "properties": %s})
    return mcp_types.ListToolsResult(tools=[tool])


odd = Server("odd", on_list_tools=list_tools)
"""
RECIPE = """
tools: [things.py:add, things.py:World]
mcp_servers:
  more: {module: things.py:paint, prefix: my_}
data: {path: tasks.jsonl}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "things.py").write_text(TOOLS)
    (tmp_path / "tasks.jsonl").write_text('{"question": "where?", "start": "at home"}\n')
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    return file


Tools = Callable[..., Any]


@pytest.fixture
def tools(capsys: pytest.CaptureFixture[str]) -> Tools:
    """`tools(status, *arguments)` runs a command that ends with `status`, and returns its output."""

    def run(status: int, *arguments: object) -> Any:
        assert main(["tools", *map(str, arguments)]) == status
        return capsys.readouterr()

    return run


def test_list_prints_what_a_model_would_see(recipe: Path, tools: Tools) -> None:
    assert tools(0, "list", recipe).out.splitlines() == [
        'add: add(a: integer, b: integer = 2, mode: "fast" | "slow" = "fast", tags: list of string | null = null)',
        "    Add two numbers.",
        "World: where(name: string)",
        "    Say where.",
        "more: my_paint(color: string, times: integer = 1)",
        "    Paint.",
    ]
    listed = json.loads(tools(0, "list", recipe, "--json", "mcp_servers.more.prefix=your_").out)
    assert [spec["function"]["name"] for spec in listed] == ["add", "where", "your_paint"]
    for spec in listed:
        assert spec["type"] == "function"
        validator_for(spec["function"]["parameters"]).check_schema(spec["function"]["parameters"])


def test_list_prints_the_first_prompt(recipe: Path, tools: Tools, tmp_path: Path) -> None:
    make_tokenizer(trl_template("qwen2_5")).save_pretrained(tmp_path / "model")
    override = f"model.path={tmp_path / 'model'}"
    out = tools(0, "list", recipe, "--prompt", override).out
    assert out.startswith("format: hermes\n")
    assert "because: rollout.parser=auto: hermes reads the calls that the template writes\n" in out
    assert "<|im_start|>user\nwhere?<|im_end|>\n" in out
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in out
    assert "<tool_response>\n(its result)\n</tool_response>" in out
    assert "use rollout.parser=hermes" in tools(1, "list", recipe, "--prompt", override, "rollout.parser=glm").err
    # what can be shown is shown
    shown = tools(1, "list", recipe, "--prompt", override, "tools=[things.py:submit]", "rollout.parser=code_block")
    assert shown.out.startswith("format: code_block\n")
    assert "a turn ends with: '<|im_end|>' (1), '```\\nOutput:\\n'" in shown.out
    assert "code_block needs one tool with a parameter `code`" in shown.err
    # a task that is not there yet is made up, and that is said
    for missing in ("data.path=later.jsonl", "data.path=things.py"):
        shown = tools(5, "list", recipe, "--prompt", override, "tools=[things.py:submit]", "mcp_servers={}", missing)
        assert "<|im_start|>user\n(the question of a task)<|im_end|>" in shown.out
        assert "this is not the prompt of a task" in shown.err


def test_list_of_nothing(tmp_path: Path, tools: Tools) -> None:
    (tmp_path / "empty.yaml").write_text("{}")
    assert tools(0, "list", tmp_path / "empty.yaml").out == "no tools\n"


def test_call(recipe: Path, tools: Tools) -> None:
    for arguments, printed in (
        (["add", "a=40"], "42"),
        (["add", '{"a": 1, "b": -3}'], "-2"),
        (["add", "a=1", "b=1", 'tags=["x", "y"]', "mode=slow"], "2"),
        (["where", "name=5"], "5 is at home"),
        (["where", "name=we", "--task", '{"start": "there"}'], "we is there"),
    ):
        assert tools(0, "call", recipe, *arguments).out == f"{printed}\n"


def test_call_saves_images(recipe: Path, tmp_path: Path, tools: Tools) -> None:
    picture = tmp_path / "picture.png"
    out = tools(0, "call", recipe, "my_paint", "color=red", "times=2", "--output", picture).out
    assert out == "painted red\n[image/png image]\n[image/png image]\n"
    for file, size in ((picture, (2, 3)), (tmp_path / "picture-2.png", (2, 4))):
        with Image.open(file) as image:
            assert (image.size, image.getpixel((0, 0))) == (size, (255, 0, 0))
    assert "--output: the result holds no image" in tools(1, "call", recipe, "add", "a=1", "--output", picture).err


def test_the_first_prompt_has_images(recipe: Path, tools: Tools, tmp_path: Path) -> None:
    make_vision_model(tmp_path / "model", "qwen3_vl")
    Image.new("RGB", (200, 100)).save("wide.png")
    recipe.write_text("tools: [image_tools]\nmodel: {path: ./model}\ndata: {path: rows.jsonl}")
    row = {"question": "At <bbox>?", "images": ["wide.png"], "objects": {"bbox": [[0, 0, 100, 50]]}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    lengths = []
    for pixels in (32 * 32 * 4, 32 * 32 * 16):
        sized = "model.min_image_pixels=1024", f"model.max_image_pixels={pixels}"
        shown = tools(0, "list", recipe, "--prompt", *sized).out
        assert "<|vision_start|><|image_pad|><|vision_end|>At [0, 0, 500, 500]?" in shown
        assert "from 0 to 1000 of the image's width and height" in shown
        found = re.search(r"the first prompt: (\d+) ids", shown)
        assert found
        lengths.append(int(found[1]))
    assert lengths[0] < lengths[1]  # of the image's tokens
    assert "Image 0 has 200 x 100 pixels." in tools(0, "list", recipe, "--prompt", "rollout.coordinates=pixels").out


def test_calls_that_fail(recipe: Path, tools: Tools) -> None:
    for arguments, printed, error in (
        (["add", "a=q"], "a: ", "invalid_arguments"),
        (["sub", "a=q"], "There is no tool 'sub'. The tools are: add, where, my_paint.", "unknown_tool"),
        (["my_paint", "color=nothing"], "nothing", "tool_error"),
    ):
        captured = tools(1, "call", recipe, *arguments)
        assert printed in captured.out
        assert captured.err == f"agentfactory: the call failed: {error}\n"
    assert "reset needs start" in tools(1, "call", recipe, "where", "name=x", "--task", "{}").err


def test_check_opens_and_resets(recipe: Path, tools: Tools) -> None:
    lines = tools(0, "check", recipe).out.splitlines()
    assert re.fullmatch(r"add: opened in \d+\.\d\d s; its tools: add", lines[0])
    judged = "says 'You are at home.'; without any call, reward 1, success 0"
    assert re.fullmatch(rf"    an environment: reset in \d+\.\d\d s, {judged}", lines[2])
    assert lines[-2:] == ["task: the first row of data", "all right"]
    out = tools(0, "check", recipe, "--task", '{"start": "there"}').out
    assert "says 'You are there.'" in out
    assert "task: --task" in out


@pytest.mark.processes
def test_check_says_what_is_wrong_with_a_server(recipe: Path, tools: Tools, caplog: pytest.LogCaptureFixture) -> None:
    (recipe.parent / "odd.py").write_text(SCHEMA % "{'x': {'type': 'nonsense'}}")
    dead = {"command": "python", "args": ["-c", "import sys; sys.exit('I am broken')"]}
    servers = {"dead": dead, "odd": {"module": "odd.py:odd"}, "twice": {"module": "things.py:add"}}
    captured = tools(1, "check", recipe, "mcp_servers=" + json.dumps(servers), "data=null")
    assert "dead: cannot be used" in captured.out
    assert "twice: opened" in captured.out
    assert "all right" not in captured.out
    for reason in (
        "World: environment World: reset needs start",
        "I am broken",
        "\ndead: `",
        "add: another server has a tool add too",
        "twice: another server has a tool add too",
    ):
        assert reason in captured.err
    assert "odd: opened" in captured.out
    assert "odd: properties.x.type ('nonsense')" in caplog.text


def test_check_of_environments_that_cannot_teach(recipe: Path, tools: Tools) -> None:
    (recipe.parent / "unfit.py").write_text(UNFIT)
    captured = tools(1, "check", recipe, "tools=[unfit.py:Idle, unfit.py:Wrong]")
    assert captured.out.count("; cannot give a reward") == 1
    assert "all right" not in captured.out
    idle, wrong = captured.err.splitlines()
    assert "Idle: an environment without a tool: no model can act on it" in idle
    assert "Wrong: environment Wrong: reward: " in wrong
    assert "'lft'" in wrong
    assert "right after reset" in wrong


def test_check_says_what_it_could_not_check(recipe: Path, tools: Tools) -> None:
    (recipe.parent / "prepare.py").write_text("def prepare(folder, seed): ...\n")
    later = ["prepare=prepare.py:prepare", "data.path=${prepared}/train.jsonl"]
    captured = tools(5, "check", recipe, *later)
    assert re.search(r"an environment: created in \d\.\d\d s, but not reset", captured.out)
    assert "task: none, for there is no runs/recipe/prepared/train.jsonl yet" in captured.out
    assert "all right" not in captured.out
    told = "without a task there was no check of the reset and reward of World; fix: give a task by --task "
    assert told + """'{"start": "..."}', or let `agentfactory train` create runs/recipe/prepared""" in captured.err
    tools(0, "check", recipe, *later, "--task", '{"start": "there"}')
    captured = tools(1, "check", recipe, *later, "mcp_servers.more={module: webshop, options: {data: no/shop}}")
    assert re.search(r"more: options\.data: .*no/shop.*; fix: ", captured.err)
    # an option in a folder that `prepare` fills cannot be checked before
    waits = "mcp_servers.more={module: webshop, options: {data: '${prepared}/shop'}}"
    assert "an environment: not created" in tools(5, "check", recipe, *later, waits).out


def test_a_missing_file_of_tasks_is_not_all_right(recipe: Path, tools: Tools) -> None:
    only = ["tools=[things.py:add]", "mcp_servers={}", "data.path=none.jsonl"]
    captured = tools(5, "check", recipe, *only)
    assert "all right" not in captured.out
    assert "there was no check of the rows of none.jsonl; fix: give a task by --task" in captured.err
    assert "or create none.jsonl" in captured.err
    tools(0, "check", recipe, *only, "--task", '{"question": "?"}')


@pytest.mark.processes
def test_a_served_file_is_a_server_for_recipes(recipe: Path, tools: Tools) -> None:
    command = os.path.join(os.path.dirname(sys.executable), "agentfactory")
    things = {"command": command, "args": ["tools", "serve", "things.py"]}
    recipe.with_name("served.yaml").write_text(json.dumps({"mcp_servers": {"things": things}}))
    assert tools(0, "call", recipe.with_name("served.yaml"), "add", "a=40", "--task", '{"start": "x"}').out == "42\n"
    with pytest.raises(SystemExit, match="2"):
        tools(2, "serve", "none.py")


def test_an_example_of_arguments_fits_its_schema() -> None:
    place = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 4}}, "required": ["x"]}
    for schema, example in (
        *((True, "w"), ({"type": []}, "w"), ({"type": "string"}, "w"), ({"type": "boolean"}, False)),
        *(({"$ref": "#/$defs/Place"}, {"x": 4}), ({"$ref": "#/$defs/None"}, "w"), ({"const": 7}, 7)),
        *(({"enum": ["a", "b"]}, "a"), ({"anyOf": [{"type": "null"}, {"type": "string"}]}, None)),
        ({"type": ["array", "null"], "items": {"type": "number"}}, [1]),
        ({"type": "object", "properties": {"a": {"oneOf": [{"default": 2}]}}, "required": ["a"]}, {"a": 2}),
    ):
        assert _example(schema, {"$defs": {"Place": place}}, "w") == example
