"""Compare off-policy with on-policy training: success after 50 steps by staleness, algorithm and seed.

The task is the quickstart's. Its moves take a log-normal time (median 0.03 s, sigma 0.5; 2 % of them take ten times as
long), so that chains of a group end at different times and long ones are overtaken. All runs begin with the warm start
of the quickstart's first stage, and train the same recipe with `agentfactory train`. Algorithms other than grpo use a
learning rate that falls over the last 15 steps, as in `make learn-worlds`. Success is measured on 200 held-out tasks,
sampled; a run has collapsed if it ends below 0.5. The last line is JSON: for each algorithm and staleness, the mean
divided by that of staleness 0 (`mean/...`), and the worst run with staleness above 0 (`worst`).

    python benchmarks/staleness.py [key=value ...] [--quick] [--algorithms grpo rloo ...] [--staleness 0 1 2 4]
        [--seeds 0 1 ...] [--jobs 2] [--output FOLDER]

Runs that already exist in `--output` are not repeated, so you can interrupt, continue and extend a study.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from async_training import NO_LATENCY, QUICKSTART, write_recipe, write_tasks
from training_runs import only_checkpoint, read_steps, train_once

LATENCY = {"median": 0.03, "sigma": 0.5, "tail": 0.02, "factor": 10.0}
STEPS = 50
COLLAPSED = 0.5
OTHERS = ("train.schedule=wsd", "train.decay_steps=15")


@dataclass(frozen=True)
class Run:
    """One training run of the study."""

    algorithm: str
    staleness: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.algorithm}-{self.staleness}-{self.seed}"


def prepare(folder: Path, threads: int, steps: int) -> dict[str, Path]:
    """Create the warm start and the recipes, by algorithm (`ppo`; `grpo` is for all others)."""
    warm = folder / "warm"
    train_once(threads, warm, QUICKSTART / "sft.yaml")
    model = only_checkpoint(warm)
    tasks = write_tasks(warm / "prepared" / "train.jsonl", folder / "tasks.jsonl", LATENCY)
    # only training is measured: held-out tasks run without latency
    heldout = write_tasks(warm / "prepared" / "heldout.jsonl", folder / "heldout.jsonl", NO_LATENCY)
    recipe = write_recipe(folder, model, tasks, heldout, steps)
    with_critic = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    ppo = yaml.safe_load((QUICKSTART / "ppo.yaml").read_text(encoding="utf-8"))
    with_critic["train"] |= ppo["train"]
    path = folder / "ppo.yaml"
    path.write_text(yaml.safe_dump(with_critic), encoding="utf-8")
    return {"grpo": recipe, "ppo": path}


def train(run: Run, folder: Path, recipes: dict[str, Path], threads: int, overrides: list[str]) -> dict[str, Any]:
    """Train a run unless it exists, and return its results."""
    output = folder / run.name
    settings = [f"train.algorithm={run.algorithm}", f"rollout.max_staleness={run.staleness}", f"seed={run.seed}"]
    settings += [] if run.algorithm == "grpo" else OTHERS
    recipe = recipes.get(run.algorithm, recipes["grpo"])
    summary = train_once(threads, output, recipe, *settings, *overrides)
    steps = read_steps(output)
    figures = {
        "success": summary["success_after"],
        "age": statistics.fmean(step["staleness/mean"] for step in steps),
        "entropy": max(step["entropy"] for step in steps),
        "warnings": summary["warnings"],
    }
    print(
        f"{run.name}: success {figures['success']:.3f}, mean age of tokens {figures['age']:.2f}, "
        f"highest entropy {figures['entropy']:.2f}" + "".join(f"\n  warned: {text}" for text in figures["warnings"]),
        flush=True,
    )
    return figures


def tell(found: dict[Run, dict[str, Any]]) -> dict[str, float]:
    """Print the table; return the ratios of the last line."""
    by_mode: dict[tuple[str, int], list[float]] = defaultdict(list)
    warned: Counter[tuple[str, int]] = Counter()
    for run, figures in found.items():
        by_mode[run.algorithm, run.staleness].append(figures["success"])
        warned[run.algorithm, run.staleness] += bool(figures["warnings"])
    print("\n| algorithm | staleness | seeds | success, mean | worst | collapsed | warned |")
    print("|---|---|---|---|---|---|---|")
    ratios: dict[str, float] = {}
    for (algorithm, staleness), success in sorted(by_mode.items()):
        collapsed = sum(value < COLLAPSED for value in success)
        mean = statistics.fmean(success)
        print(
            f"| {algorithm} | {staleness} | {len(success)} | {mean:.3f} | {min(success):.3f} | {collapsed} | "
            f"{warned[algorithm, staleness]} |"
        )
        in_step = by_mode.get((algorithm, 0))
        if staleness and in_step:
            ratios[f"mean/{algorithm}/{staleness}"] = round(mean / statistics.fmean(in_step), 3)
    if stale := [figures["success"] for run, figures in found.items() if run.staleness]:
        ratios["worst"] = round(min(stale), 3)
    return ratios


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed of 8 steps at staleness 0 and 4")
    parser.add_argument("--algorithms", nargs="+", default=["grpo"])
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1, 2, 4])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(10)))
    parser.add_argument("--jobs", type=int, default=2, help="concurrent runs, each with its share of the cores")
    parser.add_argument("--output", type=Path, help="folder of the runs; default: a temporary one")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    options = parser.parse_intermixed_args()
    if options.quick:
        options.staleness, options.seeds = [0, 4], [0]
    steps = 8 if options.quick else STEPS
    threads = max(1, len(os.sched_getaffinity(0)) // options.jobs)
    runs = [Run(*chosen) for chosen in product(options.algorithms, options.staleness, options.seeds)]
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(options.jobs) as pool:
        folder = options.output or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        recipes = prepare(folder, threads * options.jobs, steps)
        results = pool.map(lambda run: train(run, folder, recipes, threads, options.overrides), runs)
        ratios = tell(dict(zip(runs, results, strict=True)))
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
