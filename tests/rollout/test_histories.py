"""Rows whose messages continue a conversation: nulls in their calls, and fields that no chain gets."""

import logging
from pathlib import Path
from typing import Any

import pytest

from agentfactory.rollout.chains.sampling import Sampling
from tests.scripted_chains import scripted_chains


def history(name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "noted", "tool_call_id": "c"},
        {"role": "user", "content": "and now?"},
    ]


async def test_nulls_that_the_recipes_tools_do_not_allow_are_not_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {"question": "go"},
        {"messages": history("note", {"text": "a", "extra": None, "more": None})},
        {"messages": history("other", {"extra": None})},
    ]
    async with scripted_chains(tmp_path, ["done"]) as chains:
        await chains.runner.check(rows)
        # the same object: groups of one row are one task
        assert await chains.runner.take(rows[0]) is rows[0]
        chain = await chains.runner.run("a", await chains.runner.take(rows[1]), Sampling("policy", 1.0, "a"))
    (called,) = chain.messages[-4]["tool_calls"]
    assert called["function"]["arguments"] == {"text": "a"}
    assert rows[1]["messages"][1]["tool_calls"][0]["function"]["arguments"]["extra"] is None
    dropped = "data: 2 nulls dropped from calls in messages, because the tools do not allow them (first in row 2)"
    assert caplog.text.count(dropped) == 1
    assert "data: 1 null kept in calls in messages, because no tool has that name (first in row 3)" in caplog.text


async def test_what_no_chain_gets_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    answered = [*history("note", {"text": "a"}), {"role": "assistant", "content": "This is the answer."}]
    rows = [{"question": "go", "system": "Be brief."}, {"messages": answered, "tools": [{"name": "search"}]}]
    async with scripted_chains(tmp_path, []) as chains:
        await chains.runner.check(rows)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told == [
        "data: the model does not get the field tools of 1 of 2 rows; chains have the recipe's tools and mcp_servers",
        "data: the model does not get the field system of 1 of 2 rows; put it into messages, or set "
        "rollout.system_prompt",
        "data: the messages of row 2 (1 of 2 rows) end with the assistant, and the model answers once more",
    ]
