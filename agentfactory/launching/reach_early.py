"""Checks of what a run will reach, its tools and its servers, before anything slow is started."""

import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

from agentfactory.base.config import Isolation, McpServerConfig, ToolsRecipe
from agentfactory.base.errors import SettingError
from agentfactory.base.http.connections import check_open_files
from agentfactory.base.processes.interruption import run_interruptibly
from agentfactory.base.run_notices import doing
from agentfactory.launching.child_processes import POLL_SECONDS
from agentfactory.recipe.checks import Purpose, hub_names, part_named, parts_of, runs_chains
from agentfactory.recipe.schema import Recipe, StagedRecipe, stages_of
from agentfactory.rollout.config import RolloutRecipe, distinct
from agentfactory.rollout.model_hub import check_names, is_hub_name, use_hub_if_it_answers

ANSWERS_WITHIN = 10.0  # seconds within which a server must answer
_ENGINES = {"vllm": "vllm", "agentfactory": "embedded"}
"""Owner of the models that a server lists -> its engine. An SGLang server is checked when the run attaches to it."""


def check_reach(recipe: Recipe, servers: bool = True) -> None:
    """Check that `servers` answer and tools open, if chains run in training. Raises SettingError."""
    if runs_chains(recipe, "train"):
        if servers:
            check_servers_answer(recipe)
        check_teacher_answers(recipe)
        check_tools_open(recipe)


def check_hub(recipe: Recipe | StagedRecipe, purpose: Purpose) -> None:
    """Raise SettingError if a model or dataset of the hub can neither be fetched nor was downloaded before."""
    for stage in stages_of(recipe):
        check_names(hub_names(stage, purpose))
        if is_hub_name(stage.model.path):
            # for the tokenizer alone, if a running server has the model
            use_hub_if_it_answers(stage.model.path)


def wait_for_servers(recipe: Recipe) -> None:
    """Wait until something listens at each address of `server.url`. Raises SettingError after `startup_seconds`."""
    until = time.monotonic() + recipe.server.startup_seconds
    for url in recipe.server.urls:
        parts = urlsplit(url)
        place = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
        with doing(f"waiting for a server to listen at {url}"):
            if why := wait_for_listener(place, until):
                raise SettingError("server.url", f"nothing listens at {url}: {why}", "see its log, or correct it")


def wait_for_listener(place: tuple[str, int], until: float) -> str:
    """Wait for a program that listens. Return "", or the reason at the time `until`, on the monotonic clock."""
    while True:
        try:
            socket.create_connection(place, timeout=ANSWERS_WITHIN).close()
            return ""
        except OSError as error:  # such as a name that is unknown until its machine has started
            if time.monotonic() > until:
                return error.strerror or str(error)
        time.sleep(POLL_SECONDS)


def check_servers_answer(recipe: Recipe) -> None:
    """Raise SettingError if nothing answers at an address of `server.url`, or another engine does."""
    from agentfactory.trainers.sync.server_control import ServerControl, ServerGoneError, SyncError

    for url in recipe.server.urls:
        try:
            server = ServerControl(url, recipe.server.api_key_env, ANSWERS_WITHIN)
            server.get("/openapi.json")
            cards = server.get("/v1/models").get("data", [])
        except ServerGoneError as error:
            fix = "start it: agentfactory serve RECIPE server.url=null server.port=PORT; or set server.url=null, and a "
            fix += "server is started here"
            raise SettingError("server.url", f"nothing answers at {url}: {error.__cause__ or error}", fix) from error
        except SyncError:
            # it answers; what it lacks is reported by those that use it
            continue
        engine = next((_ENGINES.get(card.get("owned_by")) for card in cards), None)
        if recipe.server.engine == "embedded" and engine == "vllm":
            raise SettingError("server.engine", f"got embedded, but vLLM answers at {url}", "set server.engine=vllm")


def check_teacher_answers(recipe: Recipe) -> None:
    """Raise SettingError if the server of a teacher does not answer, or cannot grade the policy's tokens."""
    if not (servers := recipe.teacher_servers):
        return
    from agentfactory.rollout.inference.http_transport import ServerUnreachableError
    from agentfactory.rollout.inference.teacher_client import open_teachers

    async def check_once() -> None:
        async with open_teachers(servers, recipe) as teachers:
            # an earlier stage may have yet to make the policy; the worker repeats the check
            is_there = is_hub_name(recipe.model.path) or Path(recipe.model.path).is_dir()
            for teacher in dict.fromkeys(teachers.values()):
                try:
                    await (teacher.check() if is_there else teacher.check_server())
                except ServerUnreachableError as error:
                    raise SettingError(teacher.server.field, str(error), "restart the server") from error

    run_interruptibly(check_once())


def check_tools_open(recipe: Recipe) -> None:
    check_open_files(recipe.most_chains(recipe.rollout.workers))
    for part in distinct(parts_of(recipe)):
        with part_named(part):
            _open_tools(part.recipe)


def _open_tools(recipe: RolloutRecipe) -> None:
    if not recipe.tools and not recipe.mcp_servers:
        return
    from agentfactory.base.messages import ToolInfrastructureError
    from agentfactory.tools.calls.limits import check_limits
    from agentfactory.tools.sessions.toolset import open_toolset

    servers = {name: without_spares(config) for name, config in recipe.mcp_servers.items()}
    tried = ToolsRecipe(tools=recipe.tools, mcp_servers=servers, limits=recipe.limits)

    async def open_once() -> None:
        async with open_toolset(tried, Path.cwd()) as toolset:
            toolset.give_to_user(recipe.rollout.user_tools)
            check_limits(recipe.limits, [spec.name for spec in toolset.specs])

    try:
        run_interruptibly(open_once())
    except SettingError:
        raise
    except ToolInfrastructureError as error:
        text, _, fix = str(error).partition("\n; fix: ")
        other = "correct it; `agentfactory tools check RECIPE` tries each server alone"
        raise SettingError("mcp_servers", text, fix or other) from error
    except (ValueError, TypeError) as error:
        # these messages end with their fix
        problem, _, fix = str(error).rpartition("; ")
        raise SettingError("tools, mcp_servers", problem or fix, fix if problem else "correct it") from error


def without_spares(config: McpServerConfig) -> McpServerConfig:
    is_process = config.command is not None or config.container is not None
    starts_ahead = config.pool.warm or (is_process and config.pool.warm is None)
    # a server that all chains share cannot have any, and reports it
    can = config.module is not None or config.isolation is not Isolation.SHARED
    pool = config.pool.model_copy(update={"warm": 0}) if starts_ahead and can else config.pool
    return config.model_copy(update={"pool": pool})
