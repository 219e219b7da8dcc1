"""A real model on this machine, in float32: decoding, one LoRA update, a whole GRPO step, and the server's memory.

MODEL is the folder of a causal language model with its tokenizer. The goals are for Qwen2.5-0.5B on two cores. Work
alternates between the two sides of a comparison; every process has one thread per available core. The last line is
JSON:

- `decode_8_vs_generate` (goal: 2.0), `decode_32_vs_generate`: tokens per second of the embedded engine, over HTTP,
  divided by those of one batched `generate` of transformers: 8 and 32 prompts of 128 tokens, 128 sampled tokens each.
  Medians.
- `decode_8_vs_roofline`, `decode_32_vs_roofline`: the seconds that measured products of the model's weights take for
  these prompts and tokens (`processes/devices.py`; 8 or 32 rows a step for decoding), divided by those of the embedded
  engine.
- `prefill_vs_roofline` (goal: 0.5): the same for 32 prompts of 128 tokens alone.
- `int8_8_vs_generate`, `int8_32_vs_generate`: with `server.quantization: int8`.
- `decode_8_vs_vllm_cpu` (goal: 1.0), `decode_32_vs_vllm_cpu`: the same, divided by vLLM's. Only with `--vllm`, the
  Python of an environment with vLLM for CPUs.
- `update_vs_trl` (goal: 5): CPU seconds of TRL's GRPOTrainer divided by ours for one update of a LoRA adapter of rank
  16, with its optimiser step: 4 groups of 8 chains. A prompt has 150 to 330 tokens; a chain has 1 to 3 turns of 24 to
  64 sampled tokens, with 16 to 48 tokens of tool results between them. TRL's micro-batches have 4 chains; ours may have
  as many tokens. Both continue the same adapter, and loss and gradient norm must agree. See update.py.
- `update_vs_roofline` (goal: 0.5): the processor seconds of the products of that update, a forward and a backward pass
  over its prompts, once per group, and chains, divided by ours.
- `update_memory_vs_trl` (goal: 0.35): our peak memory of that update divided by TRL's, each minus the process's memory
  before it.
- `server_memory` (goal: 1.0): the embedded server's peak memory after all requests, divided by 1.15 times the weights +
  the cache + 0.6 GB. Mapped files do not count.
- `sync_share_of_step` (goal: 0.05): the share of a GRPO step of 4 groups of 8 chains that is neither rollouts nor the
  update: the sync of the adapter, its proof, and the trainer's part of that.

    python benchmarks/real.py MODEL [--quick] [--vllm PYTHON]
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil
from update import check_same, trl_width

GROUPS, GROUP = 4, 8
CHAINS, PROMPT, SAMPLED = (8, 32), 128, 128
RANK = 16
MICRO = 4
"""Chains in a micro-batch of TRL."""
REWARD = '''"""Anything that tells chains apart."""

import zlib

from agentfactory import reward


@reward
def checksum(prediction: str) -> float:
    return zlib.crc32(prediction.encode()) % 100 / 100
'''


# ---- decoding


class Peak:
    """The peak of a process's memory without mapped files, sampled every 10 ms."""

    def __init__(self, pid: int) -> None:
        self.bytes = 0
        self._pid = pid
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def stop(self) -> int:
        """End the sampling, and return the peak."""
        self._ended.set()
        return self.bytes

    def _watch(self) -> None:
        status = Path(f"/proc/{self._pid}/status")
        while not self._ended.wait(0.01) and psutil.pid_exists(self._pid):
            for line in status.read_text(encoding="ascii").splitlines():
                if line.startswith("RssAnon:"):
                    self.bytes = max(self.bytes, 1024 * int(line.split()[1]))


def pass_seconds(model: str, rows: int, head: bool = True) -> float:
    """Return the seconds of the products of one forward pass, as measured on this machine for single layers."""
    from agentfactory.base.processes.devices import ROWS, measured
    from agentfactory.launching.time_plan import size_of

    size = size_of(Path(model))
    few, many = measured().of("float32", size.width)
    return (size.body + head * size.head) * (few + (many - few) * (rows - ROWS[0]) / (ROWS[1] - ROWS[0]))


