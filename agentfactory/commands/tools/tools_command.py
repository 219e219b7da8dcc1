"""`agentfactory tools list | call | serve | check`: use a recipe's tools without a model."""

import argparse
import asyncio
import base64
import inspect
import json
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agentfactory.base.config import McpServerConfig, ToolsRecipe
from agentfactory.base.errors import SettingError
from agentfactory.base.messages import (
    Content,
    EnvironmentReward,
    EnvironmentRewardError,
    ToolCall,
    ToolInfrastructureError,
    ToolSpec,
    properties_of,
    text_of,
)
from agentfactory.base.processes.interruption import run_interruptibly
from agentfactory.base.processes.threads import run_in_thread
from agentfactory.base.user_code.loading import load_object
from agentfactory.commands.options import json_object
from agentfactory.commands.tools.isolation_check import seen_of_another_chain
from agentfactory.commands.tools.signatures import signature_of
from agentfactory.recipe.checks import parts_of
from agentfactory.recipe.composition import display
from agentfactory.recipe.load import NO_MODEL, load_recipe
from agentfactory.recipe.schema import Recipe, stages_of
from agentfactory.rollout.config import Part, distinct
from agentfactory.rollout.data import Task, load_tasks
from agentfactory.rollout.evaluation.reward_trial import try_rewards
from agentfactory.rollout.images.parts import clean_row
from agentfactory.rollout.images.store import with_files
from agentfactory.rollout.model_hub import HubName, check_names, is_hub_name, use_hub_if_it_answers
from agentfactory.tools.calls.limits import check_limits
from agentfactory.tools.environments.environment import Environment
from agentfactory.tools.environments.workspaces import check_template
from agentfactory.tools.images.coordinates import VIEW_FIELD, Coordinates, ModelView, stating
from agentfactory.tools.prebuilt import prebuilt
from agentfactory.tools.sessions.toolset import Toolset, open_toolset

TRIED_ROWS = 3
"""Number of tasks that `check` calls the rewards on."""
SLOW_SECONDS = 3.0
"""`check` reports a server that takes longer than this to open, unless one of DOWNLOADERS starts it."""
_OF_TWO = "rename it, or give one of them `prefix` or `deny` by an entry of mcp_servers"
"""Fix for two tools with one name."""
DOWNLOADERS = ("npx", "uvx")
"""Programs that query a registry first, and may download the server."""
LARGE_BYTES = 100 << 20
"""Minimum bytes of a workspace that is announced before it is copied."""


class ToolsCommandError(Exception):
    """A command line that cannot work; the message gives the reason and a fix."""


class ToolsFailed(Exception):
    """A server cannot be used, or a call failed; the message says which and why."""


class ToolsUnchecked(Exception):
    """No fault was found, but a part could not be checked; the message says which, why, and what would help."""


def run(options: argparse.Namespace) -> None:
    """Run `list`, `call` or `check`.

    Raises:
        SettingError, ToolsCommandError: nothing was done.
        ToolsFailed: a server cannot be used, the call failed, or a prompt cannot be shown.
        ToolsUnchecked: `check` found no fault, but could not check everything, or a prompt is not that of a task.
    """
    whole = load_recipe(options.recipe, options.overrides, "tools")
    recipe, prepared = stages_of(whole)[-1], whole.output / "prepared" if whole.prepare else None
    parts = parts_of(recipe) if any(part.name for part in parts_of(recipe)) else [Part("data", recipe)]
    with TemporaryDirectory(prefix="agentfactory-images-") as images:
        if options.action == "call":
            run_interruptibly(_call(distinct(parts), options, Path(images)))
            return
        faults: list[Exception] = []
        listed: dict[str, list[Any]] | None = {} if options.action == "list" and options.json else None
        for part in parts if options.action == "check" else distinct(parts):
            if part.name and listed is None:
                print(f"{part.section}, {part.name}:", flush=True)
            with _kept(faults, part):
                match options.action:
                    case "list" if options.prompt:
                        run_interruptibly(_prompt(part.recipe, Path(images)))
                    case "list":
                        specs = None if listed is None else listed.setdefault(part.name, [])
                        run_interruptibly(_list(part.recipe, specs))
                    case "check":
                        run_interruptibly(_check(part.recipe, prepared, options.task, Path(images)))
        if listed is not None:
            print(json.dumps(listed.get("", listed), indent=2, ensure_ascii=False))
        for kind in (ToolsFailed, ToolsUnchecked):
            if found := [str(fault) for fault in faults if isinstance(fault, kind)]:
                raise kind("\n".join(found))


