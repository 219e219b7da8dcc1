"""Tests of all of a recipe's tools behind one interface: equal results over each transport, and every kind of error."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from mcp.server.mcpserver import MCPServer

from agentfactory.base.config import ToolsRecipe
from agentfactory.base.messages import (
    CallError,
    Content,
    EnvironmentReward,
    EnvironmentRewardError,
    ToolCall,
    ToolInfrastructureError,
    ToolResult,
)
from agentfactory.base.user_code.loading import load_object
from agentfactory.tools.sessions.tool_session import ToolSession
from agentfactory.tools.sessions.toolset import Toolset, open_toolset
from tests.tools.conftest import NOTEBOOK, ROLES, recipe_of

NESTED: list[Any] = []
for _ in range(300):
    NESTED = [NESTED]

WRONG, FAILED = CallError.INVALID_ARGUMENTS, CallError.TOOL_ERROR
ODD = "Grüße, 世界 \n\t\"quoted\" \\ 'too'"
TOOLS = ["write", "read", "tear", "add", "shout", "fail", "wait"]
SCRIPT: list[tuple[str, dict[str, Any], str, CallError | None]] = [
    # tool, arguments, the text that the model reads (to its ...), the error
    ("read", {}, "first", None),
    ("write", {"word": ODD}, f"wrote {ODD}", None),
    ("read", {}, ODD, None),
    ("write", {"word": ""}, "wrote ", None),
    ("read", {}, "", None),
    ("write", {}, "Invalid arguments for write: word is missing.", WRONG),
    ("write", {"word": 3}, "Invalid arguments for write: word: Input should be a valid string, got 3.", WRONG),
    (
        "write",
        {"word": "x", "size": [1]},
        "Invalid arguments for write: size is not an argument of it (the a...",
        WRONG,
    ),
    ("write", {"word": "\ud800"}, "Invalid arguments for write: not JSON in UTF-8: ...", WRONG),
    ("tear", {}, "ValueError: the pad cannot be torn", FAILED),
    ("add", {"a": 2}, "3", None),
    ("add", {"a": "2", "b": 2**70}, str(2 + 2**70), None),
    (
        "add",
        {"a": 2.5},
        "Invalid arguments for add: a: Input should be a valid integer, got a number with a f...",
        WRONG,
    ),
    ("add", {"a": float("nan")}, "Invalid arguments for add: not JSON in UTF-8: Out of range float...", WRONG),
    ("add", {"a": NESTED}, "Invalid arguments for add: they are nested more than 64 levels deep.", WRONG),
    ("shout", {"text": "hey", "ending": "?"}, "HEY?", None),
    (
        "shout",
        {"text": "hey", "ending": "."},
        "Invalid arguments for shout: ending: Input should be '!' or '?'...",
        WRONG,
    ),
    ("fail", {"reason": "on purpose"}, "RuntimeError: on purpose", FAILED),
    ("fail", {"reason": ""}, "RuntimeError: ", FAILED),
    *(
        (name, {}, f"There is no tool {name!r}. The tools are: {', '.join(TOOLS)}.", CallError.UNKNOWN_TOOL)
        for name in ("burn", "reset", "reward", "close", "bad \ud800")
    ),
    ("read", {}, "", None),
]


def make(name: str, **arguments: Any) -> ToolCall:
    return ToolCall("1", name, arguments)


async def transcript(toolset: Toolset, key: str) -> list[Any]:
    async with toolset.chain(key, {"word": "first", "question": "ignored by reset"}) as session:
        seen: list[Any] = [toolset.specs, session.opening]
        for name, arguments, *_ in SCRIPT:
            result = await session.call(make(name, **arguments))
            seen.append((result.content, result.error, result.to_message(make(name))))
        parallel = [make("write", word=word) for word in "abc"] + [make("read")]
        seen.append([result.content for result in await asyncio.gather(*map(session.call, parallel))])
        seen.append(await session.reward())
    for task in ({"word": "forbidden"}, {"question": "no word"}):
        with pytest.raises(ToolInfrastructureError) as refused:
            async with toolset.chain(key, task):
                pass
        seen.append(str(refused.value).replace("Scratchpad", "pad"))
    async with toolset.chain(key, {"word": "priceless", "twice": False}) as session:
        with pytest.raises(EnvironmentRewardError) as worthless:
            await session.reward()
        seen.append(str(worthless.value).replace("Scratchpad", "pad"))
    async with toolset.chain(key, {"word": "clingy", "twice": False}):
        pass
    async with toolset.chain(key, {"word": "by turn"}) as session:
        seen.append(await session.reward())
    return seen


async def check_chains_apart(toolset: Toolset) -> None:
    """Run chains side by side, of which none may see another's word, and one whose call takes too long."""

    async def live(number: int) -> None:
        async with toolset.chain(f"apart {number}", {"word": f"w{number}"}) as session:
            assert session.opening == f"The pad says w{number}."
            for turn in range(2):
                word = f"{number}.{turn}"
                assert (await session.call(make("write", word=word))).content == f"wrote {word}"
                await asyncio.sleep(0.01 * (number % 5))
                assert (await session.call(make("read"))).content == word

    async def wait() -> None:
        async with toolset.chain("slow", {"word": "x"}) as session:
            late = await session.call(make("wait", seconds=30), 0.2)
            assert (late.content, late.error) == ("wait did not answer within 0.2 s.", CallError.TIMEOUT)
            assert late.seconds >= 0.2
            assert (await session.call(make("wait", seconds=0), 60)).content == "awake"

    await asyncio.gather(wait(), *(live(number) for number in range(32)))


