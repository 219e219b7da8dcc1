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
    command.set_defaults(warns=True)


def run(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Ask the judges and print their agreement. Return 1 if there is a text without a verdict. Raises SettingError."""
    # these take a second to import
    from agentfactory.audit.laboratory.agreement import agreement, lines, read_labels
    from agentfactory.base.processes.interruption import run_interruptibly
    from agentfactory.people.judges.client import Asking
    from agentfactory.recipe.checks import parts_of
    from agentfactory.recipe.load import load_recipe
    from agentfactory.recipe.schema import stages_of
    from agentfactory.rollout.rewards.reward_spec import load_reward

    specs = [
        load_reward(config, f"rewards.{number}", Path.cwd())
        for stage in stages_of(load_recipe(options.recipe, purpose="tools"))
        for part in parts_of(stage)
        for number, config in enumerate(part.recipe.rewards)
    ]
    judges = {str(spec.function): spec for spec in specs if isinstance(spec.function, Asking)}
    if not judges:
        raise SettingError("rewards", f"{options.recipe} has no judge", "add judge, rubric or pairwise: docs/judges.md")
    labelled = read_labels(options.labels)
    reports = [run_interruptibly(agreement(spec, labelled, options.scale)) for spec in judges.values()]
    if not any(found["texts"] for found in reports):
        fix = "write lines with `predictions` for pairwise, and with `prediction` or `messages` for other judges"
        raise SettingError("LABELS", f"{options.labels} has no text for the judges of {options.recipe}", fix)
    for found in reports:
        say(json.dumps(found, ensure_ascii=False) if options.json else "\n".join(lines(found)))
    return int(any(found["failed"] for found in reports))
