"""Rollout workers with thousands of long chains: CPU per turn, event-loop lag, bytes per turn, delivery, batches.

The worker is the real one (`agentfactory.rollout.workers.rollout_worker`), started as trainer rank 0 starts it: it
renders, requests turns, runs a tool, saves and delivers groups of 8. Its server is a stub in another process that
answers each request immediately with the same 64 tokens, a tool call. Each tool result is a different text, so nothing
is rendered from a cache. A chain has 30 turns and ends with 16 thousand tokens.

- ms per turn: CPU time of the worker's process per turn, from the first request to the last delivered group.
- four workers share 1,024 chains (--quick: 512), for correctness and balance: each turn is requested and delivered
  once.
- lag: the delay of a sleep of 10 ms in the worker's event loop, from the first call to the last.
- ms per turn by tokenizing: the same, divided by the time that `tokenizers` takes for the new text of a turn, a measure
  of the machine's speed. A worker that encodes with it cannot get below 1; ours encodes with `fastokens`.
- delivery: the time for which a group of 8 x 16 thousand tokens blocks the worker (save, send) and rank 0 (read), and
  the time that the viewer takes for the page of one of its chains (page).
- batches: 4,096 rows of 8 thousand tokens (--quick: 512), in groups of 8 with a common eighth of their tokens, dealt to
  4 ranks over gloo: the seconds until rank 0 has its batch, and its peak memory minus that before. Before, rank 0 built
  the batches of all ranks and pickled them; that runs here as well, with the batches of today. All ranks share the
  machine, each with one thread.

`--batches` deals only the rows. `--sources` instead compares chains of 8 sources of tasks with those of one, twice:
10,240 chains of 5 turns, 4,096 at a time (--quick: 512 chains of 30). Each source has settings of its own, and so its
own tools and runner. Both run at the same time, so that other work on the machine slows both.

`--before COMMIT` also runs that commit's worker, with 256 chains, in this run. The last line is JSON.
`chains_4096_vs_1024` is the CPU time of 4,096 chains divided by 4 times that of 1,024 (--quick: of 256 and 128).

    python benchmarks/scale.py [--quick] [--batches | --sources | --before COMMIT]
"""

import argparse
import asyncio
import importlib
import itertools
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from array import array
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GROUP, TURNS, SAMPLED, ANSWER_WORDS, OPENING_WORDS = 8, 30, 64, 450, 400
WORDS = 4000
PAGES_WORDS = 500_000
"""Words of all pages: each tool result is a piece of them with another start."""
METRICS = "".join(
    f"vllm:{name} 0\n"
    for name in (
        "num_requests_waiting",
        "num_requests_running",
        "kv_cache_usage_perc",
        "prompt_tokens_total",
        "generation_tokens_total",
        "prefix_cache_hits_total",
    )
)
"""The load that the stub reports."""
SOURCES = 8
"""Number of sources that `--sources` compares with one."""
CONCURRENCY = 4096
"""Largest number of chains at a time."""
RANKS, ROW_TOKENS, ROW_BUDGET = 4, 8192, 32_768
"""Ranks to which rows are dealt, tokens of a row, and of a micro-batch."""
BATCHES = 16
"""Number of batches in which the groups are delivered, so that rank 0 need not hold them all."""


def words(seed: int) -> list[str]:
    """Return generated words, each of which is a token."""
    draw = random.Random(seed)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "ai", "en", "or")]
    return sorted({"".join(draw.choices(syllables, k=draw.randint(1, 3))) for _ in range(3 * WORDS)})[:WORDS]


