"""Compare the policies for late chains (rollout.late_chains) under a staleness bound: bias, learning and speed.

Two tasks, both hunts of the quickstart with slow moves: `any`, where each move takes a log-normal time (median 0.05 s,
sigma 0.5, 3 % of them 120 times as long), and `right`, where only the move that finds the treasure is slow (median 3 s,
sigma 0.7), so that the chains that take long are the right ones. All runs begin with the warm start of the quickstart's
first stage. At staleness 0 all chains are trained, whatever their latency, and the runs have none.

- Simulated: steps per minute of the scheduler alone, by async_training.py's simulation, with chains of 3 to 6 calls.
- Frozen: 20 steps with a learning rate of 1e-12, so that all runs sample the same distribution of chains. The trained
  chains are compared with those of staleness 0.
- Learning: 30 steps, with held-out success (200 tasks, sampled, without latency) every 10 steps, and its mean over the
  wall time that the fastest of the compared runs took. Evaluations are not part of that time.

The last line is JSON: by task, staleness and policy, `bias/...`, the success of the trained chains of the frozen runs
divided by that of staleness 0, `success/...`, the mean after 30 steps, and `at_equal_time/...`.

    python benchmarks/late_chains.py [--quick] [--tasks any right] [--late wait baseline drop] [--staleness 2 4]
        [--seeds 0 1 ...] [--jobs 2] [--output FOLDER]

Runs that already exist in `--output` are not repeated.
"""

import argparse
import json
import os
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import yaml
from async_training import NO_LATENCY, QUICKSTART, Simulation, write_recipe, write_tasks
from training_runs import only_checkpoint, read_steps, train_once

from agentfactory.rollout.config import LateChains

LATENCIES = {
    "any": {"median": 0.05, "sigma": 0.5, "tail": 0.03, "factor": 120.0},
    "right": {"median": 3.0, "sigma": 0.7, "tail": 0.0, "factor": 1.0},
}
STEPS, FROZEN_STEPS, EVERY = 30, 20, 10
WARM_UP = 4
"""Number of initial steps of a frozen run that are left out: a run begins with empty queues."""
LENGTHS = {"success": "success", "turns": "turns", "tokens": "trajectory/sampled_tokens"}


@dataclass(frozen=True)
class Mode:
    """A task, with a staleness and a policy."""

    task: str
    staleness: int
    late: str

    @property
    def name(self) -> str:
        return f"{self.task}/{self.staleness}" + (f"/{self.late}" if self.staleness else "")

    @property
    def recipe(self) -> str:
        """The name of its recipe: one with latency or, at staleness 0, without."""
        return f"{self.task}{'' if self.staleness else '-fast'}"


def simulate() -> None:
    """Print the steps per minute that the scheduler allows, by seconds of an update and policy, at staleness 2."""
    draws = random.Random(0)
    chains = [(calls, draws.random()) for calls in (3, 4, 4, 5, 5, 6, 6) for _ in range(9)]
    for update in (1.0, 3.0):
        rates = {late: 60 / Simulation(chains, 0.05, update, 2, 200, late=late).step_seconds() for late in LateChains}
        told = ", ".join(f"{late} {rate:.1f}" for late, rate in rates.items())
        print(f"simulated steps a minute, updates of {update:g} s: {told}", flush=True)


def prepare(folder: Path, threads: int, steps: int, tasks: list[str]) -> dict[str, Path]:
    """Create the warm start and two recipes per task, by name: with latency and without."""
    warm = folder / "warm"
    train_once(threads, warm, QUICKSTART / "sft.yaml")
    heldout = write_tasks(warm / "prepared" / "heldout.jsonl", folder / "heldout.jsonl", NO_LATENCY)
    recipes = {}
    for task in tasks:
        for name, latency in ((task, LATENCIES[task]), (f"{task}-fast", NO_LATENCY)):
            rows = write_tasks(warm / "prepared" / "train.jsonl", folder / f"{name}.jsonl", latency)
            path = write_recipe(folder, only_checkpoint(warm), rows, heldout, steps)
            recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
            recipe["eval"] |= {"every": EVERY, "greedy": False}
            if task == "right":
                recipe["tools"] = [str(Path(__file__).parent / "slow_treasure_hunt.py:SlowFindHunt")]
            path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
            recipes[name] = path
    return recipes


def frozen(mode: Mode, seed: int, folder: Path, recipe: Path, threads: int, steps: int) -> dict[str, float]:
    """Run without learning; return means over the steps."""
    output = folder / f"frozen-{mode.name.replace('/', '-')}-{seed}"
    settings = [
        f"train.steps={steps}",
        "train.learning_rate=1e-12",
        "train.warmup_steps=0",
        "eval.data=null",
        "eval.every=0",
    ]
    train_once(threads, output, recipe, *settings, *_settings(mode, seed))
    made = read_steps(output)[WARM_UP:]
    figures = {short: fmean(step[name] for step in made) for short, name in LENGTHS.items()}
    figures["cancelled"] = sum(step["cancelled/chains"] for step in made) / sum(step["chains"] for step in made)
    figures["untrained"] = fmean(step.get("staleness/untrained", 0.0) for step in made)
    figures["seconds"] = fmean(step["seconds/step"] for step in made)
    return figures


