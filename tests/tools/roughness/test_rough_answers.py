"""Tests of answers that are rough (see answers.py), of rough lists of tools, and of handshakes."""

from typing import Any

import pytest

from agentfactory.base.messages import CallError, ToolCall, ToolInfrastructureError, ToolResult
from tests.tools.roughness.answers import ANSWERS, Answer
from tests.tools.roughness.raw_server import message_of
from tests.tools.roughness.serving import opened, plan_of, tool_of

CALL = ToolCall("1", "t", {})


def check(case: Answer, result: ToolResult) -> None:
    if "cannot be read" in case.reads:
        assert result.content.startswith(str(case.reads))
        assert "pydantic.dev" not in result.content
    else:
        assert result.content == case.reads
    assert result.error == case.error


@pytest.mark.parametrize("case", ANSWERS, ids=[case.name for case in ANSWERS])
async def test_a_rough_answer(case: Answer) -> None:
    plan = plan_of([tool_of("t", {"type": "object"}), tool_of("u", {"type": "object"})])
    plan["answers"] = {"t": case.text}
    async with opened(plan) as (toolset, notices), toolset.chain("a", {}) as session:
        check(case, await session.call(CALL))
        assert (await session.call(ToolCall("2", "u", {}))).content == "{}"
    if case.told:
        (notice,) = notices
        assert str(notice).startswith("tool server raw")
        assert case.told in str(notice)
    else:
        assert notices == []


@pytest.mark.parametrize("text", ['{"id": "\0", "result": {}}', '{"id": "\udcff", "result": oops}', "{}", "[1]", "{"])
async def test_a_line_that_answers_nothing(text: str) -> None:
    plan = plan_of([tool_of("t", {"type": "object"}), tool_of("u", {"type": "object"})])
    plan["answers"] = {"t": text}
    async with opened(plan, timeout_seconds=0.1) as (toolset, _), toolset.chain("a", {}) as session:
        assert (await session.call(CALL)).error is CallError.TIMEOUT
        assert (await session.call(ToolCall("2", "u", {}))).content == "{}"


TOOL = tool_of("t", {"type": "object"})


def listed(*tools: Any, **fields: Any) -> str:
    return message_of(result={"tools": [*tools], **fields})


@pytest.mark.parametrize(
    ("answer", "names", "told"),
    [
        (message_of(result=[TOOL]), ["t"], ""),
        (listed(TOOL, nextCursor=None, extra=[]), ["t"], ""),
        (listed({"name": "t"}), ["t"], "the tool t has no schema, but None"),
        (listed({**TOOL, "description": 5, "annotations": [], "icons": 5, "_meta": []}), ["t"], ""),
        (listed(TOOL, {"inputSchema": {}}), ["t"], "the tool has no name: {'inputSchema': {}}; it is left out"),
        (listed(TOOL, {**TOOL, "description": "b"}), ["t"], "several tools with the name t; the first is used"),
        (listed(tool_of("dot.name/x", {}), tool_of("名前", {}), tool_of("a b", {})), ["dot.name/x", "名前", "a b"], ""),
        (listed(), [], "tool server raw lists no tools"),
    ],
)
async def test_a_rough_list(answer: str, names: list[str], told: str) -> None:
    async with opened(plan_of([], tools__list=answer)) as (toolset, notices):
        assert [spec.name for spec in toolset.specs] == names
        async with toolset.chain("a", {}) as session:
            for name in names:
                assert (await session.call(ToolCall("1", name, {}))).content == "{}"
    assert [told in str(notice) for notice in notices] == [True] * bool(told)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (message_of(result={}), "its answer to tools/list has no list `tools`, but None"),
        (message_of(error={"code": -32603, "message": "cannot list"}), "MCPError: cannot list"),
        (listed(TOOL, nextCursor="same"), "its list of tools never ends: the cursor 'same' came twice"),
        ('{"jsonrpc": "2.0", "id": "$ID", "result": oops}', "MCPError: The server's answer cannot be read"),
    ],
)
async def test_a_list_that_cannot_be_used(answer: str, reason: str) -> None:
    with pytest.raises(ToolInfrastructureError) as raised:
        async with opened(plan_of([], tools__list=answer)):
            pass
    assert str(raised.value).startswith("tool server raw: `raw` in /: ")
    assert reason in str(raised.value)
    assert "pydantic.dev" not in str(raised.value)


INFO = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "r", "version": "1"}}


@pytest.mark.parametrize(
    "changes",
    [
        {"serverInfo": None},
        {"capabilities": []},
        {"capabilities": {"tools": True, "logging": [], "prompts": None}},
        {"protocolVersion": "2024-11-05"},
    ],
)
async def test_a_rough_handshake(changes: dict[str, Any]) -> None:
    plan = plan_of([TOOL], initialize=message_of(result=INFO | changes))
    async with opened(plan) as (toolset, notices):
        assert [spec.name for spec in toolset.specs] == ["t"]
    assert notices == []