def server_recipe(model: str, engine: str, vllm: str | None = None) -> dict[str, Any]:
    """Return the recipe of a server for the decoding workload."""
    quantization = "int8" if engine == "int8" else None
    engine = "embedded" if quantization else engine
    server: dict[str, Any] = {
        "engine": engine,
        "quantization": quantization,
        "max_model_len": PROMPT + SAMPLED,
        "max_num_seqs": CHAINS[-1],
    }
    if vllm:
        server["options"] = {"python": vllm}
    return {"model": {"path": model, "dtype": "float32"}, "server": server}


async def decode(model: str, rounds: int, vllm: str | None) -> dict[str, float]:
    """Compare the embedded engine with `generate` and vLLM, and measure its memory."""
    import aiohttp
    import torch
    from transformers import AutoModelForCausalLM

    from agentfactory.launching.start_server import serve
    from agentfactory.rollout.config import RolloutRecipe
    from agentfactory.rollout.inference.http_transport import authorization

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    weights = sum(weight.nbytes for weight in network.parameters())
    vocabulary = network.config.get_text_config().vocab_size
    rates: dict[tuple[str, int], list[float]] = {}
    prefills: list[float] = []

    def generate(prompts: torch.Tensor, sampled: int = SAMPLED) -> None:
        arguments = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
        mask = torch.ones_like(prompts)
        out = network.generate(
            prompts, attention_mask=mask, min_new_tokens=sampled, max_new_tokens=sampled, **arguments
        )
        assert out.shape == (len(prompts), PROMPT + sampled)

    async def request(url: str, prompts: torch.Tensor, sampled: int = SAMPLED) -> None:
        params = {"temperature": 1.0, "max_tokens": sampled, "logprobs": 0, "ignore_eos": True}

        async def one(session: aiohttp.ClientSession, ids: list[int]) -> None:
            body = {"token_ids": ids, "sampling_params": params}
            async with session.post(url + "/inference/v1/generate", json=body) as answer:
                assert len((await answer.json())["choices"][0]["token_ids"]) == sampled

        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(headers=authorization(url, None), timeout=timeout) as session:
            await asyncio.gather(*[one(session, ids) for ids in prompts.tolist()])

    async with AsyncExitStack() as stack:

        async def start(engine: str, python: str | None = None) -> tuple[int, str]:
            started = time.perf_counter()
            recipe = RolloutRecipe.model_validate(server_recipe(model, engine, python))
            child, url = await stack.enter_async_context(serve(recipe, {}))
            print(f"  {engine} server ready after {time.perf_counter() - started:.1f} s", flush=True)
            return child.process.pid, url

        pid, embedded = await start("embedded")
        peak = Peak(engine_process(pid))
        sides: dict[str, Any] = {"embedded": embedded, "int8": (await start("int8"))[1], "generate": None}
        if vllm:
            sides["vllm"] = (await start("vllm", vllm))[1]

        async def run(url: str | None, chains: int, sampled: int = SAMPLED) -> float:
            prompts = torch.randint(0, vocabulary, (chains, PROMPT))
            started = time.perf_counter()
            await (asyncio.to_thread(generate, prompts, sampled) if url is None else request(url, prompts, sampled))
            return time.perf_counter() - started

        for url in sides.values():
            await run(url, CHAINS[-1], 8)  # warms up
        for (name, url), chains in rounds * [*itertools.product(sides.items(), CHAINS)]:
            rates.setdefault((name, chains), []).append(chains * SAMPLED / await run(url, chains))
            print(f"  {name:8} {chains:2} chains {rates[name, chains][-1]:6.1f} tokens/s", flush=True)
        for _ in range(rounds):
            prefills.append(await run(embedded, CHAINS[-1], 1))
            print(f"  prefill  {CHAINS[-1] * PROMPT / prefills[-1]:6.1f} tokens/s", flush=True)
        top = peak.stop()
    text = network.config.get_text_config()
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    cache = CHAINS[-1] * (PROMPT + SAMPLED) * 2 * text.num_hidden_layers * text.num_key_value_heads * width * 4
    allowed = 1.15 * weights + cache + 0.6e9
    print(f"  server: peak {top / 1e9:.2f} GB, weights {weights / 1e9:.2f}, cache {cache / 1e9:.2f}", flush=True)
    found = {
        "prefill_vs_roofline": pass_seconds(model, CHAINS[-1] * PROMPT, head=False) / statistics.median(prefills),
        "server_memory": top / allowed,
    }
    for chains in CHAINS:
        ours, int8, other = (statistics.median(rates[name, chains]) for name in ("embedded", "int8", "generate"))
        ideal = SAMPLED * pass_seconds(model, chains) + pass_seconds(model, chains * PROMPT, head=False)
        found[f"decode_{chains}_vs_generate"] = ours / other
        found[f"int8_{chains}_vs_generate"] = int8 / other
        found[f"decode_{chains}_vs_roofline"] = ideal * ours / (chains * SAMPLED)
        if vllm:
            found[f"decode_{chains}_vs_vllm_cpu"] = ours / statistics.median(rates["vllm", chains])
    return found