@pytest.mark.processes
async def test_transports_give_identical_transcripts(recipes: dict[str, ToolsRecipe], folder: Path) -> None:
    seen = {}
    for transport, recipe in recipes.items():
        async with open_toolset(recipe, folder) as toolset:
            seen[transport] = await transcript(toolset, f"chain over {transport}")
            await check_chains_apart(toolset)
    assert repr(seen["stdio"]) == repr(seen["in process"])
    assert repr(seen["http"]) == repr(seen["in process"])

    specs, opening, *calls, parallel, reward, forbidden, incomplete, worthless, by_turn = seen["in process"]
    assert [spec.name for spec in specs] == TOOLS
    assert opening == "The pad says first."
    for (name, _, text, kind), (content, error, _) in zip(SCRIPT, calls, strict=True):
        said = f"{content[: len(text) - 3]}..." if text.endswith("...") else content
        assert (said, error) == (text, kind), name
    assert parallel == ["wrote a", "wrote b", "wrote c", "c"]
    assert reward == EnvironmentReward(1.0, {"success": 1.0})
    assert forbidden == "environment pad: reset: ValueError: that word is forbidden"
    assert incomplete == ("environment pad: reset needs word, which the task does not have; its fields are question")
    assert worthless == "environment pad: reward: ValueError: beyond measure"
    assert by_turn == EnvironmentReward(0.5, {}, [1.0, -0.25])


THEIRS = '''
from typing import Any
from mcp.server.mcpserver import Context, Image, MCPServer

server = MCPServer("theirs")
words = {}

def chain(context):
    return context.request_context.meta["agentfactory/chain"]

@server.tool()
async def begin(word: str, context: Context, size: int = 1) -> str:
    words[chain(context)] = word * size
    return ""

@server.tool()
async def judge(context: Context) -> float:
    return len(words[chain(context)]) / 2

@server.tool()
async def say(context: Context, times: int = 1) -> list[str]:
    """Say the word."""
    return [words[chain(context)]] * times

@server.tool()
def crash() -> str:
    raise RuntimeError("their fault")

@server.tool(structured_output=False)
def look() -> list[Any]:
    return ["before", Image(data=b"x", format="png"), "after"]

bare = MCPServer("bare")

@bare.tool()
def look() -> str:
    return "nothing"
'''


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    (tmp_path / "theirs.py").write_text(THEIRS)
    return tmp_path


