"""`agentfactory tools`: what it lists, calls, checks and serves, with no model in sight."""

import base64
import json
import os
import re
import sys
from pathlib import Path

import pytest
from jsonschema.validators import validator_for
from PIL import Image

from agentfactory.commands import tools_command
from agentfactory.commands.main import main
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
SEEING = """
from PIL import Image

from agentfactory import Environment, reward, tool


class Album(Environment):
    def reset(self, images, **task):
        self.images = [Image.open(image) for image in images]

    @tool
    def first(self) -> str:
        '''Measure.'''
        return "{} x {}".format(*self.images[0].size)


@reward
def wide(images):
    return Image.open(images[0]).width
"""
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

Output = pytest.CaptureFixture[str]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe that has tools and data, and no model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "things.py").write_text(TOOLS)
    (tmp_path / "tasks.jsonl").write_text('{"question": "where?", "start": "at home"}\n')
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    return file


def tools(*arguments: object) -> int:
    return main(["tools", *(str(argument) for argument in arguments)])


def test_list_prints_what_a_model_would_see(recipe: Path, capsys: Output) -> None:
    assert tools("list", recipe) == 0
    assert capsys.readouterr().out.splitlines() == [
        'add: add(a: integer, b: integer = 2, mode: "fast" | "slow" = "fast", tags: list of string | null = null)',
        "    Add two numbers.",
        "World: where(name: string)",
        "    Say where.",
        "more: my_paint(color: string, times: integer = 1)",
        "    Paint.",
    ]
    assert tools("list", recipe, "--json", "mcp_servers.more.prefix=your_") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [spec["function"]["name"] for spec in listed] == ["add", "where", "your_paint"]
    for spec in listed:
        assert spec["type"] == "function"
        validator_for(spec["function"]["parameters"]).check_schema(spec["function"]["parameters"])


def test_list_prints_the_first_prompt(recipe: Path, capsys: Output, tmp_path: Path) -> None:
    make_tokenizer(trl_template("qwen2_5")).save_pretrained(tmp_path / "model")
    override = f"model.path={tmp_path / 'model'}"
    assert tools("list", recipe, "--prompt", override) == 0
    out = capsys.readouterr().out
    assert out.startswith("format: hermes\n")
    assert "because: rollout.parser=auto: hermes reads the calls that the template writes\n" in out
    assert "<|im_start|>user\nwhere?<|im_end|>\n" in out
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in out
    assert "<tool_response>\n(its result)\n</tool_response>" in out
    assert tools("list", recipe, "--prompt", override, "rollout.parser=glm") == 1
    assert "use rollout.parser=hermes" in capsys.readouterr().err
    # what can be shown is shown
    assert tools("list", recipe, "--prompt", override, "tools=[things.py:submit]", "rollout.parser=code_block") == 1
    shown = capsys.readouterr()
    assert shown.out.startswith("format: code_block\n")
    assert "a turn ends with: '<|im_end|>' (1), '```\\nOutput:\\n'" in shown.out
    assert "code_block needs one tool with a parameter `code`" in shown.err
    # a task that is not there yet is made up, and that is said
    for missing in ("data.path=later.jsonl", "data.path=things.py"):
        assert tools("list", recipe, "--prompt", override, "tools=[things.py:submit]", "mcp_servers={}", missing) == 5
        shown = capsys.readouterr()
        assert "<|im_start|>user\n(the question of a task)<|im_end|>" in shown.out
        assert "this is not the prompt of a task" in shown.err


def test_list_of_nothing(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "empty.yaml").write_text("{}")
    assert tools("list", tmp_path / "empty.yaml") == 0
    assert capsys.readouterr().out == "no tools\n"


def test_the_last_stage_is_what_counts(recipe: Path, capsys: Output) -> None:
    recipe.with_name("whole.yaml").write_text(
        "stages: [{name: first, tools: [things.py:submit], model: {path: ./none}, train: {steps: 1}}, "
        "{name: second, tools: [things.py:add], train: {steps: 1}}]"
    )
    assert tools("list", recipe.with_name("whole.yaml")) == 0
    out = capsys.readouterr().out
    assert out.startswith("add: add(")
    assert "submit" not in out


