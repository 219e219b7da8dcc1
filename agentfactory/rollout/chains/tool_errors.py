"""Warnings about tool problems that do not end a chain: tools whose calls mostly raise or time out, steps whose calls
nearly all do, and results truncated to `limits.result_bytes`."""

import logging
import re
from collections import Counter, defaultdict

from agentfactory.base.messages import CallError, ToolResult, text_of
from agentfactory.base.run_notices import notify

logger = logging.getLogger(__name__)

ENOUGH_CALLS = 16
"""Minimum number of calls before a tool is reported, since a few may raise by chance."""
NEARLY_ALL = 0.9
"""Share of failed calls, of all tools together, at which a step is reported."""
_LOOKS_FAILED = re.compile(
    r"\W*(?:[\w.]*(?:error|exception|traceback)\b|(?:[\w.]+ ){1,3}[\w.]*(?:error|exception)\s*:|"
    r"(?:failed|unable|cannot|could not)\b)",
    re.IGNORECASE,
)
"""The beginning of a result that reports an error. Many servers do not mark such results as errors."""


class ToolErrors:
    """A counter of the errors of each tool, until a warning about the tool."""

    def __init__(self) -> None:
        self._raised: dict[str, Counter[str]] = defaultdict(Counter)
        """Tool -> error, or result that reads like one ("" for none), -> calls since the tool was last checked."""
        self._failed: Counter[str] = Counter()
        """Tool -> calls since it was last checked that raised or timed out."""
        self._told: set[str] = set()
        self._step_calls = self._step_failed = 0
        """Calls since the last report, of all tools: a step's, or those of several steps if it had too few."""
        self._first = ""
        """The first error of the step, with its tool."""

    def note(self, tool: str, result: ToolResult) -> None:
        """Record a call of `tool` that ended."""
        self.note_cut(tool, result.left_out)
        if result.error is CallError.UNKNOWN_TOOL:
            return
        text = text_of(result.content)[:300] or "an error without text"
        raised = result.error in (CallError.TOOL_ERROR, CallError.TIMEOUT)
        failed = raised or (result.error is None and _LOOKS_FAILED.match(text) is not None)
        self._step_calls += 1
        self._step_failed += failed
        if failed and not self._first:
            self._first = f"{tool}: {text}"
        if tool in self._told:
            return
        self._raised[tool][text if failed else ""] += 1
        self._failed[tool] += raised

    def note_cut(self, tool: str, left_out: int) -> None:
        """Warn if `limits.result_bytes` truncated a result by `left_out` bytes."""
        if left_out:
            text = f"tool {tool}: a result exceeded limits.result_bytes by {left_out:,} bytes and was truncated"
            notify(logger, f"tool {tool} is cut", text)

    def report(self) -> None:
        """Warn about each tool, once, if at least half of its calls since the last check failed, or nearly all returned
        what reads like an error; and about a step whose calls nearly all failed."""
        for tool in [tool for tool, found in self._raised.items() if found.total() >= ENOUGH_CALLS]:
            found, raised = self._raised.pop(tool), self._failed.pop(tool, 0)
            failed = found.total() - found[""]
            if raised >= found.total() - raised or failed >= NEARLY_ALL * found.total():
                self._tell(tool, found)
        if self._step_calls < ENOUGH_CALLS:
            return
        calls, failed, first = self._step_calls, self._step_failed, self._first
        self._step_calls, self._step_failed, self._first = 0, 0, ""
        if failed >= NEARLY_ALL * calls and not self._told:
            fix = "try it by `agentfactory tools call RECIPE TOOL key=value`"
            text = f"{failed} of the last {calls} tool calls ended in errors, the first one of {first}; fix: {fix}"
            notify(logger, "tool calls fail", text, times=0)

    def _tell(self, tool: str, found: Counter[str]) -> None:
        calls, fine = found.total(), found.pop("", 0)
        [(error, _)] = found.most_common(1)
        self._told.add(tool)
        notify(
            logger,
            f"tool {tool} raises",
            f"tool {tool}: {calls - fine} of {calls} calls failed, such as: {error}",
            times=0,
        )
