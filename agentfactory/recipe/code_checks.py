"""Checks of what a recipe names of the user's: programs, tools, MCP servers, rewards, environments and agents."""

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agentfactory.base.errors import SettingError, short
from agentfactory.base.user_code.loading import load_for
from agentfactory.recipe.composition import display
from agentfactory.recipe.schema import Recipe
from agentfactory.recipe.train_checks import Lack
from agentfactory.rollout.data import Task
from agentfactory.rollout.rewards import Rewards
from agentfactory.rollout.text.parsers import AUTO, load_parser
from agentfactory.tools.environments.environment import (
    Environment,
    check_data_rows,
    check_machine_for,
    is_environment,
    reset_schema,
)
from agentfactory.tools.prebuilt import prebuilt
from agentfactory.tools.tool import is_tool


def check_programs(recipe: Recipe, lack: Lack, prepared: Path | None) -> None:
    for key, server in recipe.mcp_servers.items():
        folder = Path(server.cwd or ".")
        if "${chain}" in str(folder):
            folder = Path.cwd()
        if not folder.is_dir() and not (prepared is not None and folder.is_relative_to(prepared)):
            problem = f"{display(folder)}: no such folder"
            raise SettingError(f"mcp_servers.{key}.cwd", problem, "name an existing folder")
        _check_program(f"mcp_servers.{key}.command", server.command or "python", server.cwd or "", lack)
    if (agent := recipe.rollout.agent) is not None and agent.command:
        program = agent.command[0]
        # a relative path is in the chain's folder, and ProgramAgent checks it
        if "${" not in program and ("/" not in program or os.path.isabs(program)):
            _check_program("rollout.agent.command.0", program, agent.options.workspace or "", lack)


def _check_program(field: str, command: str, folder: str, lack: Lack) -> None:
    """Check that a program exists: in `folder` if it has a slash, else on PATH; `python` is the running one."""
    command = sys.executable if command == "python" else command
    path = os.path.join(folder, command)
    if shutil.which(path if "/" in command else command):
        return
    if not os.path.isfile(path):
        lack(field, f"no program {command!r}", "install it, or give its full path")
    else:
        problem = f"{path} is a file, but no program on PATH, or not executable"
        raise SettingError(field, problem, f"give its full path, {os.path.abspath(path)}, after chmod +x")


def check_servers(recipe: Recipe, prepared: Path | None) -> None:
    if not recipe.mcp_servers:
        return
    from agentfactory.tools.mcp_servers.server_entry import check_entry

    for key, server in recipe.mcp_servers.items():
        check_entry(key, server, Path.cwd(), prepared)


def check_user_code(recipe: Recipe, lack: Lack, tools_only: bool) -> None:
    """Check that tools, and unless `tools_only` rewards, the parser and the agent, can be loaded."""
    # a check writes nothing, not even bytecode next to the user's files
    write_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        _load_tools(recipe, lack)
        if not tools_only:
            _load_user_code(recipe)
    finally:
        sys.dont_write_bytecode = write_bytecode


def _objects(recipe: Recipe) -> Iterator[tuple[str, str, Any]]:
    named = {f"tools.{index}": reference for index, reference in enumerate(recipe.tools)}
    named |= {f"mcp_servers.{key}.module": server.module for key, server in recipe.mcp_servers.items() if server.module}
    for field, reference in named.items():
        yield field, reference, load_for(field, reference, Path.cwd(), prebuilt())


def _environments(recipe: Recipe) -> Iterator[Any]:
    yield from (found for _, _, found in _objects(recipe) if is_environment(found))


def _load_tools(recipe: Recipe, lack: Lack) -> None:
    for field, reference, found in _objects(recipe):
        options: dict[str, Any] = {}
        if field.startswith("tools.") and not (is_environment(found) or is_tool(found)):
            problem = f"{_shown(reference)} is not a tool but a {type(found).__name__}"
            raise SettingError(field, problem, "put @tool above its definition, or name an Environment class")
        if not field.startswith("tools."):
            key = field.removeprefix("mcp_servers.").removesuffix(".module")
            server = recipe.mcp_servers[key]
            options = server.options
            from agentfactory.tools.mcp_servers.own_server import build_server

            try:
                build_server([found], key, server.pool, options)
            except (TypeError, ValueError) as error:
                problem = f"{_shown(reference)} cannot be served: {error}"
                raise SettingError(f"mcp_servers.{key}", problem, "correct it") from error
        if is_environment(found):
            try:
                check_machine_for(found, options)
            except SettingError as error:
                if error.field.partition(".")[0] in options:
                    raise error.at(f"{field.removesuffix('module')}options.{error.field}") from None
                lack(field, error.problem, error.fix)


def _load_user_code(recipe: Recipe) -> None:
    Rewards(recipe.rewards, Path.cwd())
    check_user(recipe)
    context = recipe.teacher.context if recipe.teacher is not None else None
    if context is not None and ".py:" in context:
        from agentfactory.rollout.groups.teacher_context import load_context

        load_context(context, Path.cwd())
    native = recipe.rollout.parser == AUTO or load_parser(recipe.rollout.parser, Path.cwd()).native
    if recipe.rollout.agent is not None:
        if recipe.rollout.agent.name is not None and not recipe.rollout.agent.reports:
            load_for("rollout.agent", recipe.rollout.agent.name, Path.cwd())
        from agentfactory.rollout.chains.agent_hooks import check_own_loop, has_own_loop, load_agent

        if has_own_loop(load_agent(recipe.rollout.agent, Path.cwd())):
            check_own_loop(recipe.rollout, native)
            if context is not None:
                problem = f"got {short(context)}, but rollout.agent has its own loop, and writes several prompts"
                raise SettingError("teacher.context", problem, "remove it, or use the recipe's tools without an agent")


def check_user(recipe: Recipe, tasks: Sequence[Task] = (), section: str = "data") -> None:
    """Check that the simulated user of `rollout.user` can be loaded, and can play the rows."""
    if recipe.rollout.user is not None:
        from agentfactory.rollout.chains.simulated_user import open_users

        open_users(recipe.rollout.user, Path.cwd()).check_rows(tasks, section)


def check_resets(recipe: Recipe, tasks: list[Task], section: str) -> None:
    for name, reference, found in _objects(recipe):
        if not is_environment(found):
            continue
        needed = reset_schema(found)["required"]
        for number, row in enumerate(tasks, 1):
            if missing := ", ".join(field for field in needed if field not in row):
                problem = f"the reset of {_shown(reference)} needs {missing}, which row {number} of {section} lacks "
                fix = f"give it a default, or rename a field by {section}.columns"
                raise SettingError(name, f"{problem}({', '.join(row)})", fix)
        check_data_rows(found, tasks, section, has_rewards=bool(recipe.rewards) or _may_report_reward(recipe))


def gives_reward(recipe: Recipe) -> bool:
    return (
        bool(recipe.rewards)
        or _may_report_reward(recipe)
        or any(server.environment and server.environment.reward for server in recipe.mcp_servers.values())
        or any(found.reward is not Environment.reward for found in _environments(recipe))
    )


def _may_report_reward(recipe: Recipe) -> bool:
    return recipe.rollout.agent is not None and recipe.rollout.agent.reports


def may_open_chains(recipe: Recipe) -> bool:
    """Return whether an environment (an external server may be one) or a simulated user may give the first text."""
    is_external = any(server.module is None for server in recipe.mcp_servers.values())
    return is_external or recipe.rollout.user is not None or any(True for _ in _environments(recipe))


def _shown(reference: str) -> str:
    file, colon, name = reference.rpartition(":")
    return f"{display(Path(file))}:{name}" if colon else name
