"""Admission of chains by their contexts against fixed limits: prompt tokens computed over the ideal, and seconds.

- simulated: servers with vLLM's semantics (a request holds its blocks; others' prefixes are evicted, least recently
  used first), on workloads whose lengths, tools and caches vary with `--seed`. The ideal computes each token once, and
  a group's prompt once. `--left` also keeps what ended chains leave in the cache until it is evicted.

- `--embedded`, `--vllm PYTHON`: a real server on this machine's CPUs with a network of 25M parameters and a cache of 8
  long contexts, and 32 chains of 8 turns with tools of 0.25 s, through the rollouts' own places and client.

The last line is JSON: the worst `prompt_tokens_vs_ideal` and `wall_vs_best_fixed` of all workloads.

    python benchmarks/scheduling.py [--quick] [--seed N] [--left] [--embedded | --vllm PYTHON]
"""

import argparse
import asyncio
import heapq
import itertools
import json
import math
import random
import subprocess
import tempfile
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from agentfactory.rollout.chains.concurrency import Places
from agentfactory.rollout.chains.sampling import Sampler, Sampling
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.inference.admission import Admission, Cache, State
from agentfactory.rollout.inference.inference_client import InferenceClient
from agentfactory.rollout.inference.server_command_line import server_command

FIXED = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
BUDGET = 2048
"""Prompt tokens of a step."""
STEP, PER_CONTEXT, PER_TOKEN = 8e-3, 0.14e-6, 0.08e-3
"""Seconds of a step, and of each token of its contexts, and of its new tokens."""

Draw = Callable[[random.Random], float]


def short(r: random.Random) -> float:
    return r.uniform(0.1, 1)


def mixed(r: random.Random) -> float:
    share = r.random()
    return r.uniform(0.1, 1) if share < 0.86 else r.uniform(1, 10) if share < 0.95 else r.uniform(10, 60)


def heavy(r: random.Random) -> float:
    return min(600.0, 0.5 * r.paretovariate(1.1))


def spread(mean: float, sigma: float, most: float, r: random.Random) -> float:
    """Return a log-normal number of 1 to `most`."""
    return max(1, min(most, mean * math.exp(r.gauss(0, sigma) - sigma**2 / 2)))


def always(value: float) -> Draw:
    return lambda r: value


PROMPT, TURNS, SAMPLED, RESULT = map(always, (4000, 30, 150, 450))


@dataclass(frozen=True)
class Workload:
    """Chains with `prompt`, `turns`, `sampled` tokens and `result` tokens a turn, and seconds in a `tool`. `caches` are
    the tokens of each replica."""

    name: str
    tool: Draw
    caches: tuple[int, ...]
    prompt: Draw = PROMPT
    turns: Draw = TURNS
    sampled: Draw = SAMPLED
    result: Draw = RESULT
    chains: int = 128
    group: int = 8
    slots: int = 64
    longest: int = 40_000


WORKLOADS = [
    Workload("short tools", short, (91_000,)),
    Workload("long tools", partial(spread, 8, 0.7, 60), (300_000,)),
    Workload("heavy tails", heavy, (150_000,), turns=partial(spread, 20, 0.7, 80)),
    Workload(
        *("tenfold contexts", mixed, (150_000,), partial(spread, 4000, 0.8, 20_000), partial(spread, 20, 0.8, 80)),
        result=partial(spread, 450, 1, 3000),
        longest=60_000,
    ),
    Workload("two replicas", mixed, (80_000, 220_000)),
    Workload("groups of 16", mixed, (150_000,), always(8000), group=16),
    Workload("results of 8k", mixed, (300_000,), turns=always(8), result=always(8000), longest=80_000),
]


def varied(workload: Workload, seed: int) -> Workload:
    """Return a workload with other caches, tools and turns; the same for seed 0."""
    r = random.Random(seed)
    factor = (lambda: 1.0) if seed == 0 else (lambda: r.uniform(0.6, 1.7))
    caches, tools, turns = factor(), factor(), factor()
    return replace(
        workload,
        caches=tuple(int(tokens * caches) for tokens in workload.caches),
        tool=lambda r: tools * workload.tool(r),
        turns=lambda r: max(1, turns * workload.turns(r)),
    )


