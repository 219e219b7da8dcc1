"""The first look of `agentfactory doctor RECIPE --sample N`: N chains of the training data, sampled before training."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from textwrap import indent

from agentfactory.base.errors import SettingError, plural
from agentfactory.base.findings import Finding, ok, problem
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.base.run_notices import doing
from agentfactory.commands.server_commands import acting
from agentfactory.launching.child_processes import ChildFailed, Children
from agentfactory.launching.launcher import Say
from agentfactory.launching.prepare import run_prepare
from agentfactory.launching.progress import tell_warnings
from agentfactory.launching.run_folder import RunFolder, RunFolderError
from agentfactory.launching.time_plan import Lengths, plan_times
from agentfactory.recipe.checks import check_recipe, runs_chains
from agentfactory.recipe.load import load_recipe
from agentfactory.recipe.schema import Recipe, StagedRecipe, stages_of

_SUBJECT = "first look"


def sample(recipe: str, overrides: Sequence[str], chains: int, say: Say) -> Iterator[Finding]:
    """Sample chains on the first tasks of training, and yield what was seen; nothing is left in `output`."""
    folder, logs = Path(tempfile.mkdtemp(prefix="agentfactory-look-")), ""
    try:
        kept, aside = (load_recipe(recipe, [*overrides, *other]) for other in ([], [f"output={folder}"]))
        check_recipe(aside, lacks=[])
        yield from _look(kept, aside, chains, say)
    except KeyboardInterrupt as error:
        if any(folder.rglob("trajectories/*.jsonl")):
            logs = "kept"
            error.add_note(f"what was sampled is in {folder}")
        raise
    except (ChildFailed, SettingError, RunFolderError, ToolInfrastructureError) as error:
        text, _, fix = str(error).partition("; fix: ")
        if isinstance(error, ChildFailed):
            logs = f"; logs and chains are in {folder}"
        yield problem(_SUBJECT, text, f"{fix or 'correct the cause'}{logs}")
    finally:
        if not logs:
            shutil.rmtree(folder)


def _look(kept: Recipe | StagedRecipe, aside: Recipe | StagedRecipe, chains: int, say: Say) -> Iterator[Finding]:
    """Sample with `aside`, the recipe with an output that will be deleted; `kept` has its own output."""
    stages = stages_of(aside)
    number = next((n for n in reversed(range(len(stages))) if runs_chains(stages[n], "train")), None)
    if number is None or stages[number].data is None:
        fix = "leave out --sample; `agentfactory eval` samples held-out tasks"
        yield problem(_SUBJECT, "training runs no chains (train.algorithm, train.from_trajectories)", fix)
        return
    if (prepared := kept.output / "prepared").exists():
        (aside.output / "prepared").symlink_to(prepared)
    with Children() as children:
        run_prepare(aside, children, say)
    stage, checkpoint = stages[number], None
    if number:
        checkpoint = RunFolder(stages_of(kept)[number - 1].output).last_checkpoint()
        stage = stage.with_model(stages[0].model.path)
    with acting("look", stage, checkpoint, say) as (served, folder, urls):
        from agentfactory.rollout.chains.chain_counts import COUNTS, describe_progress
        from agentfactory.rollout.evaluation.advice import advise
        from agentfactory.rollout.evaluation.evaluate import open_sources, run_rollout
        from agentfactory.rollout.evaluation.first_look import describe
        from agentfactory.rollout.sources import load_all

        used = served.recipe
        size = used.largest_group
        sizes = [min(size, chains - first) for first in range(0, chains, size)]
        say(f"sampling {plural(chains, 'chain')} in {plural(len(sizes), 'group')} with {served.label}")
        opened = open_sources(used, load_all(used.parts()), folder.path, urls, images=folder.images)
        with tell_warnings(say), doing(describe_progress(lambda: COUNTS, used.rollout)):
            _, looks = run_rollout(used, folder.trajectories, folder.log, opened, served.name, sizes)
    for name, look in looks.items():
        of = f" on source {name}" if name else ""
        first, *lines = describe(look)
        yield ok(_SUBJECT, "\n".join([f"{first}{of} with {served.label}", *(indent(line, " " * 9) for line in lines)]))
        if (lost := look.chains - len(look.rewards)) > look.chains / 2:
            text = f"{lost} of {plural(look.chains, 'chain')}{of} have no reward"
            yield problem(_SUBJECT, text, "correct the cause above")
        yield from advise(look)
    sampled, seen = None, [one for look in looks.values() for one in look.lengths]
    if seen:
        prompt, turns, tokens, whole = map(fmean, zip(*seen, strict=True))
        sampled = Lengths(prompt, turns, tokens, whole - prompt - tokens, "those sampled", max(one[2] for one in seen))
    yield from (ok("time", str(plan)) for plan in plan_times(stages, sampled=sampled))
