"""The commands that need a server and no trainer: serve, eval and rollout. Each has served weights and a run folder."""

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agentfactory.base.errors import SettingError
from agentfactory.base.http.server_keys import key_file_of
from agentfactory.base.processes.devices import may_have_gpu
from agentfactory.base.processes.interruption import run_interruptibly
from agentfactory.base.run_notices import doing
from agentfactory.base.user_code.entry_points import SERVICES, load_named, registered
from agentfactory.launching.child_processes import POLL_SECONDS, ChildFailed, Children
from agentfactory.launching.launcher import Say
from agentfactory.launching.placement import Placement, place
from agentfactory.launching.prepare import run_prepare
from agentfactory.launching.progress import tell_information, tell_warnings
from agentfactory.launching.reach_early import check_hub, check_tools_open
from agentfactory.launching.run_folder import RunFolder, check_writable, next_free
from agentfactory.launching.run_results import MostChainsDroppedError
from agentfactory.launching.served_weights import Served, what_is_served
from agentfactory.launching.start_server import begin_server, wait_for_server
from agentfactory.recipe.composition import COMMAND_LINE, display
from agentfactory.recipe.schema import Recipe, StagedRecipe, stages_of
from agentfactory.rollout.inference.server_command_line import address_fault, outside_fault, port_fault, server_command

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from agentfactory.rollout.evaluation.evaluate import Evaluation
    from agentfactory.rollout.evaluation.first_look import Look
    from agentfactory.rollout.evaluation.side_by_side import OtherEvaluation
    from agentfactory.rollout.sources import Loaded, Source


def serve(
    recipe: Recipe | StagedRecipe,
    checkpoint: Path | None,
    say: Say,
    chat: int | None = None,
    service: str | None = None,
    port: int | None = None,
) -> None:
    """Serve a checkpoint or the recipe's model until this process ends. `chat`: also answer chats on this port.
    `service`: also serve training, by the API of this name, on `port`."""
    with Children(say) as children:
        served = what_is_served(recipe, checkpoint)
        found = None if service is None else load_named(registered(SERVICES)[service])
        if found is None and port is not None:
            raise SettingError("--port", f"got {port}, which is for --as", "set server.port")
        if found is not None:
            served = replace(served, recipe=found.prepared(served.recipe))
        check_writable(recipe.output)
        check_hub(served.recipe, "serve")
        for taken in (address_fault(served.recipe), port_fault(chat or 0, "--chat"), port_fault(port or 0, "--port")):
            if taken is not None:
                raise taken
        run_prepare(recipe, children, say)
        placement = place([served.recipe], "serve")[0] or Placement(on_gpu=may_have_gpu())
        for line in placement.describe():
            say(line)
        if (refusal := placement.refusal(served.recipe)) is not None:
            raise refusal
        folder = _run_folder("serve", recipe, served.recipe)
        # a trainer that is started with train.py treats sync.backend=auto as file
        transfer = replace(placement, sync=None).weight_transfer(served.recipe)
        log, env = folder.logs / "server.log", placement.environment("server")
        command = placement.server_command(served.recipe, served.adapters, transfer)
        server = begin_server(served.recipe, command, children, log, say, served.adapters, env)
        url = wait_for_server(served.recipe, server, children, say)
        say(f"ready {url} (log: {display(log)})")
        if served.recipe.server.api_key_env is None:
            say(f"requests need its key, which AgentFactory finds; for other clients: {key_file_of(url)}")
        if found is not None:
            _log_to(folder, str(service))
            run_interruptibly(found.serve(served.recipe, url, port or 0, say, partial(children.check, server)))
        elif chat is None:
            children.wait(server)
        else:
            _log_to(folder, "chat")
            run_interruptibly(_chat(served, url, folder, chat, say, partial(children.check, server)))


async def _chat(served: Served, url: str, folder: RunFolder, port: int, say: Say, check: Callable[[], None]) -> None:
    serve_chat = load_named("agentfactory.rollout.gateway.serve_chat:serve_chat")
    turns, variable = folder.path / "turns.jsonl", served.recipe.server.api_key_env
    key = os.environ[variable] if variable else None  # the server has started with it
    async with serve_chat(served.recipe, url, served.name, turns, port, key, folder.path) as endpoint:
        say(f"chat {endpoint.url} (all turns with token ids: {display(turns)})")
        shown = endpoint if key is None else replace(endpoint, key=f'"${variable}"')
        for name, value in shown.environment().items():
            say(f"  export {name}={value}")
        while True:
            check()
            await asyncio.sleep(POLL_SECONDS)