async def test_a_server_that_is_not_ours(theirs: Path) -> None:
    recipe = recipe_of(x={"module": "theirs.py:server", "environment": ROLES})
    async with open_toolset(recipe, theirs) as toolset:
        assert [spec.name for spec in toolset.specs] == ["say", "crash", "look"]

        async def ask(session: ToolSession, name: str, **arguments: Any) -> tuple[Content, CallError | None]:
            result: ToolResult = await session.call(make(name, **arguments))
            return result.content, result.error

        async with toolset.chain("a", {"word": "ab", "size": 2, "other": 1}) as session:
            assert session.opening is None
            assert await ask(session, "say", times=2) == ("abab\nabab", None)
            assert await ask(session, "say", times="many") == (
                "Invalid arguments for say: times: 'many' is not of type 'integer'.",
                CallError.INVALID_ARGUMENTS,
            )
            said, error = await ask(session, "crash")
            # before mcp 2.1, the exception's text follows
            assert (str(said).startswith("Error executing tool crash"), error) == (True, CallError.TOOL_ERROR)
            image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}}
            texts = [{"type": "text", "text": text} for text in ("before", "after")]
            assert await ask(session, "look") == ([texts[0], image, texts[1]], None)
            assert await session.reward() == EnvironmentReward(2.0)


async def test_two_environments(theirs: Path, folder: Path) -> None:
    entry = {"module": str(theirs / "theirs.py") + ":server", "environment": ROLES}
    recipe = ToolsRecipe.model_validate({"tools": ["scratchpad.py:Scratchpad"], "mcp_servers": {"x": entry}})
    async with open_toolset(recipe, folder) as toolset, toolset.chain("a", {"word": "four"}) as session:
        assert session.opening == "The pad says four."
        assert await session.reward() == EnvironmentReward(6.0, {"Scratchpad/success": 1.0})
        await session.call(make("write", word="by turn"))
        assert await session.reward() == EnvironmentReward(2.5, {}, [1.0, -0.25])


OPEN_HANDED = """
import asyncio
from mcp.server.mcpserver import Image
from agentfactory.tools.environments.environment import Environment
from agentfactory.tools.tool import tool

calls = []
gate = asyncio.Event()

@tool
async def look_up(key: str, pages: int = 1) -> str:
    calls.append(key)
    if key in ("c", "d"):
        await gate.wait()
    if key == "bad":
        raise ValueError("no such key")
    return f"{key} {len(calls)}"

class Viewer(Environment):
    def reset(self, word):
        return ["look:", Image(data=b"x", format="png")]

    @tool
    def zoom(self) -> int:
        return 1
"""


async def test_openings_with_images_and_environments_that_do_not_judge(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "mine.py").write_text(OPEN_HANDED)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}}
    async with open_toolset(ToolsRecipe(tools=["mine.py:Viewer"]), tmp_path) as toolset:
        assert (toolset.environments, toolset.judges) == (["Viewer"], False)
        async with toolset.chain("a", {"word": "w"}) as session:
            assert session.opening == [{"type": "text", "text": "look:"}, image]
            assert await session.reward() is None
    recipe = ToolsRecipe(tools=["mine.py:Viewer", str(folder / "scratchpad.py") + ":Scratchpad"])
    async with open_toolset(recipe, tmp_path) as toolset:
        assert (toolset.environments, toolset.judges) == (["Viewer", "Scratchpad"], True)
        async with toolset.chain("a", {"word": "w"}) as session:
            opening = session.opening
            assert opening == [{"type": "text", "text": "look:"}, image, {"type": "text", "text": "The pad says w."}]
            assert await session.reward() == EnvironmentReward(1.0, {"success": 1.0})


