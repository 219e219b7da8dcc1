"""`agentfactory rescore`: its options, its output and its exit status."""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentfactory.base.errors import SettingError

if TYPE_CHECKING:
    from agentfactory.rollout.config import RewardConfig

ABOUT = "score the saved chains of a run by other rewards, and compare"
EXAMPLES = [
    "rescore runs/mine --rewards exact_match",
    "rescore runs/mine --rewards other.yaml --json",
    "rescore runs/mine --rewards '{reward: my_task.py:score, weight: 2}' format",
]
FAILED, DISAGREE = 1, 6
"""Exit statuses: no chain could be scored; the rewards disagree."""


def add_options(parser: argparse.ArgumentParser) -> None:
    about = "a run folder, such as runs/quickstart, or files of another project's run"
    parser.add_argument("run_folder", metavar="RUN", type=Path, help=about)
    about = "names of rewards, entries as in a recipe, or a recipe; default: the run's own, as their code is now"
    parser.add_argument("--rewards", metavar="REWARD", nargs="+", default=[], help=about)
    about = "chains to score, evenly over the run; default: 1000"
    parser.add_argument("--chains", type=int, metavar="N", default=1000, help=about)
    parser.add_argument("--json", action="store_true", help="print JSON, one line per stage and source")
    parser.set_defaults(warns=True)


def run(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Score the chains, print the comparison, and return the exit status. Raises SettingError."""
    # these take a second to import
    from agentfactory.audit.laboratory.rescore import Comparison, disagree, rescore
    from agentfactory.audit.run_record import records_at
    from agentfactory.base.processes.interruption import run_interruptibly
    from agentfactory.rollout.rewards import Rewards

    if options.chains < 1:
        raise SettingError("--chains", f"got {options.chains}", "use at least 1")
    given = [config for text in options.rewards for config in _rewards(text)]
    statuses = []
    records = [record for record in records_at(options.run_folder) if record.size]
    if not records:
        raise SettingError("RUN", f"{options.run_folder} has no saved chains of training", "name another run")
    for record in records:
        configs = given or ([] if record.recipe is None else record.recipe.rewards)
        if not configs:
            problem = f"{record.name} has no rewards of a recipe"
            raise SettingError("--rewards", problem, "name rewards, such as --rewards exact_match")

        async def compare(record: Any = record, configs: "Sequence[RewardConfig]" = configs) -> Comparison:
            async with Rewards(configs, Path.cwd()) as rewards:
                return await rescore(record, rewards, options.chains)

        found = {"run": record.name, **run_interruptibly(compare()).to_json()}
        status = FAILED if not found["chains"] else DISAGREE if disagree(found) else 0
        statuses.append(status)
        text = "\n".join(_lines(found, options.run_folder, status))
        say(json.dumps(found, ensure_ascii=False) if options.json else text)
    return next((status for status in (FAILED, DISAGREE) if status in statuses), 0)


def _rewards(text: str) -> "list[RewardConfig]":
    """Return the rewards that an argument names. Raises SettingError."""
    from agentfactory.recipe.load import load_recipe
    from agentfactory.recipe.schema import stages_of
    from agentfactory.recipe.yaml_text import parse_yaml
    from agentfactory.rollout.config import RewardConfig

    if text.endswith((".yaml", ".yml")):
        return list(stages_of(load_recipe(text, purpose="tools"))[-1].rewards)
    try:
        parsed = parse_yaml(text) if text.lstrip().startswith("{") else {"reward": text}
        return [RewardConfig.model_validate(parsed)]
    except ValueError as error:
        fix = "write a name, FILE.py:NAME, or {reward: NAME, options: {...}}"
        raise SettingError("--rewards", f"{text!r:.200} is no reward: {error}", fix) from None


def _lines(found: Mapping[str, Any], folder: Path, status: int) -> Iterator[str]:
    from agentfactory.base.files.untrusted_files import printable

    def shown(value: float | None) -> str:
        return "undefined, one side is constant" if value is None else f"{value:.2f}"

    what = {0: "the rewards agree", DISAGREE: "the rewards disagree", FAILED: "no chain could be scored"}[status]
    yield printable(f"{found['run']}: {what}: {found['chains']:,} chains scored, {found['failed']:,} failed")
    yield f"rank correlation of old and new: {shown(found['correlation'])}"
    yield f"    within groups: {shown(found['within_groups'])}"
    pairs = f"{found['flipped_pairs']:,} of the {found['pairs']:,} pairs that both order"
    yield f"groups in which the order of two chains flips: {found['flipped']:,} of {found['groups']:,} ({pairs})"
    yield from (printable("    group {group}: {pairs} of {of} pairs".format(**flip)) for flip in found["most_flipped"])
    if found["differ_most"]:
        yield f"chains that differ most (open them: agentfactory view {folder}):"
    for one in found["differ_most"]:
        ranks = f"{one['ranks']:+.0%} of all ranks"
        yield printable(f"    chain {one['chain']}, {one['file']}: {one['old']:g} -> {one['new']:g} ({ranks})")
    yield from (printable(f"failed: {error}".replace("\n", " ")) for error in found["errors"])