def evaluate(
    recipe: Recipe | StagedRecipe,
    checkpoint: Path | None,
    say: Say,
    *,
    model: str | None = None,
    url: str | None = None,
    samples: int | None = None,
    beside: Path | None = None,
) -> None:
    """Evaluate the folder `checkpoint`, the folder or hub name `model`, or the server at `url` (its `model`) on
    `eval.data`, into `<output>/eval`, eval-2, ... By default, the last checkpoint of a staged recipe, the weights at
    `server.url`, or the recipe's model. `beside`: an earlier evaluation to compare with."""
    from agentfactory.commands import eval_command
    from agentfactory.rollout.evaluation.side_by_side import read_other

    eval_command.check(recipe, checkpoint, model, url, samples)
    other = None if beside is None else read_other(beside)
    if samples is not None:
        recipe = eval_command.with_samples(recipe, samples)
    if url is not None:
        _evaluate_at(recipe, url, model, say, other)
        return
    with acting("eval", recipe, eval_command.named(model) if model else checkpoint, say) as (served, folder, urls):
        from agentfactory.rollout.evaluation.evaluate import open_sources

        open_on = partial(open_sources, served.recipe, base=folder.path, urls=urls, images=folder.images)
        found = _run_eval(served.recipe, folder, open_on, served.name, say, served.step)
    _report(found, served.recipe, served.label, folder, say, other)


def _evaluate_at(
    recipe: Recipe | StagedRecipe, url: str, model: str | None, say: Say, other: "OtherEvaluation | None"
) -> None:
    from agentfactory.commands import eval_command
    from agentfactory.rollout.chains.chain_runner import RolloutStoppedError
    from agentfactory.rollout.chains.chat_endpoint import ChatEndpointError
    from agentfactory.rollout.inference.http_transport import ServerUnreachableError

    # the model of a later stage is a checkpoint that may not exist
    stages = stages_of(recipe)
    stage = stages[-1].with_model(stages[0].model.path)
    check_hub(stage, "eval")
    try:
        there = eval_command.look_at(stage, url, model)
    except ChatEndpointError as error:
        raise error.at(source=COMMAND_LINE) from None
    except ServerUnreachableError as error:
        raise ChildFailed(str(error)) from error
    check_writable(recipe.output)
    with Children(say) as children:
        run_prepare(recipe, children, say)
        folder = _run_folder("eval", recipe, there.recipe)
        _log_to(folder, "eval")
        how = "token ids" if there.by_token_ids else "OpenAI's chat API"
        say(f"querying {there.model} at {url} by {how}")
        try:
            open_there = partial(eval_command.open_sources_at, there, folder.path, folder.images)
            found = _run_eval(there.recipe, folder, open_there, there.model, say)
        except (ServerUnreachableError, RolloutStoppedError, ChatEndpointError) as error:
            raise ChildFailed(str(error)) from error
    _report(found, there.recipe, f"{there.model} at {url}", folder, say, other)


def _run_eval(
    recipe: Recipe,
    folder: RunFolder,
    opener: "Callable[[Sequence[Loaded]], AbstractAsyncContextManager[Sequence[Source[Any]]]]",
    model: str,
    say: Say,
    step: int | None = None,
) -> "Evaluation":
    from agentfactory.rollout.chains.chain_counts import COUNTS, describe_progress
    from agentfactory.rollout.evaluation.evaluate import run_eval
    from agentfactory.rollout.sources import load_all

    samples, greedy = recipe.eval.samples, recipe.eval.greedy
    with tell_warnings(say):
        loaded = load_all(recipe.held_out_parts(), tell=True)
        tasks = sum(len(one.tasks) for one in loaded)
        say(f"evaluating {tasks} tasks, each by {samples} sampled {'and 1 greedy ' if greedy else ''}chains")
        with doing(describe_progress(lambda: COUNTS, recipe.rollout)):
            log = partial(_log_figures, folder, step)
            return run_eval(recipe, folder.trajectories, log, opener(loaded), model)


def _report(
    found: "Evaluation", recipe: Recipe, label: str, folder: RunFolder, say: Say, other: "OtherEvaluation | None"
) -> None:
    from agentfactory.commands.eval_command import compared, tables

    folder.write_summary({"checkpoint": label, "seed": recipe.seed, **found.figures()})
    for table in [*tables(found), *([] if other is None else compared(folder.trajectories, other))]:
        say(table)
    _tell_looks(found.looks, say)
    say(f"all metrics: {display(folder.summary)}; all chains: {display(folder.trajectories)}")
    say(f"{recipe.name}: evaluated {label}; run folder {display(folder.path)}")
    _check_failed(sum(found.failures.values()), found.chains)


def _tell_looks(looks: "dict[str, Look]", say: Say) -> None:
    from agentfactory.rollout.evaluation.advice import advise
    from agentfactory.rollout.evaluation.first_look import describe

    for name, look in looks.items():
        of = f" of source {name}" if name else ""
        say("\n  ".join([f"what the sampled chains{of} did:", *describe(look)]))
        for advice in advise(look):
            say(f"warning: {advice}")


