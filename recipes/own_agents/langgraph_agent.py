"""The hunt played by an agent of LangGraph."""

from functools import cache
from typing import Any, Literal

from httpx import AsyncClient, Client
from langchain.agents import create_agent
from langchain_core.tools import StructuredTool, tool
from langchain_openai import ChatOpenAI

SYSTEM = "You look for treasure."


def mover(call: Any) -> StructuredTool:
    """Return the tool `move`, which calls the hunt's."""

    @tool
    async def move(direction: Literal["north", "east", "south", "west"]) -> str:
        """Walk one step."""
        return str(await call("move", {"direction": direction}))

    return move


@cache
def clients() -> dict[str, Any]:
    """Return HTTP clients that all chains share: creating them takes longer than a turn."""
    return {"http_client": Client(timeout=None), "http_async_client": AsyncClient(timeout=None)}


async def run(endpoint: Any, task: dict[str, Any], tools: Any) -> None:
    """Play one hunt."""
    model = ChatOpenAI(model="any", base_url=endpoint.url, api_key=endpoint.key, max_retries=0, **clients())
    agent = create_agent(model, [mover(tools.call)], system_prompt=SYSTEM)
    await agent.ainvoke({"messages": [{"role": "user", "content": task["question"]}]}, {"recursion_limit": 50})
