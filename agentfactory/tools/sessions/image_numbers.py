"""Image numbering: an environment that works on a chain's images labels the images that other tools return."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mcp_types import CallToolResult

from agentfactory.base.messages import Content, ToolCall, ToolResult
from agentfactory.tools.mcp_servers.recipe_server import ToolServer

ROLE = "take_images"
"""Role of the environment's tool that takes images and returns a label for each."""


class ImageNumbers:
    """A labeller of images in tool results.

    If one of a chain's `servers` has the role, it receives the images that other servers return, and its label for
    each, such as a number, is inserted before the image. `origins` maps tools to servers. `ask` calls a server's tool,
    given the server's name, the tool's role and the arguments.
    """

    def __init__(
        self,
        servers: Sequence[ToolServer],
        origins: Mapping[str, ToolServer],
        ask: Callable[[str, str, dict[str, Any]], Awaitable[CallToolResult]],
    ) -> None:
        self._taker = next((server for server in servers if ROLE in server.hidden), None)
        self._origins = origins
        self._ask = ask

    async def number(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[ToolResult]:
        """Return a turn's results with their images numbered.

        Raises:
            ToolInfrastructureError: the environment's server died, or lost this chain's state.
        """
        return [
            replace(result, content=await self.number_content(result.content, self._origins.get(call.name)))
            for call, result in zip(calls, results, strict=True)
        ]

    async def number_content(self, content: Content, origin: ToolServer | None) -> Content:
        """Return content from the server `origin` (None: from no server) with its images numbered. Raises as `number`
        does."""
        if self._taker is None or origin in (self._taker, None) or isinstance(content, str):
            return content
        images = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
        if not images:
            return content
        answer = (await self._ask(self._taker.name, ROLE, {"images": images})).structured_content or {}
        told = iter(answer["told"])
        parts: list[dict[str, Any]] = []
        for part in content:
            if part["type"] == "image_url" and (text := next(told)):
                parts.append({"type": "text", "text": text})
            parts.append(part)
        return parts