@dataclass
class Chain:
    """A simulated chain: its `plan` has tokens sampled, tokens of the result and seconds of the tool of each turn."""

    number: int
    group: str
    prompt: int
    plan: list[tuple[int, int, float]]
    context: int
    turn: int = 0
    home: int | None = None
    priority: int = 0
    uncomputed: int = 0
    left: int = 0


class Replica:
    """A server: its queue, its running requests, and the prefixes in its cache, by chain and by group."""

    def __init__(self, capacity: int, slots: int):
        self.capacity, self.slots = capacity, slots
        self.queue: list[Chain] = []
        self.running: list[Chain] = []
        self.used: dict[object, int] = {}
        """Tokens of running requests, by chain and group."""
        self.idle: OrderedDict[object, int] = OrderedDict()
        """Tokens that can be evicted, least recently used first."""
        self.time = 0.0
        self.computed = 0

    def start(self) -> None:
        """Start the requests for which there is room."""
        while self.queue and len(self.running) < self.slots:
            chain = min(self.queue, key=lambda chain: chain.priority)
            own = chain.context - chain.prompt
            need = own + chain.plan[chain.turn][0] + (0 if chain.group in self.used else chain.prompt)
            if self.running and sum(self.used.values()) + need > self.capacity:
                return
            self.queue.remove(chain)
            prompt = self.used.get(chain.group, self.idle.pop(chain.group, 0))
            cached = self.idle.pop(chain.number, 0)
            # a prefix without its beginning is none
            hit = prompt + (min(own, cached) if prompt == chain.prompt else 0)
            self.used[chain.group] = chain.prompt
            self.used[chain.number] = own + chain.plan[chain.turn][0]
            over = sum(self.used.values()) + sum(self.idle.values()) - self.capacity
            while over > 0 and self.idle:
                key, tokens = next(iter(self.idle.items()))
                over -= tokens
                if over >= 0:
                    del self.idle[key]
                else:
                    self.idle[key] = -over  # the end of a prefix is evicted first
            chain.uncomputed, chain.left = max(1, chain.context - hit), chain.plan[chain.turn][0]
            self.running.append(chain)

    def step(self, until: float) -> list[Chain]:
        """Run a step, or equal ones until a turn or the time `until` ends, and return the chains with turns that have
        ended."""
        decoding = [chain for chain in self.running if not chain.uncomputed]
        contexts, room, steps = sum(chain.context for chain in self.running), BUDGET, 1
        for chain in self.running:
            count = min(room, chain.uncomputed)
            chain.uncomputed -= count
            room -= count
        self.computed += BUDGET - room
        seconds = STEP + PER_CONTEXT * contexts + PER_TOKEN * (BUDGET - room + len(decoding))
        if len(decoding) == len(self.running):
            soon = min(1e9, max(0.0, until - self.time) / seconds)
            steps = min(int(soon) + 1, min(chain.left for chain in decoding))
        for chain in decoding:
            chain.left -= steps
            chain.context += steps
        self.time += steps * (seconds + PER_CONTEXT * len(decoding) * (steps - 1) / 2)
        ended = [chain for chain in self.running if not chain.uncomputed and chain.left <= 0]
        for chain in ended:
            self.running.remove(chain)
            self.idle[chain.number] = self.used.pop(chain.number)
            if all(other.group != chain.group for other in self.running):
                self.idle[chain.group] = self.used.pop(chain.group)
        return ended


