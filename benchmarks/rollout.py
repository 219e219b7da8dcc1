"""Multi-turn rollouts with slow tools: ours, TRL 1.16's GRPOTrainer, and TRL's experimental async rollout loop.

All three talk to the same stub server in a separate process. It answers a turn after 20 ms, with the same tokens for
the same chain, and each chain ends with a plain answer after its tool turns. The sides share the tokenizer, the chat
template (Qwen2.5's), the tool (an async sleep) and the latencies. Each side runs in its own process, warmed up by a
group of chains; the fastest of its repetitions counts, because the machine disturbed it least.

Workloads: 16 chains x 2 tool turns x 0.2 s, and 64 x 3 with log-normal latencies (median 0.2 s, sigma 0.5), of which
1 in 100 takes 20 times as long. The ideal is the time of the slowest chain: its latencies and its turns on the server.

- ours: `ChainRunner.run` of every chain, with the tool through a session, rewards and trajectories.
- TRL's GRPOTrainer: `_generate` with its tool loop. It generates one batch per turn; here, the batch's requests go to
  the stub all at once, as in its vLLM server mode, and no model computes anything.
- TRL's async loop: the loop of its worker process, with groups of 8, from its start to the last scored sample. The stub
  never answers the additional chains that the loop starts, so that they cost it nothing.

CPU per turn is our process's own time, for 16 to 1,024 chains with tools that take no time. The last line is JSON.
`speedup_vs_trl` is for the first workload: in the second, the slowest chain alone takes a tenth of the time of all
calls in sequence, so no schedule can be much more than 10 times faster. `wall_vs_trl_async` is for the worse workload.

    taskset -c 2,3 python benchmarks/rollout.py [--quick]
"""

import argparse
import asyncio
import json
import math
import os
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SERVER_SECONDS, GROUP = 0.02, 8
TRL_TEMPLATE = "qwen2_5.jinja"
WORKLOADS = {"fixed": (16, 2), "heavy": (64, 3), "cpu16": (16, 8), "cpu64": (64, 8), "cpu256": (256, 8)}
WORKLOADS |= {"cpu1024": (1024, 4)}
"""Name -> chains, tool turns."""


def latencies(workload: str) -> list[list[float]]:
    """Return the seconds of each tool call, per chain and turn."""
    chains, turns = WORKLOADS[workload]
    if workload == "fixed":
        return [[0.2] * turns for _ in range(chains)]
    if workload != "heavy":
        return [[0.0] * turns for _ in range(chains)]
    draw = random.Random(7)
    drawn = [0.2 * math.exp(draw.gauss(0, 0.5)) for _ in range(chains * turns)]
    for index in draw.sample(range(len(drawn)), round(len(drawn) / 100)):
        drawn[index] *= 20
    return [drawn[i * turns : (i + 1) * turns] for i in range(chains)]


def ideal(workload: str) -> float:
    """Return the seconds of the slowest chain if only tools and server took time."""
    return max(sum(row) + SERVER_SECONDS * (len(row) + 1) for row in latencies(workload))