@contextmanager
def _kept(faults: list[Exception], part: Part[Recipe]) -> Iterator[None]:
    """Keep the faults of one source for later, so that the others are tried; they name the source."""
    try:
        yield
    except (ToolsFailed, ToolsUnchecked) as error:
        of = f"{part.name}: " if part.name else ""
        faults.append(type(error)("\n".join(f"{of}{line}" for line in str(error).splitlines())))


@dataclass
class _Server:
    """The result of opening one server of a recipe. `seconds` is the time that it took to open, `tried` is False
    if the isolation of its chains is unknown, `needed` are the missing task fields that prevented a reset of the
    environment, `problems` are its faults."""

    name: str
    opened: bool = False
    seconds: float = 0.0
    specs: list[ToolSpec] = field(default_factory=list)
    environment: str = ""
    verdict: EnvironmentReward | None = None
    isolation: list[str] = field(default_factory=list)
    tried: bool = True
    needed: list[str] | None = None
    problems: list[str] = field(default_factory=list)


_FindTask = Callable[[], Awaitable[Task | None]]


async def _open_each(recipe: Recipe, find_task: _FindTask | None = None, prepared: Path | None = None) -> list[_Server]:
    """Open each server separately and all concurrently, so that a failure does not hide others. With `find_task`, begin
    a chain on each; environments get the task that it finds; without one, they are created but not reset. `prepared` is
    the folder that `prepare` fills."""
    parts = [ToolsRecipe(tools=[reference]) for reference in recipe.tools]
    parts += [ToolsRecipe(mcp_servers={name: _for_a_try(config)}) for name, config in recipe.mcp_servers.items()]
    return await asyncio.gather(*(_open(part, find_task, recipe, prepared) for part in parts))


def _for_a_try(config: McpServerConfig) -> McpServerConfig:
    """Return the entry for a single chain: if chains have folders, it starts no spare processes, each of which would
    copy the workspace, and keeps no folders."""
    if not config.has_folders:
        return config
    pool = config.pool.model_copy(update={"warm": 0})
    return config.model_copy(update={"pool": pool, "keep_workspaces": None})


def _announce(name: str, config: McpServerConfig) -> None:
    """Print a note if a large workspace is copied."""
    if config.workspace is None:
        return
    size = check_template(f"mcp_servers.{name}.workspace", Path.cwd() / config.workspace)
    if size >= LARGE_BYTES:
        print(f"{name}: copies its workspace ({size >> 20} MiB) to start", file=sys.stderr, flush=True)


async def _open(part: ToolsRecipe, find_task: _FindTask | None, recipe: Recipe, prepared: Path | None) -> _Server:
    server = _Server([*part.mcp_servers, *(reference.rpartition(":")[2] for reference in part.tools)][0])
    started = time.perf_counter()
    try:
        for name, config in part.mcp_servers.items():
            _announce(name, config)
        async with open_toolset(part, Path.cwd()) as toolset:
            server.opened, server.seconds = True, time.perf_counter() - started
            server.specs = toolset.specs
            if toolset.environments and not server.specs and not toolset.judges_predictions:
                server.problems.append("an environment without a tool: no model can act on it; mark methods with @tool")
            if find_task is None:
                return server
            server.isolation = toolset.isolation
            if toolset.isolation and not toolset.environments:
                entry = next(iter(part.mcp_servers.values()))
                if (writes := toolset.harmless(reads=False)) and not entry.has_folders:
                    names = ", ".join(spec.name for spec in writes)
                    print(f"{server.name}: calls {names}; its data may keep entries called check-...", flush=True)
                seen = await seen_of_another_chain(toolset)
                server.isolation.append(seen.text)
                server.tried = seen.tried
                if seen.proven and entry.isolation is None:
                    fix = "give each chain a folder by ${chain} in args, env or cwd, or set isolation: shared"
                    server.problems.append(f"chains share its state; fix: {fix}")
                return server
            task: Task | None = await find_task() if toolset.environments else {}
            if task is None:
                server.needed = [*toolset.needed]
                server.environment = f"an environment: {await _made(part, prepared)}"
            else:
                started = time.perf_counter()
                async with toolset.chain("check", _for_tools(task, toolset, recipe)) as session:
                    seconds = time.perf_counter() - started
                    if toolset.environments:
                        says = f", says {_short(text_of(session.opening))}" if session.opening else ""
                        server.environment = f"an environment: reset in {seconds:.2f} s{says}"
                        # an error here would also fail every chain that ends without a call
                        verdict = server.verdict = await session.reward()
                        judge = f"without any call, {_figures(verdict)}" if verdict else "gives no reward"
                        server.environment += f"; {judge}"
    except EnvironmentRewardError as error:
        server.environment += "; cannot give a reward"
        server.problems.append(f"{error} (right after reset; a chain may end without a call)")
    except (ToolInfrastructureError, ValueError, TypeError) as error:
        # the name is printed before each problem
        server.problems.append(str(error).removeprefix(f"tool server {server.name}: "))
    return server