def chains_of(workload: Workload, seed: int) -> tuple[list[Chain], int]:
    """Return the chains, and the prompt tokens that they need at least."""
    r, chains, ideal = random.Random(seed), list[Chain](), 0
    for group in range(workload.chains // workload.group):
        prompt = int(workload.prompt(r))
        ideal += prompt
        for _ in range(workload.group):
            plan, total = list[tuple[int, int, float]](), prompt
            for _ in range(int(workload.turns(r))):
                turn = int(workload.sampled(r)), int(workload.result(r)), workload.tool(r)
                if plan and total + turn[0] > workload.longest:
                    break
                plan.append(turn)
                total += turn[0] + turn[1]
            ideal += sum(result for _, result, _ in plan[:-1])
            chains.append(Chain(len(chains), f"group {group}", prompt, plan, prompt))
    return chains, ideal


def simulate(workload: Workload, limit: int | None, seed: int, leaves: bool) -> tuple[float, float, int]:
    """Run the chains, `limit` at a time (None: by their contexts). Return the seconds, the prompt tokens computed over
    the ideal, and the most chains at a time. `leaves`: ended chains leave their tokens in a cache."""
    chains, ideal = chains_of(workload, seed)
    replicas = [Replica(tokens, workload.slots) for tokens in workload.caches]
    caches = {number: Cache(tokens // 16, 16) for number, tokens in enumerate(workload.caches)}
    if limit is None:
        admission = Admission(caches, workload.longest, workload.slots * len(replicas))
    else:
        admission = Admission({0: Cache(limit, workload.longest)}, workload.longest)
    events: list[tuple[float, int, Chain]] = []
    now, serial, alive, most = 0.0, itertools.count(), 0, 0

    def send(chain: Chain) -> None:
        home = admission.chains[chain.number].home
        if limit is not None:  # the replica with the fewest requests, then chains
            chain.priority = next(serial)
            given = Counter(other.home for other in chains if other.number in admission.chains)
            load = [(len(one.running) + len(one.queue), given[number]) for number, one in enumerate(replicas)]
            home = min(range(len(load)), key=load.__getitem__) if chain.home is None else chain.home
        else:
            chain.priority = chain.number
        assert isinstance(home, int)
        chain.home, replica = home, replicas[home]
        replica.time = replica.time if replica.running or replica.queue else max(replica.time, now)
        replica.queue.append(chain)

    for chain in chains:
        admission.enter(chain.number, chain.group)
    while True:
        for admitted in admission.admit():
            chain = chains[int(str(admitted.key))]
            if admitted.state is State.STARTING:
                alive += 1
                heapq.heappush(events, (now, next(serial), chain))
            else:
                send(chain)
        most = max(most, alive)
        if not admission.chains:
            return now, sum(replica.computed for replica in replicas) / ideal, most
        busy = [replica for replica in replicas if replica.running or replica.queue]
        replica = min(busy, key=lambda replica: replica.time, default=None)
        if events and (replica is None or events[0][0] <= replica.time):
            now, _, chain = heapq.heappop(events)
            admission.ask(chain.number, chain.context, chain.group)
            if admission.chains[chain.number].state is State.RUNNING:
                send(chain)
            continue
        assert replica is not None, "chains wait although none runs"
        replica.start()
        for chain in replica.step(events[0][0] if events else math.inf):
            _, result, seconds = chain.plan[chain.turn]
            admission.answer(chain.number)
            chain.turn += 1
            if chain.turn < len(chain.plan):
                chain.context += result
                heapq.heappush(events, (replica.time + seconds, next(serial), chain))
                continue
            admission.leave(chain.number)
            alive -= 1
            if not leaves:
                replica.idle.pop(chain.number)
        now = replica.time


# ---- a real server

CHAINS, REAL_TURNS, OPENING, GENERATED, ANSWER, PAUSE, SLOTS, ROW = 32, 8, 320, 4, 60, 0.25, 8, 832
"""Chains, turns, tokens of a prompt, a turn and a tool's result, mean seconds of a tool, slots, tokens of a row."""
BLOCK = 32
"""Tokens of a block of vLLM's cache, the least on a CPU. Only whole blocks are cached: contexts have whole ones."""


def save_network(folder: Path) -> None:
    """Save a network of 25M parameters with random weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 512, **heads}
    Qwen3ForCausalLM(Qwen3Config(**sizes, max_position_embeddings=2048)).save_pretrained(folder)


async def play(recipe: RolloutRecipe, url: str, salt: int) -> tuple[float, float]:
    """Run the chains. Return the seconds, and the prompt tokens computed over the ideal."""
    async with InferenceClient(url) as client:
        await client.check_routes()
        places, sampler = Places(recipe, client), Sampler(recipe, client, [])

        async def computed() -> float:
            return sum(load.prompt_tokens - load.cached_tokens for load in (await client.loads()).values())

        async def run(number: int) -> None:
            r, name = random.Random(number * 7 + salt), f"{salt}.{number}"
            ids = [r.randrange(5, 512) for _ in range(OPENING)]
            async with places.place(name, name) as place:
                sampling = Sampling("policy", 1.0, name, priority=place.seat.order[0])
                for turn in range(REAL_TURNS):
                    async with place.turn(ids):
                        ids = ids + (await sampler.sample(ids, sampling, turn, GENERATED)).token_ids
                    ids = ids + [r.randrange(5, 512) for _ in range(ANSWER)]
                    await asyncio.sleep(r.expovariate(1 / PAUSE))

        before, start = await computed(), time.monotonic()
        await asyncio.gather(*(run(number) for number in range(CHAINS)))
        ideal = CHAINS * (OPENING + (REAL_TURNS - 1) * ANSWER)
        return time.monotonic() - start, (await computed() - before) / ideal


def real(python: str | None) -> tuple[list[float], list[float]]:
    """Compare the chains of a real server: the embedded engine, or vLLM in the environment of `python`."""
    with tempfile.TemporaryDirectory() as folder:
        save_network(Path(folder))
        server: dict[str, Any] = {"engine": "embedded", "max_num_seqs": SLOTS, "max_model_len": ROW}
        if python is not None:
            args = ["--block-size", str(BLOCK), "--num-gpu-blocks-override", str(SLOTS * ROW // BLOCK)]
            server |= {"engine": "vllm", "options": {"python": python, "args": args}}
        model = {"path": folder, "dtype": "float32"}
        fields: dict[str, Any] = {"model": model, "server": {**server, "port": 8765}}
        recipes = {
            limit: RolloutRecipe(**fields, rollout={"concurrency": limit, "max_total_tokens": ROW})
            for limit in ("auto", 6, 8, 12, 16, 32)
        }
        process = subprocess.Popen(server_command(recipes["auto"]), stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            url = next(line.split()[1] for line in process.stdout if line.startswith("ready "))
            found = {}
            for salt, (limit, recipe) in enumerate(recipes.items()):
                found[limit] = asyncio.run(play(recipe, url, salt * 1000))
                print(f"{limit}: {found[limit][0]:.1f} s, prompt {found[limit][1]:.2f} of the ideal", flush=True)
        finally:
            process.terminate()
            process.wait()
    seconds, ratio = found.pop("auto")
    return [ratio], [seconds / min(others for others, _ in found.values())]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--left", action="store_true")
    parser.add_argument("--embedded", action="store_true")
    parser.add_argument("--vllm", metavar="PYTHON")
    arguments = parser.parse_args()
    ratios, walls = list[float](), list[float]()
    if arguments.embedded or arguments.vllm:
        ratios, walls = real(arguments.vllm)
        WORKLOADS.clear()
    for workload in WORKLOADS[:2] if arguments.quick else WORKLOADS:
        case = varied(workload, arguments.seed)
        fixed = {limit: simulate(case, limit, arguments.seed, arguments.left) for limit in FIXED}
        best = min(fixed, key=lambda limit: fixed[limit][0])
        seconds, ratio, most = simulate(case, None, arguments.seed, arguments.left)
        ratios.append(ratio)
        walls.append(seconds / fixed[best][0])
        print(
            f"{case.name:16}: by contexts {seconds:5.0f} s, prompt {ratio:.2f} of the ideal, at most {most} chains; "
            f"best limit {best}: {fixed[best][0]:5.0f} s, {fixed[best][1]:.2f}; 64: {fixed[64][0]:5.0f} s, "
            f"{fixed[64][1]:.2f}; wall {walls[-1]:.2f}",
            flush=True,
        )
    print(json.dumps({"prompt_tokens_vs_ideal": round(max(ratios), 3), "wall_vs_best_fixed": round(max(walls), 3)}))


if __name__ == "__main__":
    main()
