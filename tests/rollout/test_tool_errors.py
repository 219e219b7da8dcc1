"""Warnings about failing tools."""

import pytest

from agentfactory.rollout.chains.tool_errors import ToolErrors
from agentfactory.tools.messages import CallError, ToolResult

BUG = "AttributeError: 'Ride' object has no attribute 'lft'"
RAISED, REFUSED = ToolResult(BUG, CallError.TOOL_ERROR), ToolResult("a: 1", CallError.INVALID_ARGUMENTS)
FINE, UNKNOWN = ToolResult("7"), ToolResult("There is no tool", CallError.UNKNOWN_TOOL)


def test_a_tool_that_raises_at_half_of_its_calls_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    errors = ToolErrors()

    def call(tool: str, *results: ToolResult) -> list[str]:
        for result in results:
            errors.note(tool, result)
        caplog.clear()
        errors.report()
        return caplog.messages

    assert call("few", *[RAISED] * 15) == []
    assert call("fine", *[RAISED] * 15, *[FINE, REFUSED] * 8) == []
    assert call("none", *[UNKNOWN] * 32) == []
    assert call("few", FINE) == [f"tool few: 15 of 16 calls failed, such as: {BUG}"]
    assert call("few", *[RAISED] * 64) == [], "once"
    assert call("fine", *[RAISED] * 16) == [f"tool fine: 16 of 16 calls failed, such as: {BUG}"], "later it broke"
    other = ToolResult("OSError: disk", CallError.TOOL_ERROR)
    assert call("ride", other, *[RAISED] * 7, *[FINE] * 8) == [f"tool ride: 8 of 16 calls failed, such as: {BUG}"]
