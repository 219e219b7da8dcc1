"""`agentfactory tools list | call | serve | check`: use a recipe's tools without a model."""

import argparse
import asyncio
import base64
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agentfactory.base import messages
from agentfactory.base.config import ToolsRecipe
from agentfactory.base.errors import CommandFailed, SettingError
from agentfactory.base.messages import EnvironmentReward, ToolCall, ToolInfrastructureError, ToolSpec
from agentfactory.base.processes.interruption import run_interruptibly
from agentfactory.commands.options import json_object
from agentfactory.commands.tried_servers import TriedServer, for_tools, model_view, open_each
from agentfactory.recipe.checks import check_recipe, parts_of
from agentfactory.recipe.code_checks import check_user
from agentfactory.recipe.composition import display
from agentfactory.recipe.load import load_recipe
from agentfactory.recipe.schema import Recipe, stages_of
from agentfactory.rollout.config import Part, distinct
from agentfactory.rollout.data import Task, load_tasks
from agentfactory.rollout.evaluation.evaluate import try_rewards
from agentfactory.rollout.images.parts import clean_row, image_urls
from agentfactory.rollout.images.store import with_files
from agentfactory.rollout.model_hub import HubName, check_names, is_hub_name, use_hub_if_it_answers
from agentfactory.tools.calls.limits import check_limits
from agentfactory.tools.images.coordinates import stating
from agentfactory.tools.sessions.toolset import open_toolset


def signature_of(spec: ToolSpec) -> str:
    """Return names and types, such as `query: string, limit: integer = 5`."""
    required = messages.required_of(spec.parameters)
    shown = []
    for name, schema in messages.properties_of(spec.parameters).items():
        has_default = isinstance(schema, dict) and "default" in schema
        default = f" = {json.dumps(schema['default'], ensure_ascii=False)}" if has_default else ""
        optional = "" if name in required or default else "?"
        shown.append(f"{name}{optional}: {_kind(schema)}{default}")
    return ", ".join(shown)


def _kind(schema: Any) -> str:
    match schema:
        case {"enum": [*values]}:
            return " | ".join(json.dumps(value, ensure_ascii=False) for value in values)
        case {"anyOf": [*options]}:
            return " | ".join(_kind(option) for option in options)
        case {"type": "array"}:
            return f"list of {_kind(schema.get('items'))}"
        case {"type": str(kind)}:
            return kind
        case {"type": [*kinds]}:
            return " | ".join(map(str, kinds))
    return "any"


TRIED_ROWS = 3
_OF_TWO = "rename it, or give one of them `prefix` or `deny` by an entry of mcp_servers"


class ToolsRefused(CommandFailed):
    """A command line that cannot work; the message gives the reason and a fix."""

    status = 2


class ToolsUnchecked(CommandFailed):
    """`check` found no fault, but not everything was checked; the message says what would help."""

    status = 5