def test_call(recipe: Path, capsys: Output) -> None:
    for arguments, printed in (
        (["add", "a=40"], "42"),
        (["add", '{"a": 1, "b": -3}'], "-2"),
        (["add", "a=1", "b=1", 'tags=["x", "y"]', "mode=slow"], "2"),
        (["where", "name=5"], "5 is at home"),
        (["where", "name=we", "--task", '{"start": "there"}'], "we is there"),
    ):
        assert tools("call", recipe, *arguments) == 0
        assert capsys.readouterr().out == f"{printed}\n"


def test_call_takes_overrides_before_the_tool(recipe: Path, capsys: Output) -> None:
    assert tools("call", recipe, "limits.result_tokens=null", "mcp_servers.more.prefix=your_", "add", "a=40") == 0
    assert capsys.readouterr().out == "42\n"
    for arguments, told in (
        (
            ["add", "a=40", "limits.calls=1"],
            "add has no such argument; fix: write overrides before TOOL",
        ),
        (["limts.calls=1", "add", "a=40"], "limts: unknown key 'limts'; fix: did you mean limits?"),
    ):
        assert tools("call", recipe, *arguments) == 2
        assert told in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        tools("call", recipe, "limits.calls=1")
    assert "arguments are required: TOOL" in capsys.readouterr().err


def test_call_prints_what_a_tool_says_beside_its_result(recipe: Path, capsys: Output) -> None:
    recipe.write_text("tools: [things.py:submit]")
    assert tools("call", recipe, "submit", "answer=me") == 0
    assert capsys.readouterr().out == 'got me\ninfo: {"length": 2}\nthe tool ends the chain\n'


def test_call_saves_images(recipe: Path, tmp_path: Path, capsys: Output) -> None:
    picture = tmp_path / "picture.png"
    assert tools("call", recipe, "my_paint", "color=red", "times=2", "--output", picture) == 0
    assert capsys.readouterr().out == "painted red\n[image/png image]\n[image/png image]\n"
    for file, size in ((picture, (2, 3)), (tmp_path / "picture-2.png", (2, 4))):
        with Image.open(file) as image:
            assert (image.size, image.getpixel((0, 0))) == (size, (255, 0, 0))
    assert tools("call", recipe, "add", "a=1", "--output", picture) == 1
    assert "--output: the result holds no image" in capsys.readouterr().err


def test_images_of_a_row_are_files_as_in_training(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "seeing.py").write_text(SEEING)
    Image.new("RGB", (3, 4), "red").save(tmp_path / "red.png")
    inside = base64.b64encode((tmp_path / "red.png").read_bytes()).decode()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("tools: [seeing.py:Album]\nrewards: [seeing.py:wide]\ndata: {path: rows.jsonl}")
    for image in ("red.png", inside):
        (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "?", "images": [image]}))
        assert tools("call", recipe, "first") == 0
        assert capsys.readouterr().out == "3 x 4\n"
        assert tools("check", recipe) == 0
        assert "each is a number" in capsys.readouterr().out
        # a path in --task is relative to the current folder, as every other on the command line
        named = image if image == inside else str(tmp_path / image)
        assert tools("call", recipe, "first", "--task", json.dumps({"images": [named]})) == 0
        assert capsys.readouterr().out == "3 x 4\n"
    assert tools("call", recipe, "first", "--task", '{"images": ["none.png"]}') == 2
    assert "--task: the image" in capsys.readouterr().err


def test_places_are_what_the_recipe_says(recipe: Path, capsys: Output, tmp_path: Path) -> None:
    """Also where the model's files are not here, except for pixels of images that it resizes."""
    Image.new("RGB", (200, 100)).save("wide.png")
    recipe.write_text("tools: [image_tools]\nmodel: {path: of/the-hub}\ndata: {path: rows.jsonl}")
    (tmp_path / "rows.jsonl").write_text('{"question": "At <bbox>?", "images": ["wide.png"]}\n')
    unknown = "the model's image coordinates are unknown, so this check uses pixels of the file"
    for coordinates, x, told in (
        ("relative1000", 500, ""),
        ("relative1", 0.5, ""),
        ("pixels", 100, ""),
        ("auto", 100, unknown),
        ("resized", 100, unknown),
    ):
        arguments = f"rollout.coordinates={coordinates}", "zoom", f"bbox_2d=[0, 0, {x}, {2 * x}]"
        assert tools("call", recipe, *arguments) == 0
        captured = capsys.readouterr()
        assert '"box": [0.0, 0.0, 100.0, 100.0]' in captured.out, coordinates
        assert (told in captured.err) if told else not captured.err
    assert tools("list", recipe, "--json", "rollout.coordinates=relative1") == 0
    shown = capsys.readouterr().out
    assert "{coordinates}" not in shown
    assert "from 0 to 1 of the image's width and height" in shown


