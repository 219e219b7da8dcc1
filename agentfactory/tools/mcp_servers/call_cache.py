"""A cache for the results of deterministic calls."""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from mcp_types import CallToolResult

from agentfactory.tools.mcp_servers.server_connection import CallTimeout


@dataclass
class _Asked:
    """A call in flight, cancelled when nothing waits for it any more."""

    task: "asyncio.Task[CallToolResult]"
    waiting: int = 0


class CallCache:
    """An LRU cache of `size` results, keyed by tool and arguments. Errors are not cached, and concurrent equal calls
    are made once."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: OrderedDict[str, CallToolResult] = OrderedDict()
        self._asked: dict[str, _Asked] = {}

    async def result(
        self,
        tool: str,
        arguments: dict[str, Any],
        ask: Callable[[], Coroutine[Any, Any, CallToolResult]],
        timeout_seconds: float,
    ) -> CallToolResult:
        """Return the result of the call `ask`, which must not have its own time limit.

        Raises:
            CallTimeout: it did not arrive within `timeout_seconds`.
            Exception: what `ask` raised.
        """
        key = f"{tool} {json.dumps(arguments, sort_keys=True)}"
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        asked = self._asked.get(key)
        if asked is None:
            asked = self._asked[key] = _Asked(asyncio.create_task(ask(), name=f"call of {tool}"))
            asked.task.add_done_callback(lambda task: self._keep(key, task))
        asked.waiting += 1
        try:
            done, _ = await asyncio.wait({asked.task}, timeout=timeout_seconds)
        finally:
            asked.waiting -= 1
            if not asked.waiting and not asked.task.done():
                asked.task.cancel()
                self._asked.pop(key, None)
        if not done:
            raise CallTimeout(tool, timeout_seconds)
        return asked.task.result()

    def _keep(self, key: str, task: "asyncio.Task[CallToolResult]") -> None:
        if task.cancelled():
            return
        self._asked.pop(key, None)
        if task.exception() is None and not task.result().is_error:
            self._kept[key] = task.result()
            if len(self._kept) > self._size:
                self._kept.popitem(last=False)