def engine_process(pid: int) -> int:
    """Return the process that has the model, among a server's processes: the largest one."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return int(max(family, key=lambda process: process.memory_info().rss).pid)


# ---- an update


def chains(groups: int, vocabulary: int) -> list[dict[str, Any]]:
    """Return the rows of an update; see update.py."""
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(2, vocabulary) for _ in range(count)]

    rows = []
    for _ in range(groups):
        prompt = tokens(draw.randint(150, 330))
        for _ in range(GROUP):
            ids, targets = list(prompt), list[int]()
            for turn in range(draw.randint(1, 3)):
                ids += tokens(draw.randint(16, 48)) if turn else []
                sampled = draw.randint(24, 64)
                targets += range(len(ids), len(ids) + sampled)
                ids += tokens(sampled)
            # as far from the policy as an update is from the rollouts: some ratios are clipped
            rows.append({"ids": ids, "prompt": len(prompt), "targets": targets, "advantage": draw.gauss(0, 1)})
    return rows


def make_adapter(model: str, folder: Path) -> None:
    """Write an adapter of random weights."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(0)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted: Any = get_peft_model(network, config)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=1e-3)
    adapted.save_pretrained(folder)


def score(model: str, adapter: Path, rows: list[dict[str, Any]]) -> None:
    """Add each row's old log-probabilities: the policy's, with noise."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    network = PeftModel.from_pretrained(network, adapter).eval()
    draw = random.Random(1)
    for row in rows:
        places = torch.tensor(row["targets"])
        with torch.no_grad():
            logits = network(torch.tensor(row["ids"])[None], logits_to_keep=places - 1).logits[0]
        labels = torch.tensor(row["ids"])[places]
        logprobs = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
        row["proximal"] = [value + draw.gauss(0, 0.1) for value in logprobs.tolist()]


def run_side(side: str, model: str, folder: str) -> dict[str, Any]:
    """Run one side of the comparison in this process."""
    import update

    rows = json.loads((Path(folder) / "rows.json").read_text(encoding="utf-8"))
    adapter = Path(folder) / "adapter"
    if side == "prepare":
        import torch

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        make_adapter(model, adapter)
        score(model, adapter, rows)
        (Path(folder) / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
        return {}
    if side == "ours":
        return update.run_ours(Path(model), rows, 2, "tree", MICRO * trl_width(rows), adapter)
    return update.run_trl(Path(model), rows, 2, "", 0, adapter, MICRO)


def in_process(side: str, model: str, folder: Path) -> dict[str, Any]:
    """Run one side in its own process, and return its result."""
    command = [sys.executable, __file__, model, "--side", side, str(folder)]
    threads = str(len(os.sched_getaffinity(0)))
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"{side} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if found:
        cpu = min(found["seconds"])
        print(f"  {side:5} {cpu:7.1f} CPU s an update, peak {found['peak'] / 1024:.2f} GiB", flush=True)
        found["cpu"] = cpu
    return found


def compare_updates(model: str, groups: int) -> dict[str, float]:
    """Compare an update of an adapter with TRL's."""
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        vocabulary = AutoConfig.from_pretrained(model).get_text_config().vocab_size
        rows = chains(groups, vocabulary)
        (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
        tokens, width = sum(len(row["ids"]) for row in rows), trl_width(rows)
        print(f"{groups} groups of {GROUP} chains, {tokens} tokens, TRL's width {width}:", flush=True)
        in_process("prepare", model, folder)
        ours, trl = in_process("ours", model, folder), in_process("trl", model, folder)
        check_same(ours, trl)
    # the adapter's base gets no gradients: one backward pass, to the activations; the head only at targets
    positions = sum(len(row["ids"]) - row["prompt"] * (number % GROUP > 0) for number, row in enumerate(rows))
    targets = sum(len(row["targets"]) for row in rows)
    ideal = (
        pass_seconds(model, positions, head=False)
        + pass_seconds(model, targets)
        - pass_seconds(model, targets, head=False)
    )
    return {
        "update_vs_trl": trl["cpu"] / ours["cpu"],
        "update_vs_roofline": 2 * ideal * len(os.sched_getaffinity(0)) / ours["cpu"],
        "update_memory_vs_trl": ours["peak"] / trl["peak"],
    }


# ---- steps


def run_steps(model: str, steps: int) -> dict[str, float]:
    """Train an adapter for `steps` steps on one-turn chains, and return the share of the sync in them."""
    import yaml

    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        questions = (f"Write a story about the numbers {draw.sample(range(10**6), 32)}." for _ in range(64))
        tasks = "".join(json.dumps({"question": question}) + "\n" for question in questions)
        (folder / "tasks.jsonl").write_text(tasks, encoding="utf-8")
        (folder / "reward.py").write_text(REWARD, encoding="utf-8")
        together, length = GROUPS * GROUP, 768
        recipe = {
            "model": {"path": model, "dtype": "float32", "lora": {"rank": RANK}},
            "data": {"path": "tasks.jsonl"},
            "rewards": ["reward.py:checksum"],
            "rollout": {
                "group_size": GROUP,
                "max_turns": 1,
                "max_tokens": SAMPLED,
                "max_total_tokens": length,
                "concurrency": together,
            },
            "server": {"engine": "embedded", "max_model_len": length, "max_num_seqs": together},
            "train": {"steps": steps, "batch_size": GROUPS, "learning_rate": 1e-5, "checkpoint_every": steps},
            "output": "run",
        }
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
        command = [sys.executable, "-m", "agentfactory", "train", "recipe.yaml"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        if done.returncode != 0:
            raise SystemExit(f"the run failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        logged = [entry for entry in map(json.loads, lines) if "loss" in entry]
    shares = []
    for entry in logged:
        step, wait, update, sync = (entry[f"seconds/{part}"] for part in ("step", "wait", "update", "sync"))
        print(f"  step {step:.1f} s: rollouts {wait:.1f}, update {update:.1f}, sync {sync:.1f}", flush=True)
        shares.append(1 - (wait + update) / step)
    return {"sync_share_of_step": statistics.median(shares)}


def main() -> None:
    """Run the comparisons; `--side` is for the processes that they start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--quick", action="store_true", help="1 round of decoding in place of 3, 1 group, 2 steps")
    parser.add_argument("--vllm", metavar="PYTHON", help="Python of an environment with vLLM for CPUs")
    parser.add_argument("--only", choices=["decode", "update", "steps"], help="one part")
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    model = str(Path(args.model).resolve())
    if args.side:
        print(json.dumps(run_side(args.side[0], model, args.side[1])))
        return
    found: dict[str, float] = {}
    if args.only in (None, "decode"):
        found |= asyncio.run(decode(model, 1 if args.quick else 3, args.vllm))
    if args.only in (None, "update"):
        found |= compare_updates(model, 1 if args.quick else GROUPS)
    if args.only in (None, "steps"):
        found |= run_steps(model, 2 if args.quick else 4)
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))


if __name__ == "__main__":
    main()
