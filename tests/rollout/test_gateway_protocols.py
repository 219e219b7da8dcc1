"""Agents on Anthropic's SDK and OpenAI's Responses API, through the gateway."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from anthropic import AsyncAnthropic, BadRequestError
from openai import AsyncOpenAI

from agentfactory.rollout.gateway.client_agents import FunctionAgent
from tests.chat_tokenizers import trl_template
from tests.rollout.test_gateway import CALL, TOOL, play
from tests.scripted_chains import scripted_chains

# the SDKs look at the machine by `uname`
pytestmark = pytest.mark.processes

ANTHROPIC_TOOL: Any = {
    "name": "note",
    "description": "Take a note.",
    "input_schema": {"type": "object", "properties": {"text": {"type": "string"}}},
}
RESPONSES_TOOL: Any = {"type": "function", **TOOL["function"], "strict": False}
THINKS = f"<think>\nTea?\n</think>\n\n{CALL}"
THOUGHT = "<think>\n\n</think>\n\ndone"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_anthropic_agent(tmp_path: Path, stream: bool) -> None:
    async def run(anthropic: AsyncAnthropic, task: dict[str, Any]) -> str:
        body: dict[str, Any] = {"model": "claude", "max_tokens": 100, "tools": [ANTHROPIC_TOOL], "system": "Notes."}
        body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
        messages: list[Any] = [{"role": "user", "content": task["question"]}]
        while True:
            if stream:
                async with anthropic.messages.stream(**body, messages=messages) as events:
                    async for _ in events:
                        """The SDK assembles the message."""
                    answer = await events.get_final_message()
            else:
                answer = await anthropic.messages.create(**body, messages=messages)
            messages.append({"role": "assistant", "content": answer.content})
            if answer.stop_reason != "tool_use":
                assert answer.stop_reason == "end_turn"
                return answer.content[-1].text
            (thinking, call) = answer.content
            assert (thinking.type, thinking.thinking) == ("thinking", "Tea?")
            assert (call.name, call.input) == ("note", {"text": "tea", "cups": 2})
            assert answer.usage.output_tokens > 10
            blocks = [{"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "ok"}]}]
            # the marker moves to the last message of each request
            messages.append({"role": "user", "content": [{**blocks[0], "cache_control": {"type": "ephemeral"}}]})
            for message in messages[:-1]:
                for block in message["content"] if message["role"] == "user" else []:
                    if isinstance(block, dict):
                        block.pop("cache_control", None)

    texts = [THINKS, THINKS, THOUGHT]
    trajectory, _ = await play(tmp_path, texts, run, template=trl_template("qwen3_training"))
    assert trajectory.error is None
    assert (trajectory.result, trajectory.turns, len(trajectory.rows)) == ("done", 3, 1)
    assert [m["role"] for m in trajectory.messages] == ["system", "user", *["assistant", "tool"] * 2, "assistant"]
    assert trajectory.metrics["gateway/unmatched_turns"] == 0
    assert trajectory.metrics["gateway/unmet_parameters"] == 0


async def test_anthropic_stop_sequences_limits_and_counts(tmp_path: Path) -> None:
    async def run(anthropic: AsyncAnthropic) -> None:
        messages: list[Any] = [{"role": "user", "content": "go"}]
        answer = await anthropic.messages.create(
            model="m", max_tokens=100, messages=messages, stop_sequences=["END"], extra_body={"temperature": 0.2}
        )
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")
        assert answer.content[0].text == "so "
        messages += [{"role": "assistant", "content": "so"}, {"role": "user", "content": "on"}]
        counted = await anthropic.messages.count_tokens(model="m", messages=messages)
        answer = await anthropic.messages.create(model="m", max_tokens=2, messages=messages)
        assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 2)
        assert answer.usage.input_tokens == counted.input_tokens
        assert [model.id async for model in anthropic.models.list()] == ["policy"]
        long: Any = [{"role": "user", "content": "go" * 5000}]
        with pytest.raises(BadRequestError, match="prompt is too long: "):
            await anthropic.messages.create(model="m", max_tokens=9, messages=long)

    agent = FunctionAgent("a.py:run", run)
    async with scripted_chains(tmp_path, ["so END on", "a long story"], agent=agent) as chains:
        trajectory = await chains.run()
    assert trajectory.error is None
    assert len(trajectory.rows) == 1
    assert trajectory.metrics["gateway/unmet_parameters"] == 1


@pytest.mark.parametrize("way", ["replayed", "stored", "streamed"])
async def test_a_responses_agent(tmp_path: Path, way: str) -> None:
    async def run(client: AsyncOpenAI, task: dict[str, Any]) -> str:
        body: dict[str, Any] = {"model": "gpt", "instructions": "Notes.", "tools": [RESPONSES_TOOL]}
        items: list[Any] = [{"role": "user", "content": task["question"]}]
        sent, previous = items, None
        while True:
            if way == "streamed":
                async with client.responses.stream(**body, input=sent) as events:
                    async for _ in events:
                        """The SDK assembles the answer."""
                    answer = await events.get_final_response()
            else:
                answer = await client.responses.create(
                    **body, input=sent, **({"previous_response_id": previous} if previous else {})
                )
            calls = [item for item in answer.output if item.type == "function_call"]
            results = [{"type": "function_call_output", "call_id": call.call_id, "output": "ok"} for call in calls]
            if not calls:
                assert answer.status == "completed"
                return answer.output_text
            assert json.loads(calls[0].arguments) == {"text": "tea", "cups": 2}
            if way == "stored":
                sent, previous = results, answer.id
            else:
                items += [*(item.model_dump() for item in answer.output), *results]
                sent = items

    texts = [THINKS, THINKS, THOUGHT]
    trajectory, _ = await play(tmp_path, texts, run, template=trl_template("qwen3_training"))
    assert trajectory.error is None
    assert (trajectory.result, trajectory.turns, len(trajectory.rows)) == ("done", 3, 1)
    assert trajectory.metrics["gateway/unmatched_turns"] == 0


async def test_responses_limits_and_what_is_not_known(tmp_path: Path) -> None:
    async def run(client: AsyncOpenAI) -> str:
        included: Any = ["message.output_text.logprobs"]
        answer = await client.responses.create(model="m", input="go", max_output_tokens=2, include=included)
        (said,) = answer.output
        assert said.type == "message"
        (part,) = said.content
        assert part.type == "output_text"
        assert [token.logprob for token in part.logprobs or []] == [-1.0, -1.0]
        assert "".join(token.token for token in part.logprobs or []) == part.text
        assert answer.status == "incomplete"
        assert answer.incomplete_details.reason == "max_output_tokens"
        for asked in ({"previous_response_id": "resp_x"}, {"input": [{"type": "item_reference", "id": "x"}]}):
            with pytest.raises(openai.NotFoundError):
                await client.responses.create(**{"model": "m", "input": "go", **asked})  # type: ignore[call-overload]
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(
                model="m", input="go", text={"format": {"type": "json_object"}}, background=False
            )
        return str(refused.value)

    trajectory, _ = await play(tmp_path, ["a long story"], run)
    assert trajectory.error is None
    assert "text.format: a grammar changes the distribution" in (trajectory.result or "")
