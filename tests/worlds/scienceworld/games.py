"""Games for the tests, and chains that play them."""

import shutil
from collections.abc import Sequence
from typing import Any

import pytest

from agentfactory.base.messages import ToolCall, ToolResult
from agentfactory.tools.sessions.tool_session import ToolSession
from agentfactory.worlds.scienceworld.jvm import Jvms
from agentfactory.worlds.scienceworld.published_tasks import resolved

needs_java = pytest.mark.skipif(
    shutil.which("java") is None, reason="ScienceWorld needs Java: apt install default-jre-headless"
)

QUICK = {
    "find-animal": 3,
    "power-component": 1,
    "chemistry-mix-paint-secondary-color": 2,
    "use-thermometer": 4,
    "lifespan-longest-lived": 0,
}
"""Tasks with fast loading and short gold paths -> a variation."""


def gold_path(jvms: Jvms, task: str, variation: int, simplifications: str = "easy") -> list[str]:
    play = jvms.play(task, variation, resolved(simplifications, task), gold=True)
    try:
        return play.game.gold_path()
    finally:
        play.end()


async def act(session: ToolSession, action: str) -> ToolResult:
    return await session.call(ToolCall("1", "act", {"action": action}))


async def follow(session: ToolSession, path: Sequence[str]) -> tuple[dict[str, float], list[Any]]:
    """Take the actions until the chain ends; return its reward with its metrics, and the results."""
    results = []
    for action in path:
        results.append(await act(session, action))
        if results[-1].finish:
            break
    judged = await session.reward()
    return {"reward": judged.reward, **judged.metrics}, results