TOOL_FILE = '''
import array, asyncio, os, random, time
from agentfactory import reward, tool

# made once, so that the tool takes none of the worker's time
WORDS = open(__file__.replace("pages.py", "pages.txt")).read().split(" ")
TEXT = " ".join(WORDS)
ENDS = [0]
for word in WORDS:
    ENDS.append(ENDS[-1] + len(word) + 1)
draw = random.Random(1)
lags = array.array("d")
watch = None


async def measure():
    while True:
        asked = time.perf_counter()
        await asyncio.sleep(0.01)
        lags.append(1e3 * (time.perf_counter() - asked - 0.01))
        if len(lags) == 20:
            with open(__file__.replace("pages.py", f"lags-{os.getpid()}"), "ab") as file:
                lags.tofile(file)
            del lags[:]


@tool
async def read(page: int) -> str:
    """Read a page.

    Args:
        page: its number
    """
    global watch
    watch = watch or asyncio.create_task(measure())
    first = draw.randrange(len(WORDS) - ANSWER_WORDS)
    return TEXT[ENDS[first] : ENDS[first + ANSWER_WORDS] - 1]


@reward
def chance() -> float:
    return draw.random()
'''


def make_folder(folder: Path, chains: int) -> None:
    """Write the tokenizer, the tasks and the tool into `folder`."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = words(0)
    specials = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>"]
    specials += ["<tool_response>", "</tool_response>"]
    letters = pre_tokenizers.ByteLevel.alphabet()
    merges: dict[tuple[str, str], None] = {}
    tokens = {token: None for token in sorted(letters)}
    for word in (f"Ġ{word}" for word in vocabulary):
        for end in range(2, len(word) + 1):
            merges[word[: end - 1], word[end - 1]] = None
            tokens[word[:end]] = None
    ids = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.add_tokens(specials, special_tokens=True)
    templates = Path(transformers.__file__).parent.parent / "trl" / "chat_templates"
    fast.chat_template = (templates / "qwen2_5.jinja").read_text(encoding="utf-8")
    fast.save_pretrained(folder / "model")
    draw = random.Random(2)
    tasks = [{"question": " ".join(draw.choices(vocabulary, k=OPENING_WORDS))} for _ in range(chains // GROUP)]
    for number in range(SOURCES):
        lines = (json.dumps(task) + "\n" for task in tasks[number::SOURCES])
        (folder / f"tasks-{number}.jsonl").write_text("".join(lines))
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (folder / "pages.py").write_text(TOOL_FILE.replace("ANSWER_WORDS", str(ANSWER_WORDS)))
    (folder / "pages.txt").write_text(" ".join(draw.choices(vocabulary, k=PAGES_WORDS)))
    call = '<tool_call>\n{"name": "read", "arguments": {"page": 7}}\n</tool_call><|im_end|>'
    ids_of_call = fast.encode(call, add_special_tokens=False)
    thought = fast.encode(" " + " ".join(vocabulary[:SAMPLED]), add_special_tokens=False)
    turn = [*thought[: SAMPLED - len(ids_of_call)], *ids_of_call]
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "token_ids": turn,
        "logprobs": {"content": [{"token_id": i, "logprob": -random.random()} for i in turn]},
        "weight_versions": [{"version": "0", "start": 0, "end": len(turn)}],
    }
    (folder / "answer.json").write_text(json.dumps({"request_id": "r", "choices": [choice]}))


async def serve_stub(folder: Path) -> None:
    """Answer every request with the same turn."""
    from aiohttp import web

    answer = (folder / "answer.json").read_bytes()
    received = {"requests": 0, "bytes": 0}
    routes = ["/inference/v1/generate", "/health", "/v1/models"]
    replies: dict[str, Any] = {
        "/openapi.json": {"paths": {route: {} for route in routes}},
        "/v1/models": {"data": [{"id": "base"}]},
        "/received": received,
    }

    async def reply(request: web.BaseRequest) -> web.Response:
        if request.path == "/inference/v1/generate":
            received["requests"] += 1
            received["bytes"] += len(await request.read())
            return web.Response(body=answer, content_type="application/json")
        if request.path == "/metrics":
            return web.Response(text=METRICS)
        return web.json_response(replies.get(request.path, {}))

    server = web.Server(reply)
    runner = web.ServerRunner(server)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=8192).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


@dataclass
class Run:
    """The cost of `chains` on all `workers` together."""

    chains: int
    workers: int
    balance: float
    """CPU time of the busiest worker divided by the mean."""
    ms_per_turn: float
    lag_p99_ms: float
    bytes_per_turn: float
    seconds: float
    mib: float


def run_workers(folder: Path, url: str, chains: int, workers: int, turns: int, sources: int) -> Run:
    """Start workers as rank 0 does, and take their batches. Each chain ends after `turns` turns."""
    import urllib.request

    import psutil

    from agentfactory.rollout.config import RolloutRecipe
    from agentfactory.rollout.inference.weight_versions import Published
    from agentfactory.rollout.workers.worker_socket import Job, RolloutWorkers

    groups = chains // GROUP
    data: dict[str, Any] = {"path": str(folder / "tasks.jsonl")}
    if sources > 1:
        # a setting of its own gives a source its own tools and runner
        paths = ((f"s{number}", str(folder / f"tasks-{number}.jsonl"), 7200 + number) for number in range(sources))
        data = {"sources": [{"name": name, "path": path, "timeout_seconds": most} for name, path, most in paths]}
    recipe = RolloutRecipe.model_validate(
        {
            "model": {"path": str(folder / "model"), "lora": {"rank": 8}},
            "data": data,
            "tools": ["pages.py:read"],
            "rewards": ["pages.py:chance"],
            "server": {"engine": "vllm"},
            "rollout": {
                "group_size": GROUP,
                "max_turns": turns,
                "max_tokens": 128,
                "max_total_tokens": 20_000,
                "timeout_seconds": 7200,
                "concurrency": min(chains, CONCURRENCY),
                "max_staleness": BATCHES - 1,
                **({"workers": workers} if workers > 1 else {}),
            },
        }
    )

    def received() -> dict[str, int]:
        with urllib.request.urlopen(url + "/received") as answer:
            counts: dict[str, int] = json.load(answer)
            return counts

    trajectories = folder / f"trajectories-{chains}"
    trajectories.mkdir()
    before = received()
    counts = (groups // BATCHES, groups)
    source = RolloutWorkers(Job(recipe, folder, [url], trajectories, folder, *counts), folder, lambda _: True)
    processes = psutil.Process().children()
    used, started = [sum(process.cpu_times()[:2]) for process in processes], time.perf_counter()
    tokens = taken = 0
    drawn: Counter[str] = Counter()
    for version in range(BATCHES):
        source.published(Published(version, f"bench-v{version}", f"bench-v{version}"))
        for group in source.next_batch(groups // BATCHES):
            drawn[group.source] += 1
            for chain in group.trajectories:
                assert chain.turns == turns, chain.error
                taken += chain.turns
                tokens = max(tokens, len(chain.rows[0].token_ids))
    seconds = time.perf_counter() - started
    cpu = [sum(process.cpu_times()[:2]) - before for process, before in zip(processes, used, strict=True)]
    mib = sum(process.memory_info().rss for process in processes) / 2**20
    source.close()
    after = received()
    assert taken == after["requests"] - before["requests"] == chains * turns
    assert len(cpu) == workers
    assert len(drawn) == sources
    lags = sorted(lag for file in folder.glob("lags-*") for lag in array("d", file.read_bytes()))
    return Run(
        chains,
        workers,
        max(cpu) / (sum(cpu) / workers),
        1e3 * sum(cpu) / taken,
        lags[int(len(lags) * 0.99)],
        (after["bytes"] - before["bytes"]) / taken,
        seconds,
        mib,
    )


def delivery() -> dict[str, float]:
    """Return the milliseconds for which a group of 8 x 16 thousand tokens blocks the worker and rank 0, and the
    milliseconds of the viewer's page of one of its chains."""
    from agentfactory.launching.run_folder import RunFolder
    from agentfactory.rollout.groups.group_files import append_group, decode_group
    from agentfactory.rollout.token_row import Row, Span
    from agentfactory.rollout.trajectory import Activity, Group, Outcome, Stretch, Trajectory
    from agentfactory.rollout.workers.worker_socket import Delivered, encode_delivered
    from agentfactory.viewer.runs.follower import Follower
    from agentfactory.viewer.trajectories.trajectory_page import find_chain, page_of

    draw = random.Random(3)
    length = 1 << 14

    def chain(number: int) -> Trajectory:
        mask = [int(i % (length // TURNS) < SAMPLED) for i in range(length)]
        row = Row([draw.randrange(150_000) for _ in mask], mask, [-draw.random() * sampled for sampled in mask])
        row.versions = [Span("run-v1", at, at + SAMPLED) for at in range(0, length, length // TURNS)]
        messages = [{"role": "tool", "content": "word " * (ANSWER_WORDS)} for _ in range(TURNS)]
        timeline = [Stretch(Activity.MODEL, 0.1, 0.2, turn) for turn in range(2 * TURNS)]
        return Trajectory(f"g.{number}", messages, [row], Outcome.COMPLETED, 1.0, timeline=timeline)

    group = Group("g", {"question": "?"}, [chain(number) for number in range(GROUP)])
    parts = {"save": [], "send": [], "read": [], "page": []}  # type: dict[str, list[float]]
    with tempfile.TemporaryDirectory() as made:
        run = RunFolder.create(Path(made) / "run", "name: run\n")
        starts = [0]
        for _ in range(20):
            times = [time.perf_counter()]
            encoded = append_group(run.trajectories / "train.jsonl", group)
            times.append(time.perf_counter())
            encode_delivered(Delivered(encoded, [one.id for one in group.trajectories]))
            times.append(time.perf_counter())
            read = decode_group(encoded.line, encoded.record)
            times.append(time.perf_counter())
            for part, start, end in zip(parts, times, times[1:], strict=False):
                parts[part].append(1e3 * (end - start))
            assert len(read.trajectories[-1].rows[0].token_ids) == length
            starts.append(starts[-1] + len(encoded.line) + 1)
        follower = Follower([run.path])
        follower.read_all()
        for start in starts[:-1]:
            begun = time.perf_counter()
            page = page_of(follower, find_chain(follower, follower.runs[0].id, "train.jsonl", start, 0), lambda *_: "")
            parts["page"].append(1e3 * (time.perf_counter() - begun))
            assert len(page["rows"][0]["token_ids"]) == length
    return {part: sorted(values)[len(values) // 2] for part, values in parts.items()}


def deal_rows(count: int, way: str, batching: Any, rank: int, store: Path) -> tuple[float, float]:
    """Deal rows as one of the ranks, `now` or as `before`, and return its seconds and peak memory in MiB."""
    import numpy as np
    import torch
    from torch import distributed as dist

    from agentfactory.trainers.batches.batch import Batch, TrainingRow, deal_batch, make_batches, make_plans
    from benchmarks.update import Meter

    draw, rows = np.random.default_rng(0), list[TrainingRow]()
    names, prompt = ("behaviour", "advantage", "weight", "mixed"), ROW_TOKENS // 8
    for number in range(count if rank == 0 else 0):
        shared = rows[-1].token_ids[:prompt] if number % GROUP else draw.integers(150_000, size=prompt)
        ids = np.concatenate([shared, draw.integers(150_000, size=ROW_TOKENS - prompt)])
        targets = np.arange(prompt, ROW_TOKENS)
        rows.append(TrainingRow(ids, targets, {name: np.ones(len(targets)) for name in names}))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)

    def now() -> Batch:
        plans = make_plans(rows, batching, ROW_BUDGET, RANKS, None, sees=False) if rank == 0 else None
        return deal_batch(plans, rows, None, torch.device("cpu"), None)

    def before() -> Batch:
        made = make_batches(rows, batching, ROW_BUDGET, RANKS) if rank == 0 else None
        received: list[Any] = [None]
        dist.scatter_object_list(received, made, src=0)
        return received[0]

    dist.barrier()
    meter, started = Meter(), time.perf_counter()
    made = now() if way == "now" else before()
    seconds = time.perf_counter() - started
    assert made.tokens == count * (ROW_TOKENS - prompt)
    peak = meter.peak
    # a rank that ends early would cut connections
    dist.barrier()
    return seconds, peak


def batches(quick: bool) -> dict[str, float]:
    """Return rank 0's seconds and MiB, and how many times those of before they were: the least of both batchings."""
    count = 512 if quick else 4096
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    # imported once, before processes are forked
    importlib.import_module("agentfactory.trainers.batches.batch")
    found: dict[str, dict[str, tuple[float, float]]] = {"now": {}, "before": {}}
    for batching, way in itertools.product(("packed", "tree"), found):
        # processes of their own: freed memory that malloc keeps would count as if it had been there before
        with tempfile.TemporaryDirectory() as made, multiprocessing.get_context("fork").Pool(RANKS) as pool:
            ranks = [(count, way, batching, rank, Path(made, "store")) for rank in range(RANKS)]
            seconds, peak = found[way][batching] = pool.starmap(deal_rows, ranks, chunksize=1)[0]
        print(f"  {count} rows of {ROW_TOKENS} tokens, {batching}, {way}: {seconds:.2f} s, {peak:,.0f} MiB", flush=True)
    ratios = [[old / new for old, new in zip(found["before"][b], found["now"][b], strict=True)] for b in found["now"]]
    seconds, peak = (max(costs) for costs in zip(*found["now"].values(), strict=True))
    faster, smaller = (min(ratio) for ratio in zip(*ratios, strict=True))
    names = ("batches_seconds", "batches_peak_mib", "batches_seconds_vs_before", "batches_memory_vs_before")
    return dict(zip(names, (seconds, peak, faster, smaller), strict=True))


def tokenizing() -> float:
    """Return the milliseconds that `tokenizers` takes for the new text of a turn."""
    import transformers

    with tempfile.TemporaryDirectory() as made:
        make_folder(Path(made), GROUP)
        tokenizer = transformers.AutoTokenizer.from_pretrained(Path(made) / "model").backend_tokenizer
    draw, vocabulary = random.Random(4), words(0)
    texts = [" ".join(draw.choices(vocabulary, k=ANSWER_WORDS)) for _ in range(2000)]
    started = time.process_time()
    for text in texts:
        tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return 1e3 * (time.process_time() - started) / len(texts)


def measure(chains: int, code: Path, workers: int = 1, **options: int) -> Run:
    """Run workers of the checkout `code`, with a separate stub. `options` are `turns` and `sources`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(code)}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        make_folder(folder, chains)
        command = [sys.executable, str(code / "benchmarks" / "scale.py"), "--folder", made]
        stub = subprocess.Popen([*command, "--stub"], stdout=subprocess.PIPE, text=True, env=environment)
        assert stub.stdout is not None
        try:
            command += ["--url", stub.stdout.readline().strip(), "--chains", str(chains), "--workers", str(workers)]
            command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
        finally:
            stub.terminate()
            stub.wait()
        if done.returncode != 0:
            log = folder / "worker.log"
            raise SystemExit(f"{' '.join(command)} failed\n{log.read_text()[-3000:] if log.exists() else ''}")
    run = Run(**json.loads(done.stdout.splitlines()[-1]))
    several = f" of {workers} workers (the busiest {run.balance:.2f} of the mean)" if workers > 1 else ""
    several += f" of {found} sources" if (found := options.get("sources", 1)) > 1 else ""
    spent = f"{run.ms_per_turn:5.2f} ms of CPU per turn, lag p99 {run.lag_p99_ms:6.1f} ms"
    size = f"{run.bytes_per_turn:,.0f} bytes per turn, {run.seconds:.0f} s, {run.mib:,.0f} MiB"
    print(f"  {run.chains:5} chains{several}: {spent}, {size}", flush=True)
    return run


def compare(quick: bool, before: str | None) -> None:
    """Run everything, and print the summary."""
    here = Path(__file__).resolve().parent.parent
    if before is not None:
        with tempfile.TemporaryDirectory() as old:
            archive = subprocess.run(["git", "archive", before], cwd=here, stdout=subprocess.PIPE, check=True)
            subprocess.run(["tar", "-x", "-C", old], input=archive.stdout, check=True)
            print(f"the worker of {before}:")
            measure(256, Path(old))
    print("this worker:")
    sizes = (128, 256) if quick else (256, 1024, 4096)
    runs = {chains: measure(chains, here) for chains in sizes}
    measure(512 if quick else 1024, here, workers=4)
    parts = delivery()
    alone = tokenizing()
    print(f"`tokenizers` alone: {alone:.2f} ms per turn")
    shown = ", ".join(f"{part} {ms:.1f} ms" for part, ms in parts.items())
    print(f"a group of {GROUP} x {1 << 14} tokens: {shown}")
    dealt = batches(quick)
    few, many = sizes[-2:]
    ratios = {
        "ms_per_turn": runs[many].ms_per_turn,
        "ms_per_turn_vs_tokenizing": runs[many].ms_per_turn / alone,
        "lag_p99_ms": runs[many].lag_p99_ms,
        "delivery_ms_per_group": sum(ms for part, ms in parts.items() if part != "page"),
        f"chains_{many}_vs_{few}": runs[many].ms_per_turn / runs[few].ms_per_turn,
        **dealt,
    }
    print(json.dumps({name: round(value, 3) for name, value in ratios.items()}))


def compare_sources(quick: bool) -> None:
    """Run chains of one source and of several at the same time, and print the summary."""
    import transformers  # noqa: F401  # two threads must not import it at the same time

    here = Path(__file__).resolve().parent.parent
    chains, turns = (512, TURNS) if quick else (10_240, 5)
    spent: dict[int, list[float]] = {1: [], SOURCES: []}
    with ThreadPoolExecutor() as pool:
        for _ in range(2):
            runs = {
                sources: pool.submit(measure, chains, here, turns=turns, sources=sources) for sources in (1, SOURCES)
            }
            for sources, run in runs.items():
                spent[sources].append(run.result().ms_per_turn)
    one, several = (sum(values) / 2 for values in spent.values())
    ratios = {"ms_per_turn": several, f"sources_{SOURCES}_vs_1": several / one}
    print(json.dumps({name: round(value, 3) for name, value in ratios.items()}))


def main() -> None:
    """Run the benchmark; the hidden options are for the processes that it starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="128 and 256 chains in place of 256 to 4,096")
    parser.add_argument("--before", metavar="COMMIT", help="also run the worker of this commit")
    parser.add_argument("--sources", nargs="?", type=int, const=SOURCES, help="compare 8 sources of tasks with one")
    parser.add_argument("--batches", action="store_true", help="only deal rows to ranks")
    parser.add_argument("--stub", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--chains", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, default=TURNS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stub:
        asyncio.run(serve_stub(arguments.folder))
    elif arguments.url:
        sizes = (arguments.chains, arguments.workers, arguments.turns, arguments.sources or 1)
        run = run_workers(arguments.folder, arguments.url, *sizes)
        print(json.dumps(vars(run)), flush=True)
    elif arguments.batches:
        print(json.dumps({name: round(value, 3) for name, value in batches(arguments.quick).items()}))
    elif arguments.sources:
        compare_sources(arguments.quick)
    else:
        compare(arguments.quick, arguments.before)


if __name__ == "__main__":
    main()
