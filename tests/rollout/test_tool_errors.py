"""Warnings about failing tools."""

import pytest

from agentfactory.base.messages import CallError, ToolResult
from agentfactory.rollout.chains.episode import ToolErrors

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


def test_a_step_whose_calls_all_fail_is_told_with_the_first_error(caplog: pytest.LogCaptureFixture) -> None:
    """mcp-server-sqlite and others return errors as plain results."""
    errors = ToolErrors()
    locked, missing = ToolResult("Database error: database is locked"), ToolResult("Error: no such table: goods")
    for tool, result in (("read", locked), ("list", missing)):
        for _ in range(8):
            errors.note(tool, result)
    errors.report()
    begin = (
        "16 of the last 16 tool calls ended in errors, the first one of read: Database error: database is locked; fix: "
    )
    assert [message.startswith(begin) for message in caplog.messages] == [True]
    caplog.clear()
    for result in (FINE, locked) * 10:
        errors.note("read", result)
    errors.report()
    assert caplog.messages == [], "half of the answers read like errors, which they may be about"
