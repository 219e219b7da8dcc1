"""Training steps per minute with slow tools: rollouts up to two versions ahead, and in step (staleness 2 and 0).

The task is the quickstart's. Its moves take a log-normal time (median 0.3 s, sigma 0.5; 2 % of them take ten times as
long), and runs begin with the warm start from its first stage. Both runs train the same recipe with `agentfactory
train`; only max_staleness differs. A third, short run without latency measures the cost of decoding alone.

A simulation of the scheduler, in which turns never wait for each other or for an update, gives the upper bound for both
runs. Its inputs are the cost of decoding, the tool calls of the synchronous run's chains, the same latencies, and the
measured time of updates (which are slower during decoding, because both use the cores).

The last line is JSON: `steps_per_minute_vs_sync`, and `vs_simulated_bound`, the steps per minute of staleness 2 divided
by the simulated ones.

    python benchmarks/async_training.py [--quick]
"""

import argparse
import heapq
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from agentfactory.base.user_code.loading import load_object
from agentfactory.rollout.config import LateChains
from agentfactory.rollout.groups.group_files import read_groups
from agentfactory.rollout.groups.staleness import Admission, BatchChoice, Candidate
from agentfactory.rollout.trajectory import Trajectory

draw_latency = load_object("slow_treasure_hunt.py:draw_latency", Path(__file__).parent)

QUICKSTART = Path(__file__).parents[1] / "recipes" / "quickstart"
LATENCY = {"median": 0.3, "sigma": 0.5, "tail": 0.02, "factor": 10.0}
NO_LATENCY = {"median": 0.0, "sigma": 0.0, "tail": 0.0, "factor": 1.0}
BATCH, GROUP = 8, 16
WARM_UP = 3
"""Number of initial steps left out of the rates, in which the pipeline of staleness 2 fills."""
DRAIN = 3
"""Number of final steps left out: a run starts no groups for steps that it will not take."""


def agentfactory(*arguments: str) -> None:
    """Run a command; raise CalledProcessError if it fails."""
    subprocess.run([sys.executable, "-m", "agentfactory", *arguments], check=True)


def write_tasks(source: Path, target: Path, latency: dict[str, float]) -> Path:
    """Write the tasks of `source` with a latency, and return `target`."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    target.write_text("".join(json.dumps({**row, "latency": latency}) + "\n" for row in rows), encoding="utf-8")
    return target


def write_recipe(folder: Path, model: Path, tasks: Path, heldout: Path, steps: int) -> Path:
    """Write the quickstart's second stage with slow tools, and return its path."""
    recipe = yaml.safe_load((QUICKSTART / "grpo.yaml").read_text(encoding="utf-8"))
    del recipe["prepare"]
    recipe["model"]["path"] = str(model)
    recipe["data"]["path"] = str(tasks)
    recipe["eval"]["data"]["path"] = str(heldout)
    recipe["tools"] = [str(Path(__file__).parent / "slow_treasure_hunt.py:SlowTreasureHunt")]
    recipe["rollout"] |= {"group_size": GROUP, "concurrency": 4 * BATCH * GROUP}
    recipe["train"] |= {"steps": steps, "batch_size": BATCH}
    path = folder / f"{tasks.stem}.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


@dataclass
class Result:
    """The result of one training run: the metrics of each step between warm-up and drain, and the final success."""

    folder: Path
    steps: list[dict[str, Any]]
    success: float

    @property
    def steps_per_minute(self) -> float:
        return 60 / statistics.fmean(step["seconds/step"] for step in self.steps)

    def mean(self, *names: str) -> float:
        return statistics.fmean(sum(step[name] for name in names) for step in self.steps)

    def chains(self) -> list[Trajectory]:
        """Return the chains that ended after the warm-up."""
        groups = list(read_groups(self.folder / "trajectories" / "train.jsonl"))[WARM_UP * BATCH :]
        return [chain for group in groups for chain in group.trajectories if chain.reward is not None]


def train(recipe: Path, output: Path, *overrides: str) -> Result:
    """Run `agentfactory train` on a recipe."""
    agentfactory("train", str(recipe), f"output={output}", *overrides)
    logged = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [entry for entry in logged if "loss" in entry][WARM_UP:-DRAIN]
    summary = json.loads((output / "summary.json").read_text())
    return Result(output, steps, summary["success_after"])


@dataclass
class _Group:
    oldest: int
    rewards: tuple[float, ...] = ()
    complete: bool = False
    newest: int = 0
    """Version when a chain ended last."""


