"""The tools of an environment, and objects that are closed when a test ends."""

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agentfactory.base.config import ToolsRecipe
from agentfactory.tools.sessions.toolset import Toolset, open_toolset

Open = Callable[..., Any]
"""Make an object of a class with arguments."""


@asynccontextmanager
async def tools_of(module: str, timeout_seconds: float = 300, **options: Any) -> AsyncIterator[Toolset]:
    """The tools of a recipe with this environment."""
    server = {"module": module, "options": options, "timeout_seconds": timeout_seconds}
    async with open_toolset(ToolsRecipe.model_validate({"mcp_servers": {"it": server}}), Path.cwd()) as toolset:
        yield toolset


async def closing_all() -> AsyncIterator[Open]:
    """Yield a function that makes objects, and close these."""
    made: list[Any] = []

    def make(kind: Open, *arguments: Any, **options: Any) -> Any:
        made.append(kind(*arguments, **options))
        return made[-1]

    yield make
    for one in reversed(made):
        closed = one.close()
        if inspect.isawaitable(closed):
            await closed
