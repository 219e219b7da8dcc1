"""Tests of tools whose schemas are rough: see schemas.py."""

import json
from typing import Any

import pytest

from agentfactory.base.messages import CallError, ToolCall
from tests.tools.roughness.schemas import NOT_OBJECTS, SCHEMAS, Rough
from tests.tools.roughness.serving import opened, plan_of, tool_of

PLAIN = tool_of("plain", {"type": "object", "properties": {"n": {"type": "integer"}}})


@pytest.mark.parametrize("case", SCHEMAS, ids=[case.name for case in SCHEMAS])
async def test_a_rough_schema(case: Rough) -> None:
    async with opened(plan_of([PLAIN, tool_of("rough", case.schema)])) as (toolset, notices):
        assert [spec.name for spec in toolset.specs] == ["plain", "rough"]
        assert toolset.specs[1].parameters == case.schema
        async with toolset.chain("a", {}) as session:
            passed = await session.call(ToolCall("1", "rough", case.passes))
            assert (passed.error, passed.content) == (None, json.dumps(case.passes))
            if case.refused is not None:
                refused = await session.call(ToolCall("2", "rough", case.refused))
                assert refused.error is CallError.INVALID_ARGUMENTS, refused
            assert (await session.call(ToolCall("3", "plain", {"n": "a"}))).error is CallError.INVALID_ARGUMENTS
    if not case.unchecked:
        assert notices == []
        return
    (notice,) = notices
    assert str(notice).startswith("tool server raw: calls are not checked against unusable parts of schemas")
    assert "rough: " in str(notice)
    assert case.unchecked in str(notice)


@pytest.mark.parametrize("schema", NOT_OBJECTS)
async def test_a_schema_that_is_no_object(schema: Any) -> None:
    async with opened(plan_of([tool_of("rough", schema)])) as (toolset, notices):
        assert toolset.specs[0].parameters == {"type": "object", "properties": {}}
        async with toolset.chain("a", {}) as session:
            assert (await session.call(ToolCall("1", "rough", {"a": 1}))).content == '{"a": 1}'
    assert [str(notice) for notice in notices] == [
        f"tool server raw: the tool rough has no schema, but {schema!r}; models see one without properties"
    ]


async def test_tools_that_are_left_out_are_not_told() -> None:
    tools = [PLAIN, *(tool_of(case.name, case.schema) for case in SCHEMAS), tool_of("none", None), {"nameless": 1}]
    async with opened(plan_of(tools), allow=["plain"]) as (toolset, notices):
        assert [spec.name for spec in toolset.specs] == ["plain"]
    assert notices == []
