"""`data.openenv`: episodes of an OpenEnv server, as data rows."""

import asyncio
import json
from collections.abc import Collection
from typing import Any

from pydantic import Field

from agentfactory.base.config import Options, PositiveFloat, PositiveInt
from agentfactory.base.errors import SettingError
from agentfactory.base.messages import properties_of
from agentfactory.base.processes.threads import call_within
from agentfactory.base.user_code.extras import check_extra
from agentfactory.rollout.config import TaskSource
from agentfactory.worlds.openenv.server import RefusedAction, Server, ServerFault, Session
from agentfactory.worlds.openenv.words import calls_tools, in_words, tools_in_words

_MOST_CHARACTERS = 100_000
"""Maximum length of the schema of actions, whose description each row has."""


class OpenEnvSource(TaskSource):
    """Episodes of an OpenEnv server's environment (docs/openenv.md)."""

    world = "openenv"

    url: str
    """The server's address, such as http://127.0.0.1:8000."""
    api_key_env: str | None = None
    """Environment variable with the server's key. Null: the key in the address, or that of a server of ours on this
    machine."""
    reset: Options = {}
    """Further arguments of the environment's reset, such as {difficulty: 2}. OpenEnv's servers ignore those that an
    environment does not know."""
    tasks: PositiveInt = 1000
    """Number of tasks, with the seeds from first_seed on."""
    first_seed: int = Field(default=0, ge=0)
    """Seed of the first task. Ranges of training and evaluation must not overlap."""
    observation: list[str] | None = None
    """Fields of observations that the model reads. Null: all except metadata."""
    seconds: PositiveFloat = 50.0
    """Time limit of a reset or a step. Keep mcp_servers.openenv.timeout_seconds, 60 by default, above it."""
    question: str | None = None
    """The task in words. Null: the description in the server's metadata."""
    success_return: float | None = None
    """Return from which an ended episode counts as success. Null: there is no metric success."""

    def rows(self) -> list[dict[str, Any]]:
        check_extra("openenv")
        try:
            server = Server(self.url, self.api_key_env)
            found = call_within(lambda: asyncio.run(self._ask(server)), 60 + 2 * self.seconds)
        except ServerFault as fault:
            problem = fault.problem if fault.field == "api_key_env" else f"got {self.url!r}: {fault.problem}"
            raise SettingError(f"openenv.{fault.field}", problem, fault.fix) from None
        except SettingError as error:
            raise error.at(f"openenv.{error.field}") from None
        if not found["question"]:
            problem = f"got null, and the metadata of {server} have no description"
            raise SettingError("openenv.question", problem, "describe the task")
        kept = {"url", "api_key_env", "reset", "observation", "seconds", "success_return"}
        settings = {**self.model_dump(mode="json", include=kept), "actions": found["actions"], "tools": found["tools"]}
        seeds = range(self.first_seed, self.first_seed + self.tasks)
        return [{"question": found["question"], "openenv": settings, "seed": seed} for seed in seeds]

    async def _ask(self, server: Server) -> dict[str, Any]:
        """Return `question`, `actions` (in words) and `tools` (whether actions call tools)."""
        schemas = await server.get("/schema")
        schema = schemas.get("action")
        if not isinstance(schema, dict):
            raise ServerFault(f"{server}/schema has no schema of actions", "give the address of an OpenEnv server")
        if len(json.dumps(schema)) > _MOST_CHARACTERS:
            told = f"{server}/schema describes actions in more than {_MOST_CHARACTERS:,} characters"
            raise ServerFault(told, "shorten it: the model reads it in each task")
        question = self.question
        if question is None:
            about = (await server.get("/metadata")).get("description")
            question = about if isinstance(about, str) else ""
        session = await server.connect(self.seconds)
        try:
            tools = None if calls_tools(schema) is False else await _tools_of(session, calls_tools(schema) is True)
            try:
                actions = in_words(schema) if tools is None else tools_in_words(tools)
            except (LookupError, TypeError, AttributeError, RecursionError) as error:
                told = f"{server} describes its actions by a schema that cannot be read: {error!r}"
                raise ServerFault(told, "correct the server") from None
            await self._begin(session, properties_of(schemas.get("observation")).keys())
        finally:
            await session.close()
        return {"question": question, "actions": actions, "tools": tools is not None}

    async def _begin(self, session: Session, known: Collection[str]) -> None:
        if given := self.reset.keys() & {"seed", "episode_id"}:
            raise SettingError(
                "reset", f"got {min(given)}, which is set for each task", "set first_seed, and remove it"
            )
        try:
            begun = await session.reset({"seed": self.first_seed, **self.reset})
        except RefusedAction as error:
            field, value = ("reset", self.reset) if self.reset else ("first_seed", self.first_seed)
            raise SettingError(field, f"got {value}: {session.name} refuses: {error}", "correct it") from None
        fields = dict.fromkeys([*begun.observation, *known])
        if unknown := [name for name in self.observation or () if name not in fields]:
            problem = f"got {unknown[0]!r}; observations of {session.name} have {', '.join(fields)}"
            raise SettingError("observation", problem, "name some of these, or set it to null")


async def _tools_of(session: Session, has_tools: bool) -> list[dict[str, Any]] | None:
    try:
        listed = (await session.step({"type": "list_tools"})).observation
    except RefusedAction as error:
        if not has_tools:
            return None
        raise ServerFault(f"{session.name} does not list its tools: {error}", "correct the server") from None
    match listed:
        case {"tools": [dict(), *_] as tools} if all(isinstance(tool, dict) and "name" in tool for tool in tools):
            return tools
        case {"metadata": {"error": why}}:
            raise ServerFault(f"{session.name} does not list its tools: {why}", "correct the server")
    if not has_tools:
        return None
    raise ServerFault(f"{session.name} offers no tools, and its actions are calls of tools", "correct the server")
