"""Compare settings over seeds on small worlds: number of turns, algorithms, and credit by state.

    python benchmarks/studies.py STUDY... [--worlds hunt ...] [--seeds 0 1 2] [--jobs 1] [--output FOLDER]
        [--curves FOLDER] [--quick]

`turns` gives chains 4 and 8 turns; `algorithms` trains by PPO, REINFORCE++, GRPO and RLOO; `gigpo` compares credit by
state with GRPO. All runs of a world begin with the same warm start (the first stage of its recipe, seed 0), and train
its second stage with a learning rate that falls over the last 15 steps. Success is measured on the training chains of
each step, and on held-out tasks, sampled, before and after. `--curves` draws a picture for each study and world: lines
are the means over seeds of the success averaged over 5 steps, and bands reach from the lowest to the highest seed. The
last line is JSON: each setting's success on held-out tasks after training, mean over seeds.

Runs that already exist in `--output` are not repeated, so you can interrupt, continue and extend a study.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure
from training_runs import only_checkpoint, read_steps, train_once

RECIPES = Path(__file__).parents[1] / "recipes"
WORLDS = {
    "hunt": RECIPES / "quickstart",
    "webshop": RECIPES / "webshop",
    "two_hop": RECIPES / "two_hop",
    "code": RECIPES / "code_interpreter",
}
DECAY_STEPS = 15
SMOOTHED = 5
"""Number of steps averaged in a point of a curve."""
LEARNED = 0.8
"""A run has learned at the first step whose curve reaches this value."""


@dataclass(frozen=True)
class Setting:
    """A compared setting: its name, and its overrides of a world's recipe."""

    name: str
    overrides: tuple[str, ...] = ()


GRPO = Setting("grpo")
GIGPO = Setting("gigpo", ("train.algorithm=gigpo",))
ALGORITHMS = (
    Setting("ppo", ("train.algorithm=ppo", "train.advantage.options.critic_learning_rate=1e-3")),
    Setting("reinforce_pp", ("train.algorithm=reinforce_pp",)),
    GRPO,
    Setting("rloo", ("train.algorithm=rloo",)),
)
TURNS = tuple(Setting(f"{turns} turns", (f"rollout.max_turns={turns}",)) for turns in (4, 8))
STUDIES: dict[str, dict[str, tuple[Setting, ...]]] = {
    "turns": {"hunt": TURNS, "webshop": TURNS, "code": TURNS},
    "algorithms": {"hunt": ALGORITHMS, "two_hop": ALGORITHMS},
    "gigpo": {"hunt": (GRPO, GIGPO), "webshop": (GRPO, GIGPO)},
}
"""Study -> world -> compared settings."""


@dataclass(frozen=True)
class Run:
    """One training run."""

    world: str
    setting: Setting
    seed: int

    @property
    def name(self) -> str:
        return f"{self.world}-{self.setting.name.replace(' ', '-')}-{self.seed}"


@dataclass(frozen=True)
class Result:
    """The success of a run: of the training chains in each step, and on held-out tasks."""

    success: list[float]
    before: float
    after: float

    @property
    def curve(self) -> list[float]:
        return [statistics.fmean(self.success[max(0, end - SMOOTHED) : end]) for end in range(1, len(self.success) + 1)]

    @property
    def learned(self) -> int | None:
        """The step at which the run had learned."""
        return next((step for step, value in enumerate(self.curve, 1) if value >= LEARNED), None)


def prepared_overrides(recipe: Path, prepared: Path) -> Iterator[str]:
    """Yield overrides that replace `${prepared}` in a recipe by an existing folder."""

    def replaced(value: Any, path: str) -> Iterator[str]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from replaced(inner, f"{path}.{key}" if path else key)
        elif isinstance(value, str) and "${prepared}" in value and path != "model.path":
            yield f"{path}={value.replace('${prepared}', str(prepared))}"

    yield from replaced(yaml.safe_load(recipe.read_text(encoding="utf-8")), "")


def warm_up(world: str, folder: Path, threads: int) -> Path:
    """Train the first stage of a world unless it exists, and return the folder of the run."""
    warm = folder / f"{world}-warm"
    train_once(threads, warm, WORLDS[world] / "sft.yaml", "seed=0")
    return warm