def learning(mode: Mode, seed: int, folder: Path, recipe: Path, threads: int) -> list[tuple[float, float]]:
    """Train; return held-out success over the seconds of training."""
    output = folder / f"{mode.name.replace('/', '-')}-{seed}"
    train_once(threads, output, recipe, *_settings(mode, seed))
    curve, seconds = [], 0.0
    for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        entry: dict[str, Any] = json.loads(line)
        seconds += entry.get("seconds/step", 0.0)
        if "eval/sampled/success" in entry:
            curve.append((seconds, entry["eval/sampled/success"]))
    print(f"{mode.name}, seed {seed}: " + ", ".join(f"{s:.2f} after {t:.0f} s" for t, s in curve), flush=True)
    return curve


def _settings(mode: Mode, seed: int) -> list[str]:
    return [f"rollout.max_staleness={mode.staleness}", f"rollout.late_chains={mode.late}", f"seed={seed}"]


def at(curve: list[tuple[float, float]], seconds: float) -> float:
    """Return the mean of a curve up to `seconds`, linear between its points and constant after the last."""
    times, values = zip(*curve, strict=True)
    grid = np.linspace(0.0, seconds, 1000)
    return float(np.interp(grid, times, values).mean())


def tell(
    modes: list[Mode], still: dict[Mode, list[dict[str, float]]], curves: dict[Mode, list[Any]]
) -> dict[str, float]:
    """Print both tables; return the figures of the last line."""
    ratios: dict[str, float] = {}
    print(
        "\n| task, staleness, policy | success of trained chains | turns | tokens | cancelled | untrained | s a step |"
    )
    print("|---|---|---|---|---|---|---|")
    for mode in modes:
        mean = {name: fmean(run[name] for run in still[mode]) for name in still[mode][0]}
        print(
            f"| {mode.name} | {mean['success']:.3f} | {mean['turns']:.2f} | {mean['tokens']:.1f} | "
            f"{mean['cancelled']:.1%} | {mean['untrained']:.1%} | {mean['seconds']:.2f} |"
        )
        in_step = fmean(run["success"] for run in still[Mode(mode.task, 0, "wait")])
        if mode.staleness:
            ratios[f"bias/{mode.name}"] = round(mean["success"] / in_step, 3)
    print("\n| task, staleness, policy | success after 30 steps, mean | worst | seconds | mean success at equal time |")
    print("|---|---|---|---|---|")
    for mode in modes:
        rivals = [other for other in modes if other.task == mode.task and other.staleness == mode.staleness]
        shared = min(curve[-1][0] for other in rivals for curve in curves[other])
        ends = [curve[-1][1] for curve in curves[mode]]
        ratios[f"success/{mode.name}"] = round(fmean(ends), 3)
        ratios[f"at_equal_time/{mode.name}"] = round(fmean(at(curve, shared) for curve in curves[mode]), 3)
        print(
            f"| {mode.name} | {fmean(ends):.3f} | {min(ends):.3f} | {fmean(c[-1][0] for c in curves[mode]):.0f} | "
            f"{ratios[f'at_equal_time/{mode.name}']:.3f} |"
        )
    return ratios


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed of `right` at staleness 2, with 8 and 10 steps")
    parser.add_argument("--tasks", nargs="+", default=["any", "right"])
    parser.add_argument("--late", nargs="+", default=["wait", "baseline", "drop"])
    parser.add_argument("--staleness", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    parser.add_argument("--jobs", type=int, default=2, help="concurrent runs, each with its share of the cores")
    parser.add_argument("--output", type=Path, help="folder of the runs; default: a temporary one")
    options = parser.parse_args()
    if options.quick:
        options.tasks, options.staleness, options.seeds = ["right"], [2], [0]
    steps, frozen_steps = (10, 8) if options.quick else (STEPS, FROZEN_STEPS)
    threads = max(1, len(os.sched_getaffinity(0)) // options.jobs)
    modes = [
        *(Mode(task, 0, "wait") for task in options.tasks),
        *(Mode(*chosen) for chosen in product(options.tasks, options.staleness, options.late)),
    ]
    runs = [(mode, seed) for seed in options.seeds for mode in modes]
    simulate()
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(options.jobs) as pool:
        folder = options.output or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        recipes = prepare(folder, threads * options.jobs, steps, options.tasks)
        still = list(pool.map(lambda run: frozen(*run, folder, recipes[run[0].recipe], threads, frozen_steps), runs))
        curves = list(pool.map(lambda run: learning(*run, folder, recipes[run[0].recipe], threads), runs))
    by_mode = [(mode, [number for number, (other, _) in enumerate(runs) if other == mode]) for mode in modes]
    ratios = tell(
        modes,
        {mode: [still[number] for number in numbers] for mode, numbers in by_mode},
        {mode: [curves[number] for number in numbers] for mode, numbers in by_mode},
    )
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
