"""The hunt played by a CodeAgent of smolagents: a call of the tool is Python code."""

import asyncio
from functools import cache
from typing import Any

from httpx import Client
from smolagents import EMPTY_PROMPT_TEMPLATES, CodeAgent, OpenAIModel, Tool
from smolagents.monitoring import LogLevel

SYSTEM = "Write code that moves."


class Move(Tool):
    """The tool `move`, which calls the hunt's."""

    name = "move"
    description = "Take one step."
    inputs = {"direction": {"type": "string", "description": "north, east, south or west"}}
    output_type = "string"

    def __init__(self, call: Any, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.call, self.loop = call, loop

    def forward(self, direction: str) -> str:
        """Take a step; the agent runs in a thread, and the tools in the loop."""
        moved = self.call("move", {"direction": direction})
        return str(asyncio.run_coroutine_threadsafe(moved, self.loop).result())


@cache
def client() -> Client:
    """Return an HTTP client that all chains share: creating one takes longer than a turn."""
    return Client(timeout=None)


async def run(endpoint: Any, task: dict[str, Any], tools: Any) -> None:
    """Play one hunt."""
    options = {"max_retries": 0, "http_client": client()}
    model = OpenAIModel("any", endpoint.url, endpoint.key, client_kwargs=options)
    agent = CodeAgent(
        [Move(tools.call, asyncio.get_running_loop())],
        model,
        prompt_templates={**EMPTY_PROMPT_TEMPLATES, "system_prompt": SYSTEM},
        max_steps=20,
        verbosity_level=LogLevel.OFF,
    )
    await asyncio.to_thread(agent.run, task["question"])