def test_the_first_prompt_has_images(recipe: Path, capsys: Output, tmp_path: Path) -> None:
    make_vision_model(tmp_path / "model", "qwen3_vl")
    Image.new("RGB", (200, 100)).save("wide.png")
    recipe.write_text("tools: [image_tools]\nmodel: {path: ./model}\ndata: {path: rows.jsonl}")
    row = {"question": "At <bbox>?", "images": ["wide.png"], "objects": {"bbox": [[0, 0, 100, 50]]}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    lengths = []
    for pixels in (32 * 32 * 4, 32 * 32 * 16):
        sized = "model.min_image_pixels=1024", f"model.max_image_pixels={pixels}"
        assert tools("list", recipe, "--prompt", *sized) == 0
        shown = capsys.readouterr().out
        assert "<|vision_start|><|image_pad|><|vision_end|>At [0, 0, 500, 500]?" in shown
        assert "from 0 to 1000 of the image's width and height" in shown
        found = re.search(r"the first prompt: (\d+) ids", shown)
        assert found
        lengths.append(int(found[1]))
    assert lengths[0] < lengths[1]  # of the image's tokens
    assert tools("list", recipe, "--prompt", "rollout.coordinates=pixels") == 0
    assert "Image 0 has 200 x 100 pixels." in capsys.readouterr().out


def test_calls_that_fail(recipe: Path, capsys: Output) -> None:
    for arguments, printed, error in (
        (["add", "a=q"], "a: ", "invalid_arguments"),
        (["sub", "a=q"], "There is no tool 'sub'. The tools are: add, where, my_paint.", "unknown_tool"),
        (["my_paint", "color=nothing"], "nothing", "tool_error"),
    ):
        assert tools("call", recipe, *arguments) == 1
        captured = capsys.readouterr()
        assert printed in captured.out
        assert captured.err == f"agentfactory: the call failed: {error}\n"
    assert tools("call", recipe, "where", "name=x", "--task", "{}") == 1
    assert "reset needs start" in capsys.readouterr().err


def test_command_lines_that_cannot_work(recipe: Path, capsys: Output) -> None:
    for arguments, reason in (
        (["call", recipe, "add", "a"], "fix: write key=value"),
        (["call", recipe, "add", "{'a': 1}"], "not JSON"),
        (["list", recipe, "tool=x"], "tool: unknown key 'tool'; fix: did you mean tools?"),
        (["list", recipe, "tools=[things.py:ad]"], "tools.0: unknown"),
        (["check", recipe.with_name("none.yaml")], "none.yaml"),
        (["check", recipe, "mcp_servers.x.command=no-such-program"], "no program 'no-such-program'"),
    ):
        assert tools(*arguments) == 2
        captured = capsys.readouterr()
        assert reason in captured.err
        assert captured.out == ""
    for unknown in (["check", recipe, "--json"], ["check", recipe, "--task", "[1]"], ["lists", recipe]):
        with pytest.raises(SystemExit) as ended:
            tools(*unknown)
        assert ended.value.code == 2


def test_check_opens_and_resets(recipe: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools_command, "SLOW_SECONDS", 600.0)
    assert tools("check", recipe) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"add: opened in \d+\.\d\d s; its tools: add", lines[0])
    judged = "says 'You are at home.'; without any call, reward 1, success 0"
    assert re.fullmatch(rf"    an environment: reset in \d+\.\d\d s, {judged}", lines[2])
    assert lines[-2:] == ["task: the first row of data", "all right"]
    monkeypatch.setattr(tools_command, "SLOW_SECONDS", 0.0)
    assert tools("check", recipe, "--task", '{"start": "there"}') == 0
    out = capsys.readouterr().out
    assert "slow (more than 0 s); its tools: where" in out
    assert "says 'You are there.'" in out
    assert "task: --task" in out


@pytest.mark.processes
def test_check_says_what_is_wrong_with_each_server(
    recipe: Path, capsys: Output, caplog: pytest.LogCaptureFixture
) -> None:
    (recipe.parent / "odd.py").write_text(SCHEMA % "{'x': {'type': 'nonsense'}}")
    dead = {"command": "python", "args": ["-c", "import sys; sys.exit('I am broken')"]}
    servers = {"dead": dead, "odd": {"module": "odd.py:odd"}, "twice": {"module": "things.py:add"}}
    assert tools("check", recipe, "mcp_servers=" + json.dumps(servers), "data=null") == 1
    captured = capsys.readouterr()
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


