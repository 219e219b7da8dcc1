"""What the gateway adds to a request: chains of our own loop against the same chains through the gateway.

All chains run at once, 5 turns each, on a scripted server in this process that answers at once, so that the figures are
the worker's own time. The client behind the gateway is bare aiohttp: SDKs take several milliseconds of their own. What
a request adds is the CPU time of a turn through the gateway less that of a turn of our own loop. The latency of a
request (p50, p99) is that under full load, where every request waits for all others.

Each chain's answers hold its number: the benchmark fails if one gets an answer of another, or if a key that has ended,
or none, is answered.

    taskset -c 2,3 python benchmarks/gateway.py [--quick]
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from agentfactory.rollout.gateway.agents import FunctionAgent
from agentfactory.rollout.sampling import Sampling

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.scripted_chains import Scripted, scripted_chains

TURNS = 5
KEYS: list[tuple[str, str]] = []
"""Addresses and keys of the chains."""


def script_of(chains: Scripted) -> None:
    """Make the server answer each chain with calls that repeat the number in its question, and then with words."""
    tokenizer = chains.tokenizer

    def script(ids: list[int]) -> list[int]:
        text = tokenizer.decode(ids)
        number = text.rpartition("chain number ")[2].partition(";")[0]
        call = f'<tool_call>\n{{"name": "note", "arguments": {{"text": "{number}"}}}}\n</tool_call>'
        said = f"done {number}" if text.count("<tool_response>") >= TURNS - 1 else call
        return tokenizer.encode(said + "<|im_end|>", add_special_tokens=False)

    chains.server.script = script


async def play(agent: FunctionAgent | None, count: int) -> float:
    """Run the chains; return the milliseconds of CPU per turn, the server's own included."""
    limits = {"concurrency": count, "timeout_seconds": 900}
    with tempfile.TemporaryDirectory() as folder:
        async with scripted_chains(Path(folder), [], agent=agent, rollout=limits) as chains:
            script_of(chains)
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
    """Assert that the keys of chains that have ended, and no key, are answered with 401."""
    assert len({key for _, key in KEYS}) == len(KEYS)
    body = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
    async with aiohttp.ClientSession() as session:
        for url, key in (*KEYS[:20], (KEYS[0][0], "none")):
            headers = {"Authorization": f"Bearer {key}"}
            async with session.post(f"{url}/chat/completions", json=body, headers=headers) as response:
                assert response.status == 401


async def measure(count: int) -> dict[str, float]:
    """Return the figures for `count` chains at once."""
    seconds: list[float] = []
    KEYS.clear()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def run(endpoint: Any, task: dict[str, Any], tools: Any) -> None:
            number = task["question"].split()[-1].rstrip(";")
            messages: list[Any] = [{"role": "user", "content": task["question"]}]
            headers = {"Authorization": f"Bearer {endpoint.key}"}
            KEYS.append((endpoint.url, endpoint.key))
            while True:
                start = time.perf_counter()
                body = {"model": "m", "messages": messages, "tools": tools.definitions}
                async with session.post(f"{endpoint.url}/chat/completions", json=body, headers=headers) as response:
                    message = (await response.json())["choices"][0]["message"]
                seconds.append(time.perf_counter() - start)
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
    seconds.sort()
    return {
        "own_ms_per_turn": own,
        "gateway_ms_per_turn": through,
        "added_ms_per_request": through - own,
        "p50_ms": 1000 * seconds[len(seconds) // 2],
        "p99_ms": 1000 * seconds[int(len(seconds) * 0.99)],
        "gateway_vs_own": through / own,
    }


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="32 chains")
    counts = [32] if parser.parse_args().quick else [1, 1000]
    figures: dict[str, float] = {}
    asyncio.run(measure(8))  # imports, and caches of the chat template
    for count in counts:
        found = asyncio.run(measure(count))
        print(f"{count} chains: " + ", ".join(f"{name} {value:.2f}" for name, value in found.items()), flush=True)
        figures |= {f"{name}_{count}": round(value, 3) for name, value in found.items()}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
