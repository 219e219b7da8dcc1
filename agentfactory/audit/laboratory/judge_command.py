"""`agentfactory judge check`: its options and its exit status."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from agentfactory.base.errors import SettingError

ABOUT = "compare a recipe's judges with people's labels"
EXAMPLES = ["judge check recipe.yaml labels.jsonl", "judge check recipe.yaml labels.jsonl --json"]


def add_options(command: argparse.ArgumentParser) -> None:
    about = "print agreement (Cohen's kappa), and bias by length and by position"
    command.add_argument("action", metavar="check", choices=("check",), help=about)
    command.add_argument("recipe", metavar="RECIPE", help="a YAML file with judges among its rewards")
    about = 'lines like {"prediction": TEXT, "label": 1}, with fields of the row; docs/judges.md'
    command.add_argument("labels", metavar="LABELS.jsonl", type=Path, help=about)
    about = "labels that mean the rewards 0 and 1; default: the ends of the judge's scale"
    command.add_argument("--scale", nargs=2, type=float, metavar=("WORST", "BEST"), help=about)
    command.add_argument("--json", action="store_true", help="print JSON, one line per judge")


def run(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Ask the judges and print their agreement. Return 1 if there is a text without a verdict. Raises SettingError."""
    # these take a second to import
    from agentfactory.audit.laboratory.agreement import agreement, lines, read_labels
    from agentfactory.base.processes.interruption import run_interruptibly
    from agentfactory.people.judges.client import Asking
    from agentfactory.recipe.load import load_recipe
    from agentfactory.recipe.schema import stages_of
    from agentfactory.rollout.rewards.reward_spec import load_reward

    parts = [part for stage in stages_of(load_recipe(options.recipe, purpose="tools")) for part in stage.parts()]
    specs = [
        load_reward(config, f"rewards.{number}", Path.cwd())
        for part in parts
        for number, config in enumerate(part.recipe.rewards)
    ]
    judges = {str(spec.function): spec for spec in specs if isinstance(spec.function, Asking)}
    if not judges:
        fix = "add judge, rubric or pairwise (docs/judges.md)"
        raise SettingError("rewards", f"{options.recipe} has no judge", fix)
    labelled = read_labels(options.labels)
    failed = 0
    for spec in judges.values():
        found = run_interruptibly(agreement(spec, labelled, options.scale))
        failed += found["failed"]
        say(json.dumps(found, ensure_ascii=False) if options.json else "\n".join(lines(found)))
    return int(failed > 0)
