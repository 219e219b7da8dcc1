"""The commands that need a server and no trainer: serve, eval and rollout; of each, what is served and a run folder."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentfactory.composition import COMMAND_LINE, RecipeError, display
from agentfactory.launcher import Say, need_checkpoint, placed, prepare, settle, start_server
from agentfactory.processes import ChildFailed, Children
from agentfactory.recipe import Recipe, StagedRecipe, stages_of
from agentfactory.run_folder import ADAPTER, RunFolder, RunFolderError, base_of_adapter, next_free
from agentfactory.trainers.checkpoint_folder import INFO, read_info

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from agentfactory.rollout.chain import ChainRunner
    from agentfactory.rollout.evaluate import Evaluation

_NAMED = 8
"""Of the checkpoints near a wrong path, how many a message names, the last ones."""


def serve(recipe: Recipe | StagedRecipe, say: Say) -> None:
    """Serve the recipe's model until the server or this process is ended; of a staged recipe, its last checkpoint.
    The log goes to `<output>/serve`, serve-2, ..."""
    with Children() as children:
        served = what_is_served(recipe, None)
        prepare(recipe, children, say)
        placement = settle(placed(served.recipe, "serve"), served.recipe, say)
        folder = _run_folder("serve", recipe, served.recipe)
        # train.py, which a person starts, takes sync.backend=auto for file
        transfer = replace(placement, sync=None).weight_transfer(served.recipe)
        log = folder.logs / "server.log"
        server, url = start_server(served.recipe, children, log, say, served.adapters, transfer, placement)
        say(f"ready {url} (log: {display(log)})")
        children.wait(server)


def evaluate(
    recipe: Recipe | StagedRecipe,
    checkpoint: Path | None,
    say: Say,
    *,
    model: str | None = None,
    url: str | None = None,
    samples: int | None = None,
) -> None:
    """Evaluate on `eval.data`, with `samples` in place of eval.samples, into `<output>/eval`, eval-2, ...

    Who is evaluated: `checkpoint`, a folder; or `model`, a folder or a hub name; or the server at `url` (of its models,
    the one called `model`), asked by token ids where it takes them and by OpenAI's chat API otherwise; or the recipe's
    model, and of a staged recipe its last checkpoint; where `server.url` is set, the weights that are there.
    """
    from agentfactory import evaluated

    evaluated.check(recipe, checkpoint, model, url, samples)
    if samples is not None:
        recipe = evaluated.with_samples(recipe, samples)
    if url is not None:
        _evaluate_at(recipe, url, model, say)
        return
    with _acting("eval", recipe, evaluated.named(model) if model else checkpoint, say) as (served, folder, urls):
        from agentfactory.rollout.evaluate import open_runner

        opened = open_runner(served.recipe, folder.path, urls)
        found = _run_eval(served.recipe, folder, opened, served.name, say, served.step)
    _report(found, served.recipe, served.label, folder, say)


def _evaluate_at(recipe: Recipe | StagedRecipe, url: str, model: str | None, say: Say) -> None:
    """Evaluate whoever answers at `url`."""
    from agentfactory import evaluated
    from agentfactory.rollout.client import ServerUnreachableError

    # the model of a later stage is a checkpoint that may not be there
    stages = stages_of(recipe)
    stage = stages[-1].with_model(stages[0].model.path)
    try:
        there = evaluated.look_at(stage, url, model)
    except evaluated.ChatEndpointError as error:
        raise RecipeError(COMMAND_LINE, error.field, error.problem, error.fix) from None
    except ServerUnreachableError as error:
        raise ChildFailed(str(error)) from error
    with Children() as children:
        prepare(recipe, children, say)
        folder = _run_folder("eval", recipe, there.recipe)
        _log_to(folder, "eval")
        say(f"asking {there.model} at {url} by {there.how}")
        try:
            opened = evaluated.open_runner_at(there, folder.path)
            found = _run_eval(there.recipe, folder, opened, there.model, say)
        except (ServerUnreachableError, evaluated.ChatEndpointError) as error:
            raise ChildFailed(str(error)) from error
    _report(found, there.recipe, f"{there.model} at {url}", folder, say)


def _run_eval(
    recipe: Recipe,
    folder: RunFolder,
    opened: "AbstractAsyncContextManager[ChainRunner]",
    model: str,
    say: Say,
    step: int | None = None,
) -> "Evaluation":
    from agentfactory.progress import follow_groups, tell_warnings
    from agentfactory.rollout.data import load_tasks
    from agentfactory.rollout.evaluate import run_eval

    assert recipe.eval.data is not None  # load_recipe has seen to it
    tasks, samples, greedy = load_tasks(recipe.eval.data), recipe.eval.samples, recipe.eval.greedy
    say(f"evaluating {len(tasks)} tasks, each by {samples} sampled {'and 1 greedy ' if greedy else ''}chains")
    with tell_warnings(say), follow_groups(folder.trajectories, len(tasks) * (1 + greedy), say):
        return run_eval(recipe, tasks, folder.trajectories, partial(_log_figures, folder, step), opened, model)


def _report(found: "Evaluation", recipe: Recipe, label: str, folder: RunFolder, say: Say) -> None:
    from agentfactory.eval_table import tables

    folder.write_summary({"checkpoint": label, "seed": recipe.seed, **found.figures()})
    for table in tables(found):
        say(table)
    say(f"every figure: {display(folder.summary)}; every chain: {display(folder.trajectories)}")
    say(f"{recipe.name}: evaluated {label}; run folder {display(folder.path)}")


def roll_out(recipe: Recipe | StagedRecipe, say: Say) -> None:
    """Run one group of chains for every task of `data` and save them into `<output>/rollout`, rollout-2, ..."""
    with _acting("rollout", recipe, None, say) as (served, folder, urls):
        from agentfactory.progress import follow_groups, tell_warnings
        from agentfactory.rollout.data import load_tasks
        from agentfactory.rollout.evaluate import run_rollout

        acting = served.recipe
        assert acting.data is not None  # load_recipe has seen to it
        tasks = load_tasks(acting.data)
        say(f"running {len(tasks)} tasks, each by {acting.rollout.group_size} chains")
        with tell_warnings(say), follow_groups(folder.trajectories, len(tasks), say):
            log = partial(_log_figures, folder, served.step)
            figures = run_rollout(acting, tasks, folder.path, urls, folder.trajectories, log, served.name)
        folder.write_summary({"checkpoint": served.label, "seed": recipe.seed, **figures})
    told = [f"{name} {figures[name]:.4f}" for name in ("reward", "success", "failed") if name in figures]
    say(f"means over chains: {', '.join(told)}; every figure: {display(folder.summary)}")
    saved = display(folder.trajectories)
    say(f"{recipe.name}: chains are saved; train on them with train.from_trajectories={saved}")


@dataclass
class Served:
    """What a server is to serve: the recipe with the base model's path, adapters, the name that requests use. `label`
    is what people call it, `step` the training step of a checkpoint."""

    recipe: Recipe
    label: str
    name: str = "policy"
    adapters: dict[str, Path] = field(default_factory=dict)
    step: int | None = None


def what_is_served(recipe: Recipe | StagedRecipe, checkpoint: Path | str | None) -> Served:
    """`checkpoint`: a folder, or a hub name."""
    stage = stages_of(recipe)[-1]
    if isinstance(checkpoint, str):
        return Served(_unquantised(stage.with_model(checkpoint)), checkpoint)
    if checkpoint is not None:
        checkpoint = checkpoint.expanduser().resolve()
        check_weights(checkpoint, "--checkpoint")
    if isinstance(recipe, StagedRecipe):
        path = checkpoint or need_checkpoint(RunFolder(stage.output))
    else:
        path = checkpoint or Path(stage.model.path)
    step = _step_of(path)
    if (path / ADAPTER).is_file():
        served = stage.with_model(base_of_adapter(path))
        return Served(served, str(path), "checkpoint", {"checkpoint": path}, step)
    served = stage.with_model(str(path))
    if checkpoint is not None or isinstance(recipe, StagedRecipe):
        served = _unquantised(served)
    return Served(served, str(path), step=step)


def _step_of(path: Path) -> int | None:
    """The training step of a checkpoint; None of any other model."""
    if not (path / INFO).is_file():
        return None
    try:
        return int(read_info(path)["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{path / INFO} cannot be read: {error!r}; fix: name another checkpoint") from error


def check_weights(folder: Path, option: str) -> None:
    """Raise RecipeError where `folder`, which `option` names, holds neither a model nor an adapter."""
    if any((folder / name).is_file() for name in ("config.json", ADAPTER)):
        return
    # a run's folder, its checkpoints/, a stage's, or a step that is not there
    near = {
        found
        for place in (folder, folder.parent)
        for below in ("", "checkpoints/", "*/checkpoints/")
        for found in place.glob(f"{below}step-*")
    }
    named = ", ".join(display(path) for path in sorted(near, key=lambda path: (path.parent, path.name))[-_NAMED:])
    problem = "neither config.json nor adapter_config.json is there" if folder.is_dir() else "no such folder"
    fix = f"name one of {named}" if near else "name a checkpoint, such as runs/NAME/checkpoints/step-000080"
    raise RecipeError(COMMAND_LINE, option, f"{display(folder)}: {problem}", fix)


def _unquantised(recipe: Recipe) -> Recipe:
    """A quantised copy of the model that training began with is no copy of another."""
    return recipe.model_copy(update={"server": recipe.server.model_copy(update={"model": None})})


def _run_folder(command: str, recipe: Recipe | StagedRecipe, acting: Recipe) -> RunFolder:
    """A folder of its own for what `acting`, a part of `recipe`, does."""
    path = next_free(recipe.output / command)
    return RunFolder.create(path, acting.model_copy(update={"output": path, "prepare": None}).to_yaml())


def _log_figures(folder: RunFolder, step: int | None, metrics: dict[str, Any]) -> None:
    """Figures of chains on the weights of `step`, as training logs its own."""
    folder.log(metrics if step is None else {"step": step, **metrics})


def _log_to(folder: RunFolder, command: str) -> None:
    logging.basicConfig(filename=folder.logs / f"{command}.log", level=logging.INFO)


@contextmanager
def _acting(
    command: str, recipe: Recipe | StagedRecipe, checkpoint: Path | str | None, say: Say
) -> Iterator[tuple[Served, RunFolder, list[str]]]:
    """A run folder, and the addresses of servers for `command`. Raises ChildFailed where none answers any more."""
    from agentfactory.rollout.client import ServerUnreachableError

    with Children() as children:
        served, server = what_is_served(recipe, checkpoint), None
        urls = served.recipe.server.urls
        try:
            if urls:
                asyncio.run(_check_routes(served.recipe))
                # whose weights are its own
                served = replace(served, label=f"{served.name} at {', '.join(urls)}", step=None)
            prepare(recipe, children, say)
            folder = _run_folder(command, recipe, served.recipe)
            _log_to(folder, command)
            if not urls:
                server, url = start_server(served.recipe, children, folder.logs / "server.log", say, served.adapters)
                urls = [url]
            yield served, folder, urls
        except Exception as error:
            # where the server is gone, that is the cause
            if server is not None:
                children.check(server)
            if isinstance(error, ServerUnreachableError):
                raise ChildFailed(str(error)) from error
            raise


async def _check_routes(recipe: Recipe) -> None:
    from agentfactory.rollout.client import InferenceClient

    async with InferenceClient(recipe.server.urls, recipe.server.api_key_env) as client:
        await client.check_routes()