def run(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Run `list`, `call` or `check`. Raises SettingError, CommandFailed, ToolsRefused or ToolsUnchecked."""
    whole = load_recipe(options.recipe, options.overrides, "tools")
    check_recipe(whole, "tools")
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
                say(f"{part.section}, {part.name}:")
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
            say(json.dumps(listed.get("", listed), indent=2, ensure_ascii=False))
        for kind in (CommandFailed, ToolsUnchecked):
            if found := [str(fault) for fault in faults if type(fault) is kind]:
                raise kind("\n".join(found))


@contextmanager
def _kept(faults: list[Exception], part: Part[Recipe]) -> Iterator[None]:
    try:
        yield
    except ToolsRefused:
        raise
    except CommandFailed as error:
        of = f"{part.name}: " if part.name else ""
        faults.append(type(error)("\n".join(f"{of}{line}" for line in str(error).splitlines())))


async def _list(recipe: Recipe, specs: list[Any] | None) -> None:
    servers = await open_each(recipe)
    if specs is not None:
        view, _ = model_view(recipe)
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
    from agentfactory.rollout.chains.prompt_preview import describe_first_prompt

    try:
        rows, origin = _first_rows(recipe, images)
    except ToolsRefused as error:
        rows, origin = [], str(error).removesuffix(", or give --task")
    if is_hub_name(recipe.model.path):
        use_hub_if_it_answers(recipe.model.path)
    try:
        async for part in describe_first_prompt(recipe, next(iter(rows), {}), images, Path.cwd()):
            print(part, flush=True)
    except (ToolInfrastructureError, ValueError) as error:
        raise CommandFailed(str(error)) from error
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

    servers = await open_each(recipe, find_task, prepared)
    verdict = next((server.verdict for server in servers if server.verdict is not None), None)
    told, faults = await _try_rewards(recipe, find_tasks, verdict)
    owners = Counter(spec.name for server in servers for spec in server.specs)
    for server in servers:
        for spec in server.specs:
            if owners[spec.name] > 1:
                server.problems.append(f"another server has a tool {spec.name} too; {_OF_TWO}")
        tools = ", ".join(spec.name for spec in server.specs)
        if not server.opened:
            print(f"{server.name}: cannot be used")
            continue
        print(f"{server.name}: opened in {server.seconds:.2f} s; its tools: {tools or 'none'}")
        if server.environment:
            print(f"    {server.environment}")
        for line in server.isolation:
            print(f"    {line}")
    origin = (await finding)[1] if finding else "none, for there is no environment"
    print("\n".join([f"task: {origin if task is None else '--task'}", *told]))
    problems = [*(f"{server.name}: {problem}" for server in servers for problem in server.problems), *faults]
    # a server that failed to open may have the tools that seem to be missing
    if not problems:
        try:
            check_limits(recipe.limits, [*owners])
            check_user(recipe, await find_tasks() if recipe.rollout.user else [])
        except ValueError as error:
            problems.append(str(error))
    _fail(problems)
    _tell_unchecked(recipe, servers, prepared, task)
    untried = [server.name for server in servers if not server.tried]
    print("all right" + (f", except that isolation was not tried: {', '.join(untried)}" if untried else ""))


def _tell_unchecked(recipe: Recipe, servers: list[TriedServer], prepared: Path | None, task: Task | None) -> None:
    waiting = [server for server in servers if server.needed is not None]
    files = [data.file for data in (recipe.data, recipe.eval.data) if data is not None and data.file is not None]
    missing = [file for file in files if not file.exists()]
    if task is not None or not (waiting or missing):
        return
    parts = [f"the reset and reward of {server.name}" for server in waiting] + ["`rewards`"] * bool(recipe.rewards)
    parts = parts or [f"the rows of {display(file)}" for file in missing]
    row = json.dumps({field: "..." for server in waiting for field in server.needed or ()} or {"question": "..."})
    others = [file for file in missing if prepared is None or not file.is_relative_to(prepared)]
    fix = "".join([f"give a task by --task '{row}'", *(f", or create {display(file)}" for file in others)])
    if prepared is not None and not prepared.exists():
        fix += f", or let `agentfactory train` create {display(prepared)} first"
    raise ToolsUnchecked(f"no fault was found, but without a task there was no check of {', '.join(parts)}; fix: {fix}")


def _fail(problems: list[str]) -> None:
    if problems:
        raise CommandFailed("\n".join(problems))


async def _try_rewards(
    recipe: Recipe, find_tasks: Callable[[], Awaitable[list[Task]]], verdict: EnvironmentReward | None
) -> tuple[list[str], list[str]]:
    if not recipe.rewards or not (tasks := await find_tasks()):
        return [], []
    faults = await try_rewards(recipe, Path.cwd(), tasks, verdict)
    names = ", ".join(reward.reward.rpartition(":")[2] for reward in recipe.rewards)
    end = f"{len(faults)} failed" if faults else "each is a number"
    return [f"rewards: {names}: called on a sample answer to {len(tasks)} tasks; {end}"], faults


def _given_row(task: Task, images: Path) -> Task:
    try:
        return with_files(clean_row(task, Path.cwd()), images)
    except ValueError as error:
        raise ToolsRefused(f"--task: {error}; fix: correct it") from error


def _first_rows(recipe: Recipe, images: Path) -> tuple[list[Task], str]:
    """Return the tasks to try environments and rewards with, and their origin; none without data."""
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
            return [with_files(row, images) for row in load_tasks(data, name)[:TRIED_ROWS]], f"the first row of {name}"
        except SettingError as error:
            raise ToolsRefused(f"{error.without_fix}; fix: {error.fix}, or give --task") from error
        except Exception as error:  # boundary: files of any content, and the hub
            raise ToolsRefused(f"{name}.path: {error}; fix: correct it, or give --task") from error
    return [{}], "an empty row, for the recipe has no data"


async def _call(parts: Sequence[Part[Recipe]], options: argparse.Namespace, images: Path) -> None:
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
                async with toolset.chain("call", for_tools(task, toolset, recipe)) as session:
                    result = await session.call(call)
                break
    except (ToolInfrastructureError, ValueError, TypeError) as error:
        raise CommandFailed(str(error)) from None
    print(messages.text_of(result.content))
    if result.info:
        print(f"info: {json.dumps(result.info, ensure_ascii=False)}")
    if result.finish:
        print("the tool ends the chain")
    if (file := options.output) is not None:
        embedded = [url for url in image_urls([{"content": result.content}]) if url.startswith("data:")]
        if not embedded:
            raise CommandFailed("--output: the result holds no image")
        for number, url in enumerate(embedded, 1):
            path = file if number == 1 else file.with_name(f"{file.stem}-{number}{file.suffix}")
            path.write_bytes(base64.b64decode(url.partition(",")[2]))
            print(f"saved {path}", file=sys.stderr)
    if result.error is not None:
        raise CommandFailed(f"the call failed: {result.error}")


def _parse_arguments(given: Sequence[str], spec: ToolSpec | None) -> dict[str, Any]:
    """Parse one JSON object, or key=value pairs, whose values are JSON if possible, unless text is expected."""
    if len(given) == 1 and given[0].lstrip().startswith("{"):
        try:
            return json_object(given[0])
        except argparse.ArgumentTypeError as error:
            raise ToolsRefused(f"the arguments {given[0]!r} are {error}") from None
    known = messages.properties_of(spec.parameters) if spec else {}
    arguments: dict[str, Any] = {}
    for pair in given:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ToolsRefused(f"the argument {pair!r} has no `=`; fix: write key=value, or one JSON object")
        arguments[key] = value
        schema = known.get(key)
        if not isinstance(schema, dict) or schema.get("type") != "string":
            with suppress(ValueError):
                arguments[key] = json.loads(value)
    return arguments