@dataclass
class Simulation:
    """A simulation of the scheduler with drawn durations: a batch takes `update_seconds`, a turn `turn_seconds`, and
    its call a drawn latency; nothing ever waits for a server. `chains` are pairs (tool calls, reward) to draw from."""

    chains: list[tuple[int, float]]
    turn_seconds: float
    update_seconds: float
    max_staleness: int
    steps: int
    seed: int = 0
    late: LateChains = LateChains.DROP
    _now: float = 0.0
    _events: list[tuple[float, int, str, float]] = field(default_factory=list)
    _open: dict[str, _Group] = field(default_factory=dict)

    def step_seconds(self) -> float:
        """Return the mean duration of a step."""
        self._draws, self._serial = random.Random(self.seed), 0
        self._admission = Admission(BATCH, self.max_staleness, self.steps * BATCH)
        self._batches = BatchChoice(self._admission, self.late)
        ends = list(self._step_ends())
        return (ends[-DRAIN - 1] - ends[WARM_UP - 1]) / (len(ends) - WARM_UP - DRAIN)

    def _step_ends(self) -> Iterator[float]:
        while True:
            while self._admission.may_start():
                self._start_group()
            choice = self._batches.choose(
                [
                    Candidate(name, g.oldest, g.complete, len(g.rewards), len(set(g.rewards)) > 1, g.newest)
                    for name, g in self._open.items()
                ]
            )
            if choice is not None:
                for name in (*choice.train, *choice.cancel):
                    del self._open[name]
                for _ in choice.cancel:
                    self._admission.dropped()
                self._push(self.update_seconds, "", 0.0)
                continue
            self._now, _, name, reward = heapq.heappop(self._events)
            if not name:
                yield self._now
                version = self._admission.version + 1
                if version == self.steps:
                    return
                self._admission.publish(version)
            elif name in self._open:
                group = self._open[name]
                group.rewards = (*group.rewards, reward)
                group.complete, group.newest = len(group.rewards) == GROUP, self._admission.version

    def _start_group(self) -> None:
        name = str(self._admission.started + self._serial)
        self._admission.start()
        self._open[name] = _Group(self._admission.version)
        for _ in range(GROUP):
            calls, reward = self._draws.choice(self.chains)
            waits = sum(draw_latency(self._draws, **LATENCY) for _ in range(calls))
            self._push((calls + 1) * self.turn_seconds + waits, name, reward)

    def _push(self, delay: float, name: str, reward: float) -> None:
        self._serial += 1
        heapq.heappush(self._events, (self._now + delay, self._serial, name, reward))


def compare(folder: Path, sft_steps: int, steps: int, calibration_steps: int, seeds: range) -> dict[str, float]:
    """Create the warm start, run everything and print the results."""
    warm = folder / "warm"
    agentfactory("train", str(QUICKSTART / "sft.yaml"), f"output={warm}", f"train.steps={sft_steps}")
    (model,) = (warm / "checkpoints").iterdir()
    source, heldout = warm / "prepared" / "train.jsonl", warm / "prepared" / "heldout.jsonl"
    # only training is measured: held-out tasks run without latency
    heldout = write_tasks(heldout, folder / "heldout.jsonl", NO_LATENCY)
    fast = write_recipe(folder, model, write_tasks(source, folder / "fast.jsonl", NO_LATENCY), heldout, steps)
    slow = write_recipe(folder, model, write_tasks(source, folder / "slow.jsonl", LATENCY), heldout, steps)

    alone = train(fast, folder / "alone", f"train.steps={calibration_steps}")
    generate = alone.mean("seconds/wait")
    print(
        f"without latency: {generate:.2f} s of decoding a step, {alone.steps_per_minute:.1f} steps a minute", flush=True
    )

    speedups, rates, success = [], [], {0: [], 2: []}
    for seed in seeds:
        results = {}
        for k in (0, 2):
            result = results[k] = train(slow, folder / f"k{k}-{seed}", f"rollout.max_staleness={k}", f"seed={seed}")
            success[k].append(result.success)
            # from the synchronous run, which cancels no chain. Turns run concurrently, so without latency a step
            # takes as long as the turns of its longest chain
            chains = [(int(c.metrics["tool_calls"]), c.reward or 0.0) for c in results[0].chains()]
            turn = generate / (1 + max(calls for calls, _ in chains))
            update = result.mean("seconds/update", "seconds/sync")
            simulated = Simulation(chains, turn, update, k, steps=400).step_seconds()
            if k:
                # one machine decodes all turns
                simulated = max(simulated, generate)
                rates.append(result.steps_per_minute * simulated / 60)
            ended = result.mean("cancelled/chains") / (BATCH * GROUP)
            print(
                f"seed {seed}, staleness {k}: {result.steps_per_minute:.1f} steps a minute, simulated "
                f"{60 / simulated:.1f}; success {result.success:.3f}; mean age of tokens "
                f"{result.mean('staleness/mean'):.2f}; {ended:.1%} of the chains ended by the bound; "
                f"update {result.mean('seconds/update'):.2f} s, sync {result.mean('seconds/sync'):.2f} s, "
                f"wait {result.mean('seconds/wait'):.2f} s",
                flush=True,
            )
        speedups.append(results[2].steps_per_minute / results[0].steps_per_minute)
    difference = statistics.fmean(success[2]) - statistics.fmean(success[0])
    print(f"success at staleness 2 less success at staleness 0: {difference:+.3f} over {len(seeds)} seeds")
    return {
        "steps_per_minute_vs_sync": round(statistics.fmean(speedups), 2),
        "vs_simulated_bound": round(statistics.fmean(rates), 2),
    }


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed of 20 steps in place of three of 50")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as folder:
        sizes = (300, 20, 8, range(1)) if quick else (300, 50, 10, range(3))
        figures = compare(Path(folder), *sizes)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
