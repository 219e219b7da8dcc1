"""Tests of the code interpreter as an environment: the model's observations, files in and out, consecutive chains."""

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.config import ToolsRecipe
from agentfactory.base.messages import ToolCall
from agentfactory.base.processes.sandbox_limits import SandboxKind
from agentfactory.tools.prebuilt.code_interpreter import CodeInterpreter
from agentfactory.tools.sessions.toolset import open_toolset
from tests.waiting import pass_time, until

pytestmark = pytest.mark.processes


@pytest.fixture
async def interpreter() -> AsyncIterator[CodeInterpreter]:
    made = CodeInterpreter(seconds=60, memory_mb=128, disk_mb=4, output_characters=1000)
    await made.reset()
    yield made
    await made.close()


async def _run(interpreter: CodeInterpreter, code: str) -> str:
    result = await interpreter.python(code)
    return result if isinstance(result, str) else result["observation"]


async def _get_stuck(interpreter: CodeInterpreter) -> "asyncio.Task[str]":
    """Start a cell that cannot be interrupted, and return its task once it runs."""
    call = asyncio.create_task(_run(interpreter, "print('so far')\nsum(iter(int, 1))"))
    await until(lambda: interpreter._sandbox is not None and interpreter._sandbox._process.said())
    return call


CELLS = {
    "x = 17 + 5": "(no output)",
    "print('a', end='')\n5": "a\n5",
    "def f(n):\n    return n + x\n\nf(1)": "23",
    "input()": "EOFError: EOF when reading a line",
    "exit()": "SystemExit: None",
    "int('1' * 5000)": "ValueError: Exceeds the limit",
    "x": "22",
}


async def test_cells_are_shown_as_a_notebook_shows_them(interpreter: CodeInterpreter) -> None:
    for code, expected in CELLS.items():
        text = await _run(interpreter, code)
        assert text == expected or (("Error" in expected or "Exit" in expected) and expected in text), (code, text)


async def test_traceback_shows_the_users_frames_only(interpreter: CodeInterpreter) -> None:
    await _run(interpreter, "def inverse(n):\n    return 1 / n")
    result = await interpreter.python("print('before')\ntry:\n    {}['a']\nexcept KeyError:\n    inverse(0)")
    assert isinstance(result, dict)
    assert result["error"] == "ZeroDivisionError"
    lines = [line for line in result["observation"].splitlines() if set(line.strip()) - set("~^")]
    assert lines == [
        "before",
        "Traceback (most recent call last):",
        '  File "<cell 2>", line 3, in <module>',
        "    {}['a']",
        "KeyError: 'a'",
        "During handling of the above exception, another exception occurred:",
        "Traceback (most recent call last):",
        '  File "<cell 2>", line 5, in <module>',
        "    inverse(0)",
        '  File "<cell 1>", line 2, in inverse',
        "    return 1 / n",
        "ZeroDivisionError: division by zero",
    ]