def roll_out(recipe: Recipe | StagedRecipe, checkpoint: Path | None, say: Say) -> None:
    """Run one group of chains for every task of `data`, and save them into `<output>/rollout`, rollout-2, ..."""
    with acting("rollout", recipe, checkpoint, say) as (served, folder, urls):
        from agentfactory.rollout.chains.chain_counts import COUNTS, describe_progress
        from agentfactory.rollout.evaluation.evaluate import open_sources, run_rollout
        from agentfactory.rollout.sources import load_all

        stage = served.recipe
        with tell_warnings(say):
            loaded = load_all(stage.parts(), tell=True)
            groups = [one.part.recipe.rollout.group_size for one in loaded for _ in one.tasks]
            sizes = " or ".join(map(str, sorted(set(groups))))
            say(f"running {len(groups)} tasks, each by {sizes} chains")
            with doing(describe_progress(lambda: COUNTS, stage.rollout)):
                log = partial(_log_figures, folder, served.step)
                opened = open_sources(stage, loaded, folder.path, urls, images=folder.images)
                metrics, looks = run_rollout(stage, folder.trajectories, log, opened, served.name)
        folder.write_summary({"checkpoint": served.label, "seed": recipe.seed, **metrics})
    _tell_looks(looks, say)
    told = [f"{name} {metrics[name]:.4f}" for name in ("reward", "success", "failed") if name in metrics]
    say(f"means over chains: {', '.join(told)}; all metrics: {display(folder.summary)}")
    saved = display(folder.trajectories)
    say(f"{recipe.name}: chains are saved; train on them with train.from_trajectories={saved}")
    _check_failed(round(metrics["failed"] * sum(groups)), sum(groups))


def _check_failed(failed: int, chains: int) -> None:
    if failed > chains / 2:
        raise MostChainsDroppedError(f"{failed} of {chains} chains have no reward")


def _run_folder(command: str, recipe: Recipe | StagedRecipe, acting: Recipe) -> RunFolder:
    path = next_free(recipe.output / command)
    saved = acting.model_copy(update={"output": path, "prepare": None}).to_saved(RunFolder(path).whole)
    return RunFolder.create(path, saved)


def _log_figures(folder: RunFolder, step: int | None, metrics: dict[str, Any]) -> None:
    folder.log(metrics if step is None else {"step": step, **metrics})


def _log_to(folder: RunFolder, command: str) -> None:
    logging.basicConfig(filename=folder.logs / f"{command}.log", level=logging.INFO)


@contextmanager
def acting(
    command: Literal["rollout", "eval", "look"], recipe: Recipe | StagedRecipe, checkpoint: Path | str | None, say: Say
) -> Iterator[tuple[Served, RunFolder, list[str]]]:
    """Yield served weights, a run folder and server addresses for `command`. Raises ChildFailed."""
    from agentfactory.rollout.chains.chain_runner import RolloutStoppedError
    from agentfactory.rollout.inference.http_transport import ServerUnreachableError

    with Children(say) as children:
        served, server = what_is_served(recipe, checkpoint), None
        urls = served.recipe.server.urls
        check_hub(served.recipe, "eval" if command == "eval" else "rollout")
        try:
            if urls:
                run_interruptibly(_check_routes(served.recipe))
                served = replace(served, label=f"{served.name} at {', '.join(urls)}", step=None)
            elif (taken := address_fault(served.recipe)) is not None:
                raise taken
            if (taken := outside_fault(served.recipe)) is not None:
                raise taken
            check_writable(recipe.output)
            run_prepare(recipe, children, say)
            with tell_information(say):
                check_tools_open(served.recipe)
            folder = _run_folder(command, recipe, served.recipe)
            _log_to(folder, command)
            if not urls:
                log, start = folder.logs / "server.log", server_command(served.recipe, served.adapters)
                server = begin_server(served.recipe, start, children, log, say, served.adapters)
                urls = [wait_for_server(served.recipe, server, children, say)]
            try:
                yield served, folder, urls
            except KeyboardInterrupt as error:
                error.add_note(f"chains so far: {display(folder.trajectories)}")
                raise
        except Exception as error:
            # if the server has ended, report that as the cause
            if server is not None:
                children.check(server)
            if isinstance(error, (ServerUnreachableError, RolloutStoppedError)):
                raise ChildFailed(str(error)) from error
            raise


async def _check_routes(recipe: Recipe) -> None:
    from agentfactory.rollout.inference.inference_client import InferenceClient

    async with InferenceClient(recipe.server.urls, recipe.server.api_key_env) as client:
        await client.check_routes()