async def _made(part: ToolsRecipe, prepared: Path | None) -> str:
    """Create the only environment of `part`, which checks its options, unless it is in another process or its options
    name files that `prepare` has not created yet. Return a description of the result.

    Raises SettingError or ToolInfrastructureError if it cannot be created.
    """
    (config,) = part.mcp_servers.values() if part.mcp_servers else (McpServerConfig(module=part.tools[0]),)
    waits = prepared is not None and not prepared.exists() and str(prepared) in json.dumps(config.options)
    if config.module is None or waits:
        return "not created" if waits else "not reset"
    environment = load_object(config.module, Path.cwd(), prebuilt())
    if not (isinstance(environment, type) and issubclass(environment, Environment)):
        return "not reset"
    started = time.perf_counter()
    try:
        instance = await run_in_thread(lambda: environment(**config.options))
    except Exception as error:  # boundary: user code
        if isinstance(error, SettingError):
            raise error.at(field=f"options.{error.field}") from None
        raise ToolInfrastructureError(f"cannot be created: {type(error).__name__}: {error}") from error
    seconds = time.perf_counter() - started
    if inspect.iscoroutinefunction(instance.close):
        await instance.close()
    else:
        await run_in_thread(instance.close)
    return f"created in {seconds:.2f} s, but not reset"


def _for_tools(task: Task, toolset: Toolset, recipe: Recipe) -> Task:
    """Return a row with the model's image coordinates added if a reset needs them; if they are unknown, pixels are
    used."""
    if not toolset.takes(VIEW_FIELD):
        return task
    view, why = _view(recipe)
    if view is None:
        told = "the model's image coordinates are unknown, so this check uses pixels of the file"
        print(f"model.path: got {recipe.model.path!r}: {told}{why}", file=sys.stderr)
        return task
    return {**task, VIEW_FIELD: view.to_json()}


def _view(recipe: Recipe) -> tuple[ModelView | None, str]:
    """Return the image coordinates of the recipe's model, or None and the reason. Without the model's files, only the
    recipe's setting is known, and not the size in which the model gets images."""
    stated = recipe.rollout.coordinates
    if recipe.model.path == NO_MODEL:
        return None, ""
    from agentfactory.rollout.images.families import view_of_model

    try:
        return view_of_model(recipe.model, stated), "; fix: set rollout.coordinates"
    except FileNotFoundError as error:
        if stated in ("auto", Coordinates.RESIZED):
            return None, f": {error}"
        return ModelView(Coordinates(stated)), ""


def _figures(verdict: EnvironmentReward) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in {"reward": verdict.reward, **verdict.metrics}.items())


async def _list(recipe: Recipe, specs: list[Any] | None) -> None:
    """Print the tools of a recipe, or add them to `specs` in OpenAI's form."""
    servers = await _open_each(recipe)
    if specs is not None:
        view, _ = _view(recipe)
        specs += [(spec if view is None else stating(spec, view)).to_openai() for s in servers for spec in s.specs]
    else:
        for server in servers:
            for spec in server.specs:
                print(f"{server.name}: {spec.name}({signature_of(spec)})")
                for line in spec.description.splitlines():
                    print(f"    {line}".rstrip())
        if not any(server.specs or server.problems for server in servers):
            print("no tools")
    _fail([f"{server.name}: {problem}" for server in servers for problem in server.problems])


async def _prompt(recipe: Recipe, images: Path) -> None:
    """Print the first prompt of a chain on the first row of the data, as a run would send it."""
    # imported here, because it imports transformers
    from agentfactory.rollout.chains.prompt_preview import describe_first_prompt

    try:
        rows, origin = _first_rows(recipe, images)
    except ToolsCommandError as error:
        rows, origin = [], str(error).removesuffix(", or give --task")
    if is_hub_name(recipe.model.path):
        use_hub_if_it_answers(recipe.model.path)
    try:
        async for part in describe_first_prompt(recipe, next(iter(rows), {}), images, Path.cwd()):
            print(part, flush=True)
    except (ToolInfrastructureError, ValueError) as error:
        raise ToolsFailed(str(error)) from error
    if not rows:
        raise ToolsUnchecked(f"this is not the prompt of a task: {origin}")


