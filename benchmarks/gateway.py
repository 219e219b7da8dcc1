"""The gateway's cost per request, in CPU and in latency.

CPU: chains of our own loop, compared with the same chains through the gateway, all concurrent, on a scripted server in
this process that answers immediately. The cost of a request is the CPU time of a turn through the gateway minus that of
a turn of our own loop. Each chain's answers contain its number: the benchmark fails if a chain gets another's answer,
or if a request with an expired key, or without one, succeeds.

Latency: the gateway, the clients that play the chains, and the server are three processes, and all chains are open. A
request's latency is its time at the client minus the time that the server held it.

- alone: one request at a time, so that none waits for another: the gateway's own time, besides that of HTTP. Here `cpu`
  is the CPU time of the gateway's process per request, which does not depend on other load on the machine.
- N a second: the server holds each for half of a turn's time, and the client waits as long on average before the next.
  Requests wait for each other, here and in the other processes; `lag` is the delay of a sleep of 5 ms in the gateway's
  event loop, `busy` the share of a core that its process uses, and `starved` the share of the time in which it waits
  for a core used by others.
- direct: the same requests from the same client to the server, without a gateway.

The clients are bare aiohttp: SDKs take several milliseconds of their own.

    taskset -c 2,3 python benchmarks/gateway.py [--quick]
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp

from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.config import OutsideOptions, RolloutRecipe
from agentfactory.rollout.gateway.client_agents import FunctionAgent
from agentfactory.rollout.gateway.gateway_runner import GatewayRunner
from agentfactory.rollout.gateway.outside_agent import OutsideAgent
from agentfactory.rollout.inference.inference_client import InferenceClient
from agentfactory.rollout.rewards import Rewards
from agentfactory.rollout.text.load_renderer import make_renderer
from agentfactory.rollout.workers.rollout_worker import collect_rarely, event_loop
from agentfactory.tools.sessions.toolset import open_toolset

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.chat_tokenizers import make_tokenizer, trl_template
from tests.scripted_chains import NOTES, scripted_chains
from tests.scripted_server import serve_script

TURNS = 5
TEMPLATE = trl_template("qwen2_5")
Held = dict[tuple[int, int], float]
"""Chain and turn -> seconds."""
KEYS: list[tuple[str, str]] = []
"""Addresses and keys of the chains."""


def turn_of(text: str) -> tuple[int, int]:
    """Return the chain and the turn of a prompt."""
    return int(text.rpartition("chain number ")[2].partition(";")[0]), text.count("<tool_response>")


def make_script() -> Callable[[list[int]], list[int]]:
    """Return a script that answers each chain with calls that repeat the number in its question, and then with text."""
    tokenizer = make_tokenizer(TEMPLATE)

    def script(ids: list[int]) -> list[int]:
        number, turn = turn_of(tokenizer.decode(ids))
        call = f'<tool_call>\n{{"name": "note", "arguments": {{"text": "{number}"}}}}\n</tool_call>'
        return tokenizer.encode(
            (call if turn < TURNS - 1 else f"done {number}") + "<|im_end|>", add_special_tokens=False
        )

    return script


async def play(agent: FunctionAgent | None, count: int) -> float:
    """Run the chains; return the CPU milliseconds per turn, including the server's."""
    limits = {"concurrency": count, "timeout_seconds": 900}
    with tempfile.TemporaryDirectory() as folder:
        async with scripted_chains(Path(folder), [], agent=agent, rollout=limits) as chains:
            chains.server.script = make_script()
            runner = chains.runner
            start = time.process_time()
            played = await asyncio.gather(
                *(
                    runner.run(f"c{i}", {"question": f"chain number {i};"}, Sampling("p", 1.0, f"{i}"))
                    for i in range(count)
                )
            )
            spent = time.process_time() - start
            assert all(len(chain.rows) == 1 and chain.turns == TURNS for chain in played)
            assert all(chain.messages[-1]["content"] == f"done {i}" for i, chain in enumerate(played))
            if agent is not None:
                await check_keys()
            return 1000 * spent / (count * TURNS)


async def check_keys() -> None:
    """Assert that requests with the key of an ended chain, and without a key, are answered with 401."""
    assert len({key for _, key in KEYS}) == len(KEYS)
    body = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
    async with aiohttp.ClientSession() as session:
        for url, key in (*KEYS[:20], (KEYS[0][0], "none")):
            headers = {"Authorization": f"Bearer {key}"}
            async with session.post(f"{url}/chat/completions", json=body, headers=headers) as response:
                assert response.status == 401


