"""Cost of a tool call: ours, with validation and limits, compared with the bare MCP SDK.

All sides call the same tool (an async function of a text, a number and a list, which answers with about 200 characters)
with the same arguments: in process, over stdio and over streamable HTTP, each with 1 and with 16 concurrent calls over
one connection.

- sdk: the SDK's `Client` and `MCPServer`, called as its documentation shows (text results, no structured copy; over
  HTTP stateless, with JSON answers, as ours are).
- ours: the path of a chain's call: `ChainLimits.run` with all limits set and none reached, a chain's session, our
  client, and the tool served by us. The results are far shorter than `result_tokens`, like most; the time to count the
  tokens of a result that may exceed it is printed separately.
- ours, their server: the same on our side, with the server of `sdk` at the other end; our side checks its arguments by
  JSON Schema.

The sides alternate in one process, block by block, and each begins a third of the rounds. A result is the median over
blocks of a block's seconds divided by its calls. The last line is JSON with the worst cases over both servers and both
numbers of concurrent calls. `in_process_added_ms` is the time per call that ours adds to the SDK's in process;
`stdio_vs_sdk` and `http_vs_sdk` are the seconds of ours divided by those of the SDK, in the same round. In process, a
call of the SDK takes a ninth of a millisecond, so a ratio would be meaningless.

    taskset -c 2,3 python benchmarks/tools.py [--quick]
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

TRANSPORTS = ("in_process", "stdio", "http")
CONCURRENCY = (1, 16)
ARGUMENTS = {"query": "treasure of the third island", "limit": 7, "tags": ["sea", "gold", "map"]}

TOOL_FILE = '''
import sys

from mcp.server.mcpserver import MCPServer

from agentfactory import tool


async def lookup(query: str, limit: int = 5, tags: list[str] = []) -> str:
    """Look something up.

    Args:
        query: what to look for
        limit: how many lines to give
        tags: what the lines have to be about
    """
    return f"{query} ({', '.join(tags)})\\n" + "a line of what was found\\n" * limit


def bare(**settings) -> MCPServer:
    server = MCPServer("bare", log_level="WARNING", **settings)
    server.tool(structured_output=False)(lookup)
    return server


theirs = bare()
ours = tool(lookup)

if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        theirs.run("stdio")
    else:
        theirs.run("streamable-http", port=int(sys.argv[1]), json_response=True, stateless_http=True)
'''

Call = Callable[[int], Awaitable[str]]
"""Makes one call of the n-th concurrent chain; returns the tool's answer."""


def every_limit() -> dict[str, Any]:
    """Return a recipe's `limits:` with all limits set, too high to be reached."""
    return {
        "calls_per_turn": 8,
        "calls": 10**9,
        "calls_per_tool": {"lookup": 10**9},
        "cost": 1e9,
        "cost_per_call": {"lookup": 0.001},
        "tool_seconds": 1e6,
        "calls_per_second": {"lookup": 1e6},
        "seconds_per_call": {"lookup": 30},
        "result_tokens": 1024,
    }


def make_cut() -> Callable[[str, int], str | None]:
    """Return a function that counts and cuts tokens as a chain's renderer does."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from agentfactory.rollout.text.encoding import Encoder

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator([TOOL_FILE], trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    return Encoder(fast, "<|im_end|>", "<|im_start|>user\n<|im_end|>").cut


@asynccontextmanager
async def bare_sdk(target: Any) -> AsyncIterator[Call]:
    """Open the SDK's client; `target` is a server, stdio parameters or an address."""
    from mcp import Client

    async with Client(target) as client:

        async def call(_: int) -> str:
            result = await client.call_tool("lookup", ARGUMENTS)
            text: str = result.content[0].text  # type: ignore[union-attr]
            return text

        yield call


@asynccontextmanager
async def our_side(folder: Path, **fields: Any) -> AsyncIterator[Call]:
    """Open chains of a recipe whose `fields` define where the tool is served."""
    from agentfactory.base.config import ToolsRecipe
    from agentfactory.base.messages import ToolCall
    from agentfactory.tools.calls.limits import ChainLimits, Rates
    from agentfactory.tools.sessions.toolset import open_toolset

    recipe = ToolsRecipe.model_validate({**fields, "limits": every_limit()})
    rates, cut = Rates(recipe.limits.calls_per_second), make_cut()
    async with AsyncExitStack() as stack:
        toolset = await stack.enter_async_context(open_toolset(recipe, folder))
        sessions = [await stack.enter_async_context(toolset.chain(f"c{i}", {})) for i in range(max(CONCURRENCY))]
        limits = [ChainLimits(recipe.limits, rates, cut) for _ in sessions]

        async def call(chain: int) -> str:
            [result] = await limits[chain].run([ToolCall("call_0", "lookup", ARGUMENTS)], sessions[chain].call)
            assert result.error is None, result.content
            assert isinstance(result.content, str)
            return result.content

        yield call