async def _check(recipe: Recipe, prepared: Path | None, task: Task | None, images: Path) -> None:
    given = None if task is None else [_given_row(task, images)]
    finding: asyncio.Task[tuple[list[Task], str]] | None = None

    async def find_tasks() -> list[Task]:
        nonlocal finding
        if given is not None:
            return given
        # load the data in a thread, so that the other servers continue
        finding = finding or asyncio.create_task(asyncio.to_thread(_first_rows, recipe, images))
        return (await finding)[0]

    async def find_task() -> Task | None:
        return next(iter(await find_tasks()), None)

    servers = await _open_each(recipe, find_task, prepared)
    verdict = next((server.verdict for server in servers if server.verdict is not None), None)
    told, faults = await _try_rewards(recipe, find_tasks, verdict)
    owners = Counter(spec.name for server in servers for spec in server.specs)
    for server in servers:
        for spec in server.specs:
            if owners[spec.name] > 1:
                server.problems.append(f"another server has a tool {spec.name} too; {_OF_TWO}")
        entry = recipe.mcp_servers.get(server.name)
        downloads = entry is not None and Path(entry.command or "").name in DOWNLOADERS
        is_slow = server.seconds > SLOW_SECONDS and not downloads
        slow = f", slow (more than {SLOW_SECONDS:g} s)" if is_slow else ""
        tools = ", ".join(spec.name for spec in server.specs)
        if not server.opened:
            print(f"{server.name}: cannot be used")
            continue
        print(f"{server.name}: opened in {server.seconds:.2f} s{slow}; its tools: {tools or 'none'}")
        if server.environment:
            print(f"    {server.environment}")
        for line in server.isolation:
            print(f"    {line}")
    if task is not None:
        print("task: --task")
    else:
        print(f"task: {(await finding)[1] if finding else 'none, for there is no environment'}")
    for line in told:
        print(line)
    problems = [f"{server.name}: {problem}" for server in servers for problem in server.problems]
    problems += faults
    # a server that failed to open may have the tools that seem to be missing
    if not problems:
        try:
            check_limits(recipe.limits, [*owners])
        except ValueError as error:
            problems.append(str(error))
    _fail(problems)
    _tell_unchecked(recipe, servers, prepared, task)
    untried = [server.name for server in servers if not server.tried]
    print("all right" + (f", except that isolation was not tried: {', '.join(untried)}" if untried else ""))


def _tell_unchecked(recipe: Recipe, servers: list[_Server], prepared: Path | None, task: Task | None) -> None:
    """Raise ToolsUnchecked if environments were not reset, and rewards not called, because there is no task."""
    waiting = [server for server in servers if server.needed is not None]
    files = [data.file for data in (recipe.data, recipe.eval.data) if data is not None and data.file is not None]
    missing = [file for file in files if not file.exists()]
    if task is not None or not (waiting or missing):
        return
    parts = [f"the reset and reward of {server.name}" for server in waiting] + ["`rewards`"] * bool(recipe.rewards)
    parts = parts or [f"the rows of {display(file)}" for file in missing]
    row = json.dumps({field: "..." for server in waiting for field in server.needed or ()} or {"question": "..."})
    fix = f"give a task by --task '{row}'"
    made = [file for file in missing if prepared is not None and file.is_relative_to(prepared)]
    if prepared is not None and not prepared.exists() and (made or not missing):
        fix += f", or let `agentfactory train` create {display(prepared)} first"
    for file in missing:
        fix += f", or create {display(file)}" if file not in made else ""
    raise ToolsUnchecked(f"no fault was found, but without a task there was no check of {', '.join(parts)}; fix: {fix}")


def _fail(problems: list[str]) -> None:
    if problems:
        raise ToolsFailed("\n".join(problems))


async def _try_rewards(
    recipe: Recipe, find_tasks: Callable[[], Awaitable[list[Task]]], verdict: EnvironmentReward | None
) -> tuple[list[str], list[str]]:
    """Call the rewards on a sample answer to the first tasks. Return the lines to print, and the faults."""
    if not recipe.rewards or not (tasks := await find_tasks()):
        return [], []
    faults = await try_rewards(recipe, Path.cwd(), tasks, verdict)
    names = ", ".join(reward.name or reward.reward.rpartition(":")[2] for reward in recipe.rewards)
    end = f"{len(faults)} failed" if faults else "each is a number"
    return [f"rewards: {names}: called on a sample answer to {len(tasks)} tasks; {end}"], faults