def make_tokenizer() -> Any:
    """Return a byte-level BPE tokenizer with Qwen's control tokens and TRL's copy of the Qwen2.5 template."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(['{"name": "wait", "arguments": {"seconds": 0.2, "chain": "run 1.2"}}'] * 9, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"])
    templates = Path(transformers.__file__).parent.parent / "trl" / "chat_templates"
    fast.chat_template = (templates / TRL_TEMPLATE).read_text(encoding="utf-8")
    return fast


def question(workload: str, run: str, group: int) -> str:
    """Return the question for the chains of a group; the stub parses it."""
    return f"workload {workload} run {run} group {group} ?"


async def wait(seconds: float, chain: str) -> str:
    """Wait for a while.

    Args:
        seconds: how long
        chain: who waits
    """
    await asyncio.sleep(seconds)
    return f"{chain} waited"


# ---- the stub server


async def serve_stub() -> None:
    """Serve the completions of all workloads; the stub recognises a chain by the text of its prompt."""
    from aiohttp import web

    tokenizer = make_tokenizer()
    tables = {name: latencies(name) for name in WORKLOADS}
    members: Counter[str] = Counter()
    asked = asyncio.Event()

    def completion(prompt: list[int]) -> list[int] | None:
        text = tokenizer.decode(prompt)
        turn = text.count("<|im_start|>assistant") - 1
        asks = text[text.rindex("workload ") : text.index(" ?", text.rindex("workload "))]
        _, workload, _, _, _, group = asks.split()
        if workload == "parked":
            return None
        if turn == 0:
            chain = int(group) * GROUP + members[asks]
            members[asks] += 1
        else:
            chain = int(text.rsplit(" waited", 1)[0].rsplit("chain-", 1)[1])
        seconds = tables[workload][chain]
        if turn == len(seconds):
            return list(tokenizer.encode("done<|im_end|>"))
        call = {"name": "wait", "arguments": {"seconds": seconds[turn], "chain": f"chain-{chain}"}}
        return list(tokenizer.encode(f"<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>"))

    async def sampled(prompt: list[int]) -> list[int]:
        ids = completion(prompt)
        if ids is None:
            await asyncio.sleep(3600)
        await asyncio.sleep(SERVER_SECONDS)
        assert ids is not None
        return ids

    async def generate(request: web.Request) -> web.Response:
        ids = await sampled((await request.json())["token_ids"])
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "token_ids": ids,
            "logprobs": {"content": [{"token_id": i, "logprob": -1.0} for i in ids]},
            "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
        }
        return web.json_response({"request_id": "r", "choices": [choice]})

    async def complete(request: web.Request) -> web.Response:
        ids = await sampled((await request.json())["prompt"])
        return web.json_response({"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": [-1.0] * len(ids)}}]})

    app = web.Application(client_max_size=1 << 26)
    app.add_routes([web.post("/inference/v1/generate", generate), web.post("/v1/completions", complete)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asked.wait()


# ---- the three sides; each returns the wall and CPU seconds of `workload`


def run_ours(url: str, workload: str, run: str) -> tuple[float, float]:
    """Run ChainRunner as the rollout worker does."""
    from agentfactory.rollout.chains.chain_runner import ChainRunner
    from agentfactory.rollout.chains.sampling import Sampling
    from agentfactory.rollout.config import RolloutRecipe
    from agentfactory.rollout.inference.inference_client import InferenceClient
    from agentfactory.rollout.rewards import Rewards
    from agentfactory.rollout.text.load_renderer import make_renderer
    from agentfactory.tools.sessions.toolset import open_toolset

    async def measure() -> tuple[float, float]:
        fields = {"max_turns": 64, "max_tokens": 128, "max_total_tokens": 8192, "concurrency": 2048}
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "waiting.py").write_text(_TOOL_FILE)
            recipe = RolloutRecipe.model_validate(
                {
                    "model": {"path": "x"},
                    "tools": ["waiting.py:wait"],
                    "rewards": ["waiting.py:none"],
                    "rollout": fields,
                }
            )
            rewards = Rewards(recipe.rewards, Path(folder))
            async with InferenceClient(url) as client, open_toolset(recipe, Path(folder)) as toolset:
                runner = ChainRunner(recipe, make_renderer(make_tokenizer()), client, toolset, rewards)

                async def play(workload: str, run: str) -> int:
                    chains = WORKLOADS[workload][0] if not run.startswith("warm") else GROUP
                    trajectories = await asyncio.gather(
                        *(
                            runner.run(
                                f"{run}.{i}",
                                {"question": question(workload, run, i // GROUP)},
                                Sampling("policy", 1.0, seed=f"{run}.{i}"),
                            )
                            for i in range(chains)
                        )
                    )
                    assert not any(t.outcome.failed for t in trajectories), trajectories[0].error
                    return sum(t.turns for t in trajectories)

                await play("fixed", f"warm-{run}")
                started, cpu = time.perf_counter(), time.process_time()
                turns = await play(workload, run)
                chains, tool_turns = WORKLOADS[workload]
                assert turns == chains * (tool_turns + 1)
                return time.perf_counter() - started, time.process_time() - cpu

    return asyncio.run(measure())


_TOOL_FILE = '''
import asyncio
from agentfactory import reward, tool


@tool
async def wait(seconds: float, chain: str) -> str:
    """Wait for a while.

    Args:
        seconds: how long
        chain: who waits
    """
    await asyncio.sleep(seconds)
    return f"{chain} waited"


@reward
def none() -> float:
    return 0.0
'''


def no_reward(completions: list[Any], **_: Any) -> list[float]:
    """Return zeros: TRL needs a reward function."""
    return [0.0] * len(completions)


def run_trl(url: str, workload: str, run: str) -> tuple[float, float]:
    """Run GRPOTrainer's own generation with tools; only the sampling of a turn goes to the stub."""
    import aiohttp
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = make_tokenizer()

    class Stubbed(GRPOTrainer):  # type: ignore[misc]
        def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any, **__: Any) -> Any:
            async def one(session: aiohttp.ClientSession, ids: list[int]) -> Any:
                async with session.post(f"{url}/v1/completions", json={"prompt": ids}) as response:
                    return (await response.json())["choices"][0]

            async def ask() -> list[Any]:
                async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                    return await asyncio.gather(*(one(session, ids) for ids in prompt_ids))

            choices = asyncio.run(ask())
            return [c["token_ids"] for c in choices], [c["logprobs"]["token_logprobs"] for c in choices]

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=8192,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Stubbed(
            model=Qwen3ForCausalLM(config),
            reward_funcs=[no_reward],
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                report_to=[],
                max_completion_length=4096,
                num_generations=GROUP,
                per_device_train_batch_size=GROUP,
            ),
            train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "x"}]}] * GROUP),
            processing_class=tokenizer,
            tools=[wait],
        )

        def play(workload: str, run: str) -> None:
            chains = WORKLOADS[workload][0] if not run.startswith("warm") else GROUP
            prompts = [[{"role": "user", "content": question(workload, run, i // GROUP)}] for i in range(chains)]
            trainer._sync_tool_dicts = [{} for _ in prompts]
            trainer._async_tool_dicts = [{"wait": wait} for _ in prompts]
            _, _, _, completions, *_ = trainer._generate(prompts)
            assert all(messages[-1].get("content") == "done" for messages in completions), completions[0]

        play("fixed", f"warm-{run}")
        started, cpu = time.perf_counter(), time.process_time()
        play(workload, run)
        return time.perf_counter() - started, time.process_time() - cpu


def run_trl_async(url: str, workload: str, run: str) -> tuple[float, float]:
    """Run the loop that TRL's AsyncRolloutWorker runs in its child process."""
    from accelerate.state import PartialState
    from datasets import Dataset
    from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop

    PartialState()

    def play(workload: str, run: str) -> tuple[float, float]:
        chains = WORKLOADS[workload][0] if not run.startswith("warm") else GROUP
        rows = [{"prompt": [{"role": "user", "content": question(workload, run, g)}]} for g in range(chains // GROUP)]
        rows += [{"prompt": [{"role": "user", "content": question("parked", run, 0)}]}] * chains
        samples: queue.Queue[Any] = queue.Queue()
        loop = _AsyncRolloutLoop(
            model_name="policy",
            dataset=Dataset.from_list(rows),
            reward_funcs=[no_reward],
            processing_class=make_tokenizer(),
            eos_token_ids=[1],
            rollout_buffer=samples,
            model_version_value=SimpleNamespace(value=0),
            heartbeat_value=SimpleNamespace(value=0.0),
            failed_event=threading.Event(),
            exception_info_queue=queue.Queue(),
            metrics_queue=queue.Queue(),
            tools=[wait],
            num_generations=GROUP,
            max_inflight_tasks=chains,
            vllm_server_url=url,
            max_tokens=128,
            request_timeout=600,
        )
        thread = threading.Thread(target=loop.run, daemon=True)
        started, cpu = time.perf_counter(), time.process_time()
        thread.start()
        taken = [samples.get(timeout=300) for _ in range(chains)]
        wall, cpu = time.perf_counter() - started, time.process_time() - cpu
        assert all(sample.completion[-1]["content"] == "done" for sample in taken), taken[0].completion
        loop._loop.call_soon_threadsafe(loop._stop_event.set)
        return wall, cpu

    play("fixed", f"warm-{run}")
    return play(workload, run)


SIDES = {"ours": run_ours, "trl": run_trl, "trl-async": run_trl_async}


def measure(side: str, url: str, workload: str, run: str) -> tuple[float, float]:
    """Run one side in its own process, and return its wall and CPU seconds."""
    command = [sys.executable, __file__, "--side", side, "--url", url, "--workload", workload, "--run", run]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{side} on {workload} failed:\n{done.stderr[-3000:]}")
    wall, cpu = json.loads(done.stdout.splitlines()[-1])
    return wall, cpu


def compare(repetitions: int, quick: bool) -> None:
    """Run everything, and print the summary."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    stub = subprocess.Popen([sys.executable, __file__, "--stub"], stdout=subprocess.PIPE, text=True, env=environment)
    assert stub.stdout is not None
    walls: dict[tuple[str, str], float] = {}
    try:
        url = stub.stdout.readline().strip()
        for workload in ("fixed", "heavy"):
            print(f"{workload}: {WORKLOADS[workload]} chains, turns; the ideal is {ideal(workload):.2f} s", flush=True)
            found: dict[str, list[float]] = {side: [] for side in SIDES}
            # the sides alternate; the synchronous loop takes minutes and varies little, so it runs once, and no ratio
            # uses its heavy tail
            synchronous = 0 if quick and workload == "heavy" else 1
            for repetition in range(repetitions):
                for side in SIDES:
                    if side != "trl" or repetition < synchronous:
                        found[side].append(measure(side, url, workload, f"{side}-{workload}-{repetition}")[0])
            for side, seconds in found.items():
                if not seconds:
                    continue
                walls[side, workload] = min(seconds)
                times = walls[side, workload] / ideal(workload)
                ours = walls[side, workload] / walls["ours", workload]
                print(f"  {side:9} {walls[side, workload]:7.2f} s: {times:.2f} x ideal, {ours:.2f} x ours", flush=True)
        for chains in (16, 64, 256) if quick else (16, 64, 256, 1024):
            workload = f"cpu{chains}"
            turns = chains * (WORKLOADS[workload][1] + 1)
            cpu = min(measure("ours", url, workload, f"{workload}-{repetition}")[1] for repetition in range(2))
            print(f"{chains:5} chains: {1e3 * cpu / turns:.2f} ms of our CPU per turn", flush=True)
    finally:
        stub.terminate()
        stub.wait()
    ratios = {
        "fixed_vs_ideal": walls["ours", "fixed"] / ideal("fixed"),
        "heavy_tail_vs_ideal": walls["ours", "heavy"] / ideal("heavy"),
        "speedup_vs_trl": walls["trl", "fixed"] / walls["ours", "fixed"],
        "wall_vs_trl_async": max(walls["ours", w] / walls["trl-async", w] for w in ("fixed", "heavy")),
    }
    print(json.dumps({name: round(value, 3) for name, value in ratios.items()}))


def main() -> None:
    """Run the comparison; the hidden options are for the processes that it starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 repetitions in place of 5; no 1,024 chains")
    parser.add_argument("--stub", action="store_true", help=argparse.SUPPRESS)
    for name in ("--side", "--url", "--workload", "--run"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stub:
        asyncio.run(serve_stub())
    elif arguments.side:
        print(json.dumps(SIDES[arguments.side](arguments.url, arguments.workload, arguments.run)), flush=True)
        # threads of TRL may still wait for requests that are never answered
        os._exit(0)
    else:
        compare(2 if arguments.quick else 5, arguments.quick)


if __name__ == "__main__":
    main()