def train(run: Run, folder: Path, threads: int, steps: int | None) -> Result:
    """Train a run unless it exists, and return its result."""
    recipe, warm = WORLDS[run.world] / "grpo.yaml", folder / f"{run.world}-warm"
    settings = [f"seed={run.seed}", "prepare=null", f"model.path={only_checkpoint(warm)}"]
    settings += prepared_overrides(recipe, warm / "prepared")
    if steps is None:
        settings += ["train.schedule=wsd", f"train.decay_steps={DECAY_STEPS}"]
    else:
        settings += ["train.schedule=constant", f"train.steps={steps}", "eval.data.limit=100"]
    # a short run must not be mistaken for a whole one
    output = folder / (run.name if steps is None else f"{run.name}-quick")
    summary = train_once(threads, output, recipe, *settings, *run.setting.overrides)
    success = [step["success"] for step in read_steps(output)]
    result = Result(success, summary["success_before"], summary["success_after"])
    print(f"{run.name}: held-out success {result.before:.3f} -> {result.after:.3f}", flush=True)
    return result


def tell(study: str, world: str, results: dict[str, list[Result]]) -> None:
    """Print the table of one study in one world."""
    print(f"\n{study}, {world}\n")
    print(f"| | seeds | before | after, mean | lowest | mean of all steps | {LEARNED} reached at step |")
    print("|---|---|---|---|---|---|---|")
    for name, runs in results.items():
        after = [run.after for run in runs]
        whole = statistics.fmean(statistics.fmean(run.success) for run in runs)
        learned = ", ".join("never" if run.learned is None else str(run.learned) for run in runs)
        before = statistics.fmean(run.before for run in runs)
        print(
            f"| {name} | {len(runs)} | {before:.3f} | {statistics.fmean(after):.3f} | {min(after):.3f} | {whole:.3f} | "
            f"{learned} |"
        )


def draw(results: dict[str, list[Result]], title: str, picture: Path) -> None:
    """Draw a line with a band for each setting."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, runs in results.items():
        points = list(zip(*(run.curve for run in runs), strict=False))
        steps = range(1, len(points) + 1)
        (line,) = axes.plot(steps, [statistics.fmean(values) for values in points], label=name, linewidth=1.6)
        axes.fill_between(
            steps, [min(values) for values in points], [max(values) for values in points], alpha=0.2, linewidth=0,
            color=line.get_color(),
        )  # fmt: skip
    axes.set(xlabel="step", ylabel="success of the training chains", title=title, ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)


def main() -> None:
    """Run the studies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"some of {', '.join(STUDIES)}; all by default")
    parser.add_argument("--worlds", nargs="+", choices=list(WORLDS), default=list(WORLDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="concurrent runs, each with its share of the cores")
    parser.add_argument("--output", type=Path, help="folder of the runs; default: a temporary one")
    parser.add_argument("--curves", type=Path, help="folder of the pictures; default: none")
    parser.add_argument("--quick", action="store_true", help="one seed of 3 steps, in the first world of each study")
    options = parser.parse_args()
    studies = options.studies or list(STUDIES)
    if unknown := set(studies) - set(STUDIES):
        parser.error(f"no study is called {min(unknown)}; use some of {', '.join(STUDIES)}")
    if options.jobs < 1:
        parser.error(f"--jobs: got {options.jobs}; give a number from 1")
    for study in studies:
        if not set(STUDIES[study]) & set(options.worlds):
            parser.error(
                f"{study} has none of the worlds {', '.join(options.worlds)}; it has {', '.join(STUDIES[study])}"
            )
    threads = max(1, len(os.sched_getaffinity(0)) // options.jobs)
    seeds, steps = ([0], 3) if options.quick else (options.seeds, None)
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(options.jobs) as pool:
        folder = options.output or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        figures: dict[str, float] = {}
        for study in studies:
            worlds = [world for world in STUDIES[study] if world in options.worlds]
            for world in worlds[:1] if options.quick else worlds:
                warm_up(world, folder, threads * options.jobs)
                settings = STUDIES[study][world]
                runs = [Run(world, setting, seed) for setting in settings for seed in seeds]
                found = dict(zip(runs, pool.map(lambda run: train(run, folder, threads, steps), runs), strict=True))
                results = {s.name: [result for run, result in found.items() if run.setting == s] for s in settings}
                tell(study, world, results)
                if options.curves is not None:
                    picture = options.curves / f"studies-{study}-{world}.png"
                    draw(results, f"{study}, {world}: {len(seeds)} seeds", picture)
                for name, done in results.items():
                    mean = statistics.fmean(result.after for result in done)
                    figures[f"{study}/{world}/{name}"] = round(mean, 3)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
