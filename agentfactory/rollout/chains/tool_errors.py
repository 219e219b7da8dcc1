"""Warnings about tool problems that do not end a chain: tools whose calls mostly raise or time out, and results
truncated to `limits.result_bytes`."""

import logging
from collections import Counter, defaultdict

from agentfactory.tools.calls.run_notices import notify
from agentfactory.tools.messages import CallError, ToolResult, text_of

logger = logging.getLogger(__name__)

ENOUGH_CALLS = 16
"""Minimum number of calls before a tool is reported, since a few may raise by chance."""


class ToolErrors:
    """A counter of the errors of each tool, until a warning about the tool."""

    def __init__(self) -> None:
        self._raised: dict[str, Counter[str]] = defaultdict(Counter)
        """Tool -> error ("" for none) -> calls since the tool was last checked."""
        self._told: set[str] = set()

    def note(self, tool: str, result: ToolResult) -> None:
        """Record a call of `tool` that ended."""
        raised = result.error in (CallError.TOOL_ERROR, CallError.TIMEOUT)
        if tool not in self._told and result.error is not CallError.UNKNOWN_TOOL:
            self._raised[tool][text_of(result.content)[:300] or "an error without text" if raised else ""] += 1
        self.note_cut(tool, result.left_out)

    def note_cut(self, tool: str, left_out: int) -> None:
        """Warn if `limits.result_bytes` truncated a result by `left_out` bytes."""
        if left_out:
            text = f"tool {tool}: a result exceeded limits.result_bytes by {left_out:,} bytes and was truncated"
            notify(logger, f"tool {tool} is cut", text)

    def report(self) -> None:
        """Warn, once per tool, if at least half of a tool's calls since the last check failed."""
        for tool in [tool for tool, found in self._raised.items() if found.total() >= ENOUGH_CALLS]:
            found = self._raised.pop(tool)
            calls, fine = found.total(), found.pop("", 0)
            if calls - fine >= fine:
                [(error, _)] = found.most_common(1)
                self._told.add(tool)
                text = f"tool {tool}: {calls - fine} of {calls} calls failed, such as: {error}"
                notify(logger, f"tool {tool} raises", text, times=0)