def start_http(command: list[str], folder: Path, port: int) -> subprocess.Popen[bytes]:
    """Start a server and wait until `port` listens."""
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process
        if process.poll() is not None:
            break
        time.sleep(0.1)
    process.terminate()
    raise SystemExit(f"did not start: {command}")


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def sides(transport: str, folder: Path) -> AsyncIterator[dict[str, Call]]:
    """Open all three sides over `transport`."""
    from mcp import StdioServerParameters

    served = [sys.executable, "-m", "agentfactory.tools.serve", "served.py:ours"]
    theirs: Any
    async with AsyncExitStack() as stack:
        if transport == "in_process":
            from agentfactory.base.user_code.loading import load_object

            theirs = load_object("served.py:theirs", folder)
            fields: tuple[dict[str, Any], ...] = (
                {"tools": ["served.py:ours"]},
                {"mcp_servers": {"theirs": {"module": "served.py:theirs"}}},
            )
        elif transport == "stdio":
            theirs = StdioServerParameters(
                command=sys.executable, args=["served.py", "stdio"], cwd=folder, env={"OMP_NUM_THREADS": "1"}
            )
            fields = tuple(
                {"mcp_servers": {"tool": {"command": "python", "args": args}}}
                for args in (served[1:], ["served.py", "stdio"])
            )
        else:
            ports = free_port(), free_port()
            commands = [*served, "--http", str(ports[0])], [sys.executable, "served.py", str(ports[1])]
            for command, port in zip(commands, ports, strict=True):
                stack.callback(end, start_http(command, folder, port))
            urls = [f"http://127.0.0.1:{port}/mcp" for port in ports]
            theirs = urls[1]
            fields = tuple({"mcp_servers": {"tool": {"url": url}}} for url in urls)
        yield {
            "sdk": await stack.enter_async_context(bare_sdk(theirs)),
            "ours": await stack.enter_async_context(our_side(folder, **fields[0])),
            "ours, their server": await stack.enter_async_context(our_side(folder, **fields[1])),
        }


def end(process: subprocess.Popen[bytes]) -> None:
    """End a server that we started."""
    process.terminate()
    process.wait()


def count_seconds() -> float:
    """Return the seconds to count the tokens of a text as long as the results, for a limit that is not much higher."""
    cut, text = make_cut(), "a line of what was found\n" * 9
    assert cut(text, len(text)) is None
    started = time.perf_counter()
    for _ in range(1000):
        cut(text, len(text))
    return (time.perf_counter() - started) / 1000


async def block_seconds(call: Call, calls: int, concurrency: int) -> float:
    """Return the seconds per call of a block of `calls`."""

    async def chain(index: int) -> None:
        for _ in range(calls // concurrency):
            text = await call(index)
            assert text.startswith("treasure"), text

    started = time.perf_counter()
    await asyncio.gather(*(chain(index) for index in range(concurrency)))
    return (time.perf_counter() - started) / (calls // concurrency * concurrency)


async def measure(transport: str, folder: Path, blocks: int, calls: int) -> tuple[float, float]:
    """Print one transport's results; return our maximum of added milliseconds, and the highest ratio to the SDK."""
    added, ratios = [], []
    async with sides(transport, folder) as opened:
        for concurrency in CONCURRENCY:
            found: dict[str, list[float]] = {name: [] for name in opened}
            for block in range(blocks + 1):
                turns = list(opened.items())
                for name, call in turns[block % len(turns) :] + turns[: block % len(turns)]:
                    seconds = await block_seconds(call, calls, concurrency)
                    if block:  # the first round warms up
                        found[name].append(seconds)
            bare = found.pop("sdk")
            print(
                f"{transport}, {concurrency} at a time: sdk {1e3 * statistics.median(bare):.3f} ms a call", flush=True
            )
            for name, taken in found.items():
                added.append(1e3 * statistics.median(a - b for a, b in zip(taken, bare, strict=True)))
                ratios.append(statistics.median(a / b for a, b in zip(taken, bare, strict=True)))
                print(f"  {name} {1e3 * statistics.median(taken):.3f} ms, {added[-1]:+.3f} ms, {ratios[-1]:.2f} x sdk")
    return max(added), max(ratios)


def main() -> None:
    """Run the comparison and print its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="21 blocks in place of 90")
    options = parser.parse_args()
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "served.py").write_text(TOOL_FILE)
        for transport in TRANSPORTS:
            blocks = 21 if options.quick else 90
            calls = 160 if transport == "in_process" else 64
            figures[transport] = asyncio.run(measure(transport, Path(folder), blocks, calls))
    print(f"to count the tokens of a result whose length alone does not decide: {1e3 * count_seconds():.3f} ms")
    result = {
        "in_process_added_ms": figures["in_process"][0],
        "stdio_vs_sdk": figures["stdio"][1],
        "http_vs_sdk": figures["http"][1],
    }
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))


if __name__ == "__main__":
    main()