async def test_a_slow_cell_keeps_its_variables_and_a_stuck_one_loses_them(
    interpreter: CodeInterpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _run(interpreter, "x = 1")
    with monkeypatch.context() as slow:
        slow.setattr(interpreter, "_seconds", 0.2)
        slow.setattr("agentfactory.tools.sandbox.session._GRACE_SECONDS", 30.0)
        assert "TimeoutError" in await _run(interpreter, "while True: pass")
    assert await _run(interpreter, "x") == "1"
    stuck = await _get_stuck(interpreter)
    pass_time(61)
    assert await stuck == (
        "so far\n[The interpreter was restarted: it ran for more than 60 s. Variables and files made so far are lost.]"
    )
    assert "NameError" in await _run(interpreter, "x")


async def test_a_call_that_was_cancelled_costs_the_variables(interpreter: CodeInterpreter) -> None:
    await _run(interpreter, "x = 1")
    call = await _get_stuck(interpreter)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    text = await _run(interpreter, "print('x' in dir())")
    assert text.startswith("False\n[The interpreter was restarted: the last call took too long.")


async def test_nothing_of_a_chain_reaches_the_next(interpreter: CodeInterpreter) -> None:
    await _run(interpreter, "import builtins, json\nbuiltins.x = json.x = 1\nopen('file', 'w').write('x')")
    await interpreter.release()
    assert await interpreter.healthy()
    await interpreter.reset()
    code = "import builtins, json, os\nprint(hasattr(builtins, 'x'), hasattr(json, 'x'), os.listdir('.'))"
    assert await _run(interpreter, code) == "False False ['.tmp']"
    # also if the previous chain was not released
    await interpreter.reset()
    assert "NameError" in await _run(interpreter, "os")


async def test_files_of_the_row_are_copied_in(tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "a.csv").write_text("1,2")
    (tmp_path / "inner").symlink_to("tables")
    (tmp_path / "out").symlink_to("/etc")
    interpreter = CodeInterpreter(files=str(tmp_path), seconds=60, disk_mb=1)
    read = "[open(name, 'rb').read() for name in sorted(files)]"
    try:
        await interpreter.reset(files={"b.txt": "text", "c/d.bin": {"base64": base64.b64encode(b"\xff").decode()}})
        assert await _run(interpreter, "files = ['b.txt', 'c/d.bin']\n" + read) == "[b'text', b'\\xff']"
        # the row's files are copied again after a restart
        stuck = await _get_stuck(interpreter)
        pass_time(61)
        assert "restarted" in await stuck
        assert await _run(interpreter, "open('b.txt').read()") == "'text'"
        await interpreter.reset(files=["tables/a.csv", "inner/a.csv"], question="?")
        assert await _run(interpreter, "open('tables/a.csv').read()") == "'1,2'"
        refused: dict[str, Any] = {
            "there is no file 'missing'": ["missing"],
            "there is no file '../x'": ["../x"],
            "there is no file 'out/passwd'": ["out/passwd"],
            "does not name a file of the workspace": {"../x": "text"},
            r"x cannot be read: .*; give a text, or \{\"base64\"": {"x": 1},
            "give a mapping of name to text, or a list of names": "tables/a.csv",
            "'x/y' does not name a file of the workspace": {"x": "", "x/y": ""},
        }
        for message, files in refused.items():
            with pytest.raises(ValueError, match=message):
                await interpreter.reset(files=files)
    finally:
        await interpreter.close()


async def test_artefacts_come_out_with_the_cell_that_changed_them() -> None:
    interpreter = CodeInterpreter(artefacts=["*.csv", "plots/*"])
    try:
        await interpreter.reset()
        code = "import os\nos.mkdir('plots')\nopen('a.csv', 'w').write('1')\nopen('b.txt', 'w').write('2')\n"
        code += "open('plots/c.png', 'wb').write(b'\\xff')"
        result = await interpreter.python(code)
        assert result == {"observation": "1", "artefacts": {"a.csv": "1", "plots/c.png": {"base64": "/w=="}}}
        assert await interpreter.python("1") == "1"
        result = await interpreter.python("open('a.csv', 'a').write('3')\nopen('large.csv', 'w').write('x' * 2**21)")
        assert result == {"observation": "2097152", "artefacts": {"a.csv": "13", "large.csv": None}}
        result = await interpreter.python("open('a.csv', 'w').write('13')")
        assert result == "2"  # the same content
    finally:
        await interpreter.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sandbox": "docker"}, "sandbox: got 'docker'; it is one of bubblewrap, none"),
        ({"memory_mb": 0}, "memory_mb: got 0; it has to be from 64 to"),
        ({"files": "no-such-folder"}, "files: there is no folder"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CodeInterpreter(**options)


@pytest.mark.parametrize("sandbox", SandboxKind)
async def test_chains_of_a_recipe_have_one_each(sandbox: SandboxKind, tmp_path: Path) -> None:
    server = {"module": "code_interpreter", "options": {"sandbox": sandbox}, "pool": {"capacity": 4, "warm": 2}}
    recipe = ToolsRecipe.model_validate({"mcp_servers": {"code": server}})

    async def chain(toolset: Any, index: int) -> None:
        async with toolset.chain(f"chain {index}", {"question": "?", "files": {"number": str(index)}}) as session:
            for code, expected in (("x = int(open('number').read())", "(no output)"), ("x * 2", str(index * 2))):
                result = await session.call(ToolCall("1", "python", {"code": code}))
                assert (result.content, result.error) == (expected, None)
                await asyncio.sleep(0.01)

    async with open_toolset(recipe, tmp_path) as toolset:
        await asyncio.gather(*(chain(toolset, index) for index in range(12)))