def _given_row(task: Task, images: Path) -> Task:
    """Return the row of --task as tools get it. Raises ToolsCommandError."""
    try:
        return with_files(clean_row(task, Path.cwd()), images)
    except ValueError as error:
        raise ToolsCommandError(f"--task: {error}; fix: correct it") from error


def _first_rows(recipe: Recipe, images: Path) -> tuple[list[Task], str]:
    """Return the tasks to try environments and rewards with, and their origin; none if the recipe's data does not
    exist. Their images are files, in the folder `images` where the data holds the images themselves.

    Raises ToolsCommandError if the data cannot be read.
    """
    for name, data in (("data", recipe.data), ("eval.data", recipe.eval.data)):
        if data is None:
            continue
        if data.file is not None and not data.file.exists():
            return [], f"none, for there is no {display(data.file)} yet"
        if data.source is not None:
            use_hub_if_it_answers()
        try:
            if data.path is not None and data.file is None:
                check_names([HubName(f"{name}.path", data.path, "dataset")])
            rows = [with_files(row, images) for row in load_tasks(data, name)[:TRIED_ROWS]]
            return rows, f"the first row of {name}"
        except SettingError as error:
            raise ToolsCommandError(f"{error.without_fix}; fix: {error.fix}, or give --task") from error
        except Exception as error:  # boundary: files of any content, and the hub
            raise ToolsCommandError(f"{name}.path: {error}; fix: correct it, or give --task") from error
    return [{}], "an empty row, for the recipe has no data"


async def _call(parts: Sequence[Part[Recipe]], options: argparse.Namespace, images: Path) -> None:
    """Call a tool of the first part that has it."""
    given = None if options.task is None else _given_row(options.task, images)
    try:
        for number, part in enumerate(parts, 1):
            recipe = part.recipe
            # there is no chain, and so only the limit of a call
            only_tools = ToolsRecipe(tools=recipe.tools, mcp_servers=recipe.mcp_servers, limits=recipe.limits)
            async with open_toolset(only_tools, Path.cwd()) as toolset:
                spec = next((spec for spec in toolset.specs if spec.name == options.tool), None)
                if spec is None and number < len(parts):
                    continue
                call = ToolCall("call_0", options.tool, _parse_arguments(options.arguments, spec))
                task = given
                if task is None:
                    task = next(iter(_first_rows(recipe, images)[0] if toolset.environments else []), {})
                task = _for_tools(task, toolset, recipe)
                async with toolset.chain("call", task) as session:
                    result = await session.call(call)
                break
    except (ToolInfrastructureError, ValueError, TypeError) as error:
        raise ToolsFailed(str(error)) from None
    print(text_of(result.content))
    if result.info:
        print(f"info: {json.dumps(result.info, ensure_ascii=False)}")
    if result.finish:
        print("the tool ends the chain")
    if options.output is not None:
        _save_image(result.content, options.output)
    if result.error is not None:
        raise ToolsFailed(f"the call failed: {result.error}")


def _parse_arguments(given: Sequence[str], spec: ToolSpec | None) -> dict[str, Any]:
    """Parse one JSON object, or key=value pairs. A value is parsed as JSON if possible, unless the tool expects a
    string; otherwise it is text."""
    if len(given) == 1 and given[0].lstrip().startswith("{"):
        try:
            return json_object(given[0])
        except argparse.ArgumentTypeError as error:
            raise ToolsCommandError(f"the arguments {given[0]!r} are {error}") from None
    known = properties_of(spec.parameters) if spec else {}
    arguments: dict[str, Any] = {}
    for pair in given:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ToolsCommandError(f"the argument {pair!r} has no `=`; fix: write key=value, or one JSON object")
        if spec and key not in known and "." in key and key.partition(".")[0] in Recipe.model_fields:
            raise ToolsCommandError(f"{pair}: {spec.name} has no such argument; fix: write overrides before TOOL")
        arguments[key] = value
        schema = known.get(key)
        if not isinstance(schema, dict) or schema.get("type") != "string":
            with suppress(ValueError):
                arguments[key] = json.loads(value)
    return arguments


def _save_image(content: Content, file: Path) -> None:
    urls = [] if isinstance(content, str) else [p["image_url"]["url"] for p in content if p["type"] == "image_url"]
    embedded = [url for url in urls if url.startswith("data:")]
    if not embedded:
        raise ToolsFailed("--output: the result holds no image")
    for number, url in enumerate(embedded, 1):
        path = file if number == 1 else file.with_name(f"{file.stem}-{number}{file.suffix}")
        path.write_bytes(base64.b64decode(url.partition(",")[2]))
        print(f"saved {path}", file=sys.stderr)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 60 else line[:57] + "...")
