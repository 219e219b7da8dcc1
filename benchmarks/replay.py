"""Train a run's saved groups again, in the order in which the run trained them, and measure the drift of the format.

Nothing is sampled: as long as the weights are those of the run, all metrics equal the run's (unless it had
rollout.late_chains=baseline: here, tokens that were too old are trained). Overrides with `key=value`
(another loss, another optimiser) change only the training on the same data. After each step the script prints the lost
certainty: the decrease in probability of the tokens in the first two batches of which the first weights were certain (p
above 0.999: tags, names, ends of turns). This shows the drift of the format long before other tokens are sampled in
their place. The last line is JSON: the loss of certainty after the last step divided by the one after the first
(`lost`).

    python benchmarks/replay.py RECIPE GROUPS [--credit FILE] [--steps 10] [key=value ...]

GROUPS is the run's trajectories/train.jsonl, FILE its trajectories/credit.jsonl (default: the one next to GROUPS).
"""

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from agentfactory.recipe.load import load_recipe
from agentfactory.recipe.schema import Recipe, StagedRecipe
from agentfactory.rollout.groups.group_files import CREDIT_FILE, read_groups
from agentfactory.rollout.trajectory import Group
from agentfactory.trainers.batches.batch import TrainingRow
from agentfactory.trainers.loop.token_advantages import Credit, needed_scores
from agentfactory.trainers.processes.accelerator import make_accelerator
from agentfactory.trainers.update.learner import Learner
from agentfactory.trainers.update.policy_update import update_metrics, update_policy

SURE = math.log(0.999)


def in_order(groups: Path, credit: Path) -> list[list[Group]]:
    """Return the batches of the run, ordered by step."""
    steps: dict[str, int] = {}
    for line in credit.open(encoding="utf-8"):
        entry = json.loads(line)
        steps[entry["group"]] = entry["step"]
    batches: dict[int, list[Group]] = defaultdict(list)
    for group in read_groups(groups):
        if group.id in steps:
            batches[steps[group.id]].append(group)
    return [batches[step] for step in sorted(batches)]


def lost_certainty(learner: Learner, rows: list[TrainingRow]) -> float:
    """Return the mean of 1 - p over the tokens of which the behaviour policy was certain."""
    lost = [
        1 - math.exp(now)
        for row in learner.score(rows, ["proximal"])
        for now, then in zip(row.streams["proximal"], row.streams["behaviour"], strict=True)
        if then > SURE
    ]
    return fmean(lost)


def replay(recipe: Recipe, batches: list[list[Group]]) -> list[float]:
    """Train, print each step, and return the lost certainty after each."""
    learner = Learner(recipe, make_accelerator(recipe), recipe.rollout.temperature)
    probes = Credit([group for batch in batches[:2] for group in batch], recipe).rows
    scores = needed_scores(recipe)
    lost = []
    for number, groups in enumerate(batches, 1):
        credit = Credit(groups, recipe)
        credited = credit.assign(learner.score(credit.rows, scores) if scores else credit.rows)
        batch = learner.deal(credited.rows, credited.normaliser)
        metrics = update_metrics(update_policy(learner, batch, recipe).updates, batch)
        learner.schedule.step()
        lost.append(lost_certainty(learner, probes))
        print(
            f"step {number}: grad_norm {metrics['grad_norm']:.3f}, entropy {metrics['entropy']:.3f}, "
            f"mismatch/kl {metrics['mismatch/kl']:.5f}; lost certainty {lost[-1]:.1e}",
            flush=True,
        )
    return lost


def main() -> None:
    """Run the replay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("groups", type=Path)
    parser.add_argument("--credit", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    options = parser.parse_intermixed_args()
    credit = options.credit or options.groups.with_name(CREDIT_FILE)
    # tools and tasks are not needed
    settings = [f"train.from_trajectories={options.groups.resolve()}", "tools=[]", "data=null", "eval.data=null"]
    recipe = load_recipe(str(options.recipe), [*settings, *options.overrides])
    if isinstance(recipe, StagedRecipe):
        raise SystemExit(f"{options.recipe} has stages: name the recipe in the folder of one of them")
    lost = replay(recipe, in_order(options.groups, credit)[: options.steps])
    print(json.dumps({"lost": round(lost[-1] / lost[0], 2)}))


if __name__ == "__main__":
    main()