def test_check_of_environments_that_cannot_teach(recipe: Path, capsys: Output) -> None:
    (recipe.parent / "unfit.py").write_text(UNFIT)
    assert tools("check", recipe, "tools=[unfit.py:Idle, unfit.py:Wrong]") == 1
    captured = capsys.readouterr()
    assert captured.out.count("; cannot give a reward") == 1
    assert "all right" not in captured.out
    idle, wrong = captured.err.splitlines()
    assert "Idle: an environment without a tool: no model can act on it" in idle
    assert "Wrong: environment Wrong: reward: " in wrong
    assert "'lft'" in wrong
    assert "right after reset" in wrong


def test_check_of_limits_and_data(recipe: Path, capsys: Output) -> None:
    assert tools("check", recipe, "limits.calls_per_tool.ad=2") == 1
    assert "limits.calls_per_tool.ad: there is no tool 'ad'; fix: did you mean add?" in capsys.readouterr().err
    (recipe.parent / "tasks.jsonl").write_text("{\n")
    assert tools("check", recipe) == 2
    assert "tasks.jsonl:1 is not JSON" in capsys.readouterr().err


def test_check_says_what_it_could_not_check(recipe: Path, capsys: Output) -> None:
    """Without a task no environment is reset; its options are checked all the same."""
    (recipe.parent / "prepare.py").write_text("def prepare(folder, seed): ...\n")
    later = ["prepare=prepare.py:prepare", "data.path=${prepared}/train.jsonl"]
    assert tools("check", recipe, *later) == 5
    captured = capsys.readouterr()
    assert re.search(r"an environment: created in \d\.\d\d s, but not reset", captured.out)
    assert "task: none, for there is no runs/recipe/prepared/train.jsonl yet" in captured.out
    assert "all right" not in captured.out
    told = "without a task there was no check of the reset and reward of World; fix: give a task by "
    assert (
        told + """--task '{"start": "..."}', or let `agentfactory train` create runs/recipe/prepared first"""
        in captured.err
    )
    assert tools("check", recipe, *later, "--task", '{"start": "there"}') == 0
    assert tools("check", recipe, *later, "mcp_servers.more={module: webshop, options: {data: no/shop}}") == 1
    assert re.search(r"more: options\.data: .*no/shop.*; fix: ", capsys.readouterr().err)
    # an option in a folder that `prepare` fills cannot be checked before
    waits = "mcp_servers.more={module: webshop, options: {data: '${prepared}/shop'}}"
    assert tools("check", recipe, *later, waits) == 5
    assert "an environment: not created" in capsys.readouterr().out


def test_a_missing_file_of_tasks_is_not_all_right(recipe: Path, capsys: Output) -> None:
    only = ["tools=[things.py:add]", "mcp_servers={}", "data.path=none.jsonl"]
    assert tools("check", recipe, *only) == 5
    captured = capsys.readouterr()
    assert "all right" not in captured.out
    assert "there was no check of the rows of none.jsonl; fix: give a task by --task" in captured.err
    assert "or create none.jsonl" in captured.err
    assert tools("check", recipe, *only, "--task", '{"question": "?"}') == 0


def test_only_environments_need_a_task(recipe: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(data: object) -> None:
        raise AssertionError("the data is on the hub, which is far")

    monkeypatch.setattr(tools_command, "load_tasks", read)
    assert tools("check", recipe, "tools=[things.py:add]") == 0
    assert "task: none, for there is no environment" in capsys.readouterr().out
    assert tools("check", recipe) == 2


@pytest.mark.processes
def test_a_served_file_is_a_server_for_recipes(recipe: Path, capsys: Output) -> None:
    """The command as the child of a recipe."""
    command = os.path.join(os.path.dirname(sys.executable), "agentfactory")
    things = {"command": command, "args": ["tools", "serve", "things.py"]}
    recipe.with_name("served.yaml").write_text(json.dumps({"mcp_servers": {"things": things}}))
    assert tools("call", recipe.with_name("served.yaml"), "add", "a=40", "--task", '{"start": "x"}') == 0
    assert capsys.readouterr().out == "42\n"
    with pytest.raises(SystemExit, match="2"):
        tools("serve", "none.py")
    assert "none.py" in capsys.readouterr().err