async def test_names_that_models_see(folder: Path) -> None:
    one = {"module": "scratchpad.py:Scratchpad", "allow": ["write", "read"], "deny": ["write"], "prefix": "one_"}
    two = {"module": "scratchpad.py:Scratchpad", "prefix": "two_", "deny": ["tear"]}
    async with open_toolset(recipe_of(one=one, two=two), folder) as toolset, toolset.chain("a", {"word": "w"}) as chain:
        assert [spec.name for spec in toolset.specs] == ["one_read", "two_write", "two_read"]
        assert (await chain.call(make("two_write", word="x"))).content == "wrote x"
        assert [(await chain.call(make(name))).content for name in ("one_read", "two_read")] == ["w", "x"]
        assert (await chain.call(make("two_tear"))).error is CallError.UNKNOWN_TOOL
        assert (await chain.call(make("two_write"))).content == "Invalid arguments for two_write: word is missing."


async def test_objects_beside_the_recipe(folder: Path) -> None:
    objects = [load_object("scratchpad.py:Scratchpad", folder), load_object("scratchpad.py:add", folder)]
    server = MCPServer("theirs")

    @server.tool()
    def greet() -> str:
        return "hello"

    recipe = ToolsRecipe(tools=["scratchpad.py:shout"])
    async with open_toolset(recipe, folder, objects=[*objects, server]) as toolset:
        assert [spec.name for spec in toolset.specs] == ["write", "read", "tear", "add", "greet", "shout"]
        async with toolset.chain("a", {"word": "w"}) as session:
            assert (await session.call(make("greet"))).content == "hello"
            assert (await session.call(make("read"))).content == "w"
        gauges = await toolset.gauges()
    counts = {"in_use": 0.0, "idle": 1.0, "waiting": 0.0, "made": 1.0, "recycled": 0.0, "broken": 0.0}
    assert gauges == {f"environments/Scratchpad/{name}": value for name, value in counts.items()}


async def test_letting_go_survives_a_second_cancellation(folder: Path) -> None:
    recipe = recipe_of(pad={"module": "scratchpad.py:Scratchpad", "pool": {"capacity": 1}})
    for steps in range(12):
        async with open_toolset(recipe, folder) as toolset:

            async def live(toolset: Toolset = toolset) -> None:
                async with toolset.chain("a", {"word": "w"}) as session:
                    await session.call(make("write", word="x"))

            chain = asyncio.create_task(live())
            await asyncio.sleep(0.001 * steps / 4)
            chain.cancel()
            for _ in range(steps % 4):
                await asyncio.sleep(0)
            chain.cancel()
            with suppress(asyncio.CancelledError):
                await chain
            async with asyncio.timeout(60), toolset.chain("b", {"word": "again"}) as session:
                assert session.opening == "The pad says again."


def pad(served: str = "Scratchpad", name: str = "pad", **fields: Any) -> dict[str, Any]:
    """Return a recipe with the tool `add`, and a server of another object."""
    return {"tools": ["scratchpad.py:add"], "mcp_servers": {name: {"module": f"scratchpad.py:{served}", **fields}}}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ({"tools": ["nowhere.py:add"]}, "there is no file"),
        (pad("add", name="add"), "two tool servers are called add"),
        (pad("add"), "the tool add is offered by add and by pad"),
        (pad("add", environment={}), "pad.environment.reset: the server has no tool 'reset', it offers add; name"),
        (pad(environment={"close": "shut"}), "no tool 'shut', it offers write, .*; set it to null"),
        (pad(deny=["reset"]), "pad.deny: the server has no tool 'reset' for models, it offers write, re"),
        (pad("shout", allow=["sub"]), "pad.allow: the server has no tool 'sub' for models, it offers sh"),
        (
            {"mcp_servers": {"pad": {**NOTEBOOK, "isolation": "shared", "pool": {"warm": 2}}}},
            "mcp_servers.pad.pool.warm: all chains share the server, .*; set isolation, or remove it",
        ),
    ],
)
async def test_recipes_that_are_wrong(folder: Path, recipe: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        async with open_toolset(ToolsRecipe.model_validate(recipe), folder):
            pass