async def cpu(count: int) -> dict[str, float]:
    """Return the CPU milliseconds of a turn, for `count` concurrent chains."""
    KEYS.clear()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def run(endpoint: Any, task: dict[str, Any], tools: Any) -> None:
            number = task["question"].split()[-1].rstrip(";")
            messages: list[Any] = [{"role": "user", "content": task["question"]}]
            headers = {"Authorization": f"Bearer {endpoint.key}"}
            KEYS.append((endpoint.url, endpoint.key))
            while True:
                body = {"model": "m", "messages": messages, "tools": tools.definitions}
                async with session.post(f"{endpoint.url}/chat/completions", json=body, headers=headers) as response:
                    message = (await response.json())["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    assert message["content"] == f"done {number}"
                    return
                for call in message["tool_calls"]:
                    assert json.loads(call["function"]["arguments"]) == {"text": number}
                    content = await tools.call(call["function"]["name"], call["function"]["arguments"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})

        own = await play(None, count)
        through = await play(FunctionAgent("gateway.py:run", run), count)
    return {"own_ms_per_turn": own, "gateway_ms_per_turn": through, "added_ms_per_turn": through - own}


@asynccontextmanager
async def process(target: Callable[..., Any], *arguments: Any) -> AsyncIterator[Connection]:
    """Run `target(pipe, *arguments)` in a separate process, and yield the other end of the pipe."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    child.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        child.terminate()
        child.join()


def serve(pipe: Connection, delay: float) -> None:
    """Run the server. Send its address through the pipe, and answer each message with the seconds for which turns were
    held since the last one."""

    async def run() -> None:
        gc.disable()  # its pauses of 150 ms would distort the figures
        tokenizer = make_tokenizer(TEMPLATE)
        async with serve_script(make_script(), delay) as server:
            pipe.send(server.url)
            while True:
                await asyncio.to_thread(pipe.recv)
                prompts = [turn_of(tokenizer.decode(request["token_ids"])) for request in server.requests]
                pipe.send(dict(zip(prompts, server.held, strict=True)))
                for past in (server.requests, server.responses, server.held):
                    past.clear()

    asyncio.run(run())


def play_elsewhere(pipe: Connection, url: str, count: int, period: float, through: bool) -> None:
    """Run the clients that play `count` chains, through the gateway at `url`, or on the server there. A turn is
    requested after half of `period` on average; 0: one request at a time. Send through the pipe the seconds of each
    request and, if one at a time, the CPU seconds of the parent process for it."""

    async def run() -> tuple[Held, Held]:
        gc.disable()
        seconds: Held = {}
        cpu_seconds: Held = {}
        gateway = (~os.getppid() << 3) | 2  # the clock of its CPU time
        tokenizer = make_tokenizer(TEMPLATE)
        alone = asyncio.Lock()
        opened = asyncio.Barrier(count)

        async def post(session: aiohttp.ClientSession, path: str, key: str, body: Any) -> Any:
            headers = {"Authorization": f"Bearer {key}"}
            async with session.post(f"{url}{path}", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
                return await response.json()

        async def timed(turn: tuple[int, int], *request: Any) -> Any:
            if period:
                await asyncio.sleep(random.uniform(0, period))
                start = time.perf_counter()
                answer = await post(*request)
            else:
                async with alone:
                    start, cpu_start = time.perf_counter(), time.clock_gettime(gateway)
                    answer = await post(*request)
                    cpu_seconds[turn] = time.clock_gettime(gateway) - cpu_start
            seconds[turn] = time.perf_counter() - start
            return answer

        async def chain(session: aiohttp.ClientSession) -> None:
            token = os.environ["AGENTFACTORY_TOKEN"]
            taken = await post(session, "/tasks", token, {})
            messages: list[Any] = [{"role": "user", "content": taken["task"]["question"]}]
            number, _ = turn_of(messages[0]["content"])
            await opened.wait()
            for turn in range(TURNS):
                body = {"model": "m", "messages": messages, "tools": taken["tools"]}
                answer = await timed((number, turn), session, "/v1/chat/completions", taken["key"], body)
                message = answer["choices"][0]["message"]
                messages.append(message)
                for call in message.get("tool_calls") or []:
                    assert json.loads(call["function"]["arguments"]) == {"text": str(number)}
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": "noted"})
            assert messages[-1]["content"] == f"done {number}"
            await post(session, "/reward", taken["key"], {"reward": 1.0})

        async def direct(session: aiohttp.ClientSession, number: int) -> None:
            await opened.wait()
            for turn in range(TURNS):
                text = "a tool call of the assistant\n" * 20 + "<tool_response>" * turn + f"chain number {number};"
                sampling = {"max_tokens": 512, "logprobs": 0}
                body = {"model": "m", "token_ids": tokenizer.encode(text), "sampling_params": sampling}
                await timed((number, turn), session, "/inference/v1/generate", "", body)

        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(None)) as session:
            await asyncio.gather(*(chain(session) if through else direct(session, i) for i in range(count)))
        return seconds, cpu_seconds

    pipe.send(asyncio.run(run()))


def starved() -> float:
    """Return the seconds for which this process's main thread has waited for a core."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


@asynccontextmanager
async def gateway_of(url: str, count: int) -> AsyncIterator[GatewayRunner]:
    """Open a runner on the server at `url`, whose chains are played by clients in another process."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "notes.py").write_text(NOTES)
        limits = {"concurrency": count, "timeout_seconds": 900}
        sections = {"model": {"path": "x"}, "tools": ["notes.py:note"], "rollout": limits}
        recipe = RolloutRecipe.model_validate(sections)
        renderer = make_renderer(make_tokenizer(TEMPLATE), parser=recipe.rollout.parser)
        agent = OutsideAgent(OutsideOptions(port=0))
        async with (
            InferenceClient(url) as client,
            open_toolset(recipe, Path(folder)) as toolset,
            Rewards([], Path(folder)) as rewards,
            agent.gateway() as gateway,
        ):
            yield GatewayRunner(recipe, renderer, client, toolset, rewards, agent, gateway)


async def latency(count: int, rate: float) -> dict[str, float]:
    """Return the figures for `count` open chains, at `rate` requests a second; 0: one at a time."""
    period = count / rate if rate else 0.0
    lags: list[float] = []
    figures: dict[str, float] = {}

    async def watch() -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(0.005)
            lags.append(time.perf_counter() - start - 0.005)

    async with process(serve, period / 2) as server:
        url = await asyncio.to_thread(server.recv)

        async def added(at: str, through: bool) -> tuple[list[float], list[float]]:
            async with process(play_elsewhere, at, count, period, through) as programs:
                seconds, cpu_seconds = await asyncio.to_thread(programs.recv)
            server.send("held")
            held: Held = await asyncio.to_thread(server.recv)
            assert len(seconds) == count * TURNS
            latencies = sorted(1000 * (seconds[turn] - held[turn]) for turn in seconds)
            return latencies, sorted(1000 * spent for spent in cpu_seconds.values())

        async with gateway_of(url, count) as runner:
            collect_rarely()
            tasks = [{"question": f"chain number {i};"} for i in range(count)]
            chains = asyncio.gather(
                *(runner.run(f"c{i}", task, Sampling("p", 1.0, f"{i}")) for i, task in enumerate(tasks))
            )
            watching = asyncio.create_task(watch())
            start, cpu_start, starved_start = time.perf_counter(), time.process_time(), starved()
            through, spent = await added(runner.gateway.url, True)
            wall = time.perf_counter() - start
            figures |= {"busy": (time.process_time() - cpu_start) / wall, "starved": (starved() - starved_start) / wall}
            watching.cancel()
            assert all(len(chain.rows) == 1 and chain.turns == TURNS for chain in await chains)
        direct, _ = await added(url, False)
    lags.sort()
    for share in (50, 99):
        at, lag = int(len(through) * share / 100), lags[int(len(lags) * share / 100)]
        figures |= {
            f"p{share}_ms": through[at],
            f"direct_p{share}_ms": direct[at],
            f"lag_p{share}_ms": 1000 * lag,
            **({f"cpu_p{share}_ms": spent[at]} if spent else {}),
        }
    return figures


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="32 chains")
    quick = parser.parse_args().quick
    os.environ["AGENTFACTORY_TOKEN"] = "of the benchmark"
    figures: dict[str, float] = {}

    def measure(name: str, measured: Any) -> None:
        with asyncio.Runner(loop_factory=event_loop) as loop:
            found = loop.run(measured)
        print(f"{name}: " + ", ".join(f"{figure} {value:.2f}" for figure, value in found.items()), flush=True)
        found.pop("starved", None)  # 0 on a quiet machine
        figures.update({f"{name}/{figure}": round(value, 3) for figure, value in found.items()})

    asyncio.run(cpu(8))  # imports, and caches of the chat template
    for count in [32] if quick else [1, 1000]:
        measure(f"cpu_{count}", cpu(count))
    count = 32 if quick else 1000
    for rate in [0, 20] if quick else [0, 100, 200]:
        measure(f"{count}_{rate or 'alone'}", latency(count, rate))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
