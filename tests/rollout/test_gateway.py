"""Agents on OpenAI's real SDKs through the gateway: their answers, and the trained rows."""

import json
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from agentfactory.rollout.gateway.client_agents import ChainTools, FunctionAgent
from agentfactory.rollout.gateway.gateway_server import Endpoint
from agentfactory.rollout.trajectory import Outcome, StopReason, Trajectory
from tests.model_families import FAMILIES, Family, renderer_of
from tests.scripted_chains import Scripted, scripted_chains

pytestmark = pytest.mark.processes

# the SDK looks at the machine by `uname`

CALL = '<tool_call>\n{"name": "note", "arguments": {"text": "tea", "cups": 2.0}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {
        "name": "note",
        "description": "Take a note.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}


async def play(folder: Path, texts: list[str], function: Any, **fields: Any) -> tuple[Trajectory, Scripted]:
    dropped = fields.pop("dropped", 0)
    async with scripted_chains(folder, texts, agent=FunctionAgent("a.py:run", function), **fields) as chains:
        trajectory = await chains.run()
        chains.check(trajectory, dropped=dropped)
        return trajectory, chains


@pytest.mark.parametrize("stream", [False, True])
async def test_an_openai_agent_with_its_own_loop(tmp_path: Path, stream: bool) -> None:
    seen: list[Any] = []
    said: list[str] = []

    async def run(client: AsyncOpenAI, task: dict[str, Any]) -> None:
        messages: list[Any] = [{"role": "system", "content": "You take notes."}]
        messages.append({"role": "user", "content": task["question"]})
        while True:
            body: Any = {"model": "gpt-5", "messages": messages, "tools": [TOOL]}
            if stream:
                async with client.chat.completions.stream(**body, stream_options={"include_usage": True}) as events:
                    said.extend([event.type async for event in events])
                    answer: Any = await events.get_final_completion()
            else:
                answer = await client.chat.completions.create(**body)
            seen.append(answer)
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return
            for call in message.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "noted"})

    trajectory, chains = await play(tmp_path, [CALL, f"More.\n{CALL}", "done"], run)
    assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.COMPLETED, StopReason.ANSWER)
    assert (trajectory.turns, trajectory.reward, len(trajectory.rows)) == (3, 3.0, 1)
    assert {"content.delta", "tool_calls.function.arguments.delta"} <= {*said} or not stream
    first, second, last = seen
    assert first.model == "gpt-5"
    assert first.choices[0].finish_reason == "tool_calls"
    assert first.choices[0].message.content == ("" if stream else None)
    assert json.loads(first.choices[0].message.tool_calls[0].function.arguments) == {"text": "tea", "cups": 2.0}
    assert second.choices[0].message.content == "More."
    assert (last.choices[0].message.content, last.choices[0].finish_reason) == ("done", "stop")
    for answer, request, response in zip(seen, chains.server.requests, chains.server.responses, strict=True):
        sent = len(request["token_ids"])
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (sent, len(response))
    whole = chains.tokenizer.decode(trajectory.rows[0].token_ids)
    assert whole == chains.tokenizer.apply_chat_template(
        trajectory.messages, tools=[TOOL], tokenize=False
    ).removesuffix("\n"), "the row is the template's own text"
    assert [m["role"] for m in trajectory.messages] == ["system", "user", *["assistant", "tool"] * 2, "assistant"]
    assert trajectory.metrics["gateway/unmatched_turns"] == 0
    assert trajectory.metrics["tool_calls"] == 2, "calls of the agent's own tools"


async def test_stop_strings_and_limits_end_a_turn_where_the_agent_says(tmp_path: Path) -> None:
    async def run(client: AsyncOpenAI) -> None:
        messages: list[Any] = [{"role": "user", "content": "go"}]
        answer = await client.chat.completions.create(model="m", messages=messages, stop=["</code>", "never"])
        choice = answer.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("stop", "<code>\nprint(1)\n")
        messages += [{"role": "assistant", "content": f"{choice.message.content}</code>"}]
        messages += [{"role": "user", "content": "1"}]
        answer = await client.chat.completions.create(model="m", messages=messages, max_tokens=3)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 3
        messages += [answer.choices[0].message, {"role": "user", "content": "go on"}]
        await client.chat.completions.create(model="m", messages=messages)

    async with scripted_chains(
        tmp_path,
        ["<code>\nprint(1)\n</code> and much more", "a long answer", "done"],
        agent=FunctionAgent("a.py:run", run),
    ) as chains:
        trajectory = await chains.run()
        requests, responses = chains.server.requests, chains.server.responses
        tokenizer = chains.tokenizer
    assert trajectory.error is None
    (row,) = trajectory.rows
    (first, second, third) = (row.token_ids[start:end] for _, start, end in trajectory.turn_spans())
    assert responses[0][: len(first)] == first
    text = tokenizer.decode(first)
    assert "</code>" in text
    assert "</code>" not in tokenizer.decode(first[:-1]), "it ends with the token that completes the stop string"
    assert (second, third) == (responses[1], responses[2])
    for request, (_, start, _) in zip(requests, trajectory.turn_spans(), strict=True):
        assert request["token_ids"] == row.token_ids[:start]
    assert sum(row.mask) == len(first) + len(second) + len(third)


async def test_several_choices_are_each_trained_once(tmp_path: Path) -> None:
    async def run(client: AsyncOpenAI) -> None:
        messages: list[Any] = [{"role": "user", "content": "go"}]
        answer = await client.chat.completions.create(model="m", messages=messages, n=3)
        texts = [choice.message.content for choice in answer.choices]
        assert sorted(text or "" for text in texts) == ["one", "three", "two"]
        messages += [answer.choices[1].message, {"role": "user", "content": "more"}]
        await client.chat.completions.create(model="m", messages=messages)

    trajectory, _ = await play(tmp_path, ["one", "two", "three", "done"], run)
    assert trajectory.error is None
    assert (trajectory.turns, len(trajectory.rows)) == (4, 3)
    assert [row.mask.count(1) > 0 for row in trajectory.rows] == [True] * 3


async def test_requests_that_would_keep_other_chains_waiting_are_refused_at_once(tmp_path: Path) -> None:
    huge = "x" * 10_000_000
    nested = '{"a":' * 900 + "1" + "}" * 900
    call = f'{{"id": "c", "type": "function", "function": {{"name": "f", "arguments": "{huge}"}}}}'
    bodies = {
        f'{{"messages": [{{"role": "user", "content": "{huge}"}}]}}': "characters",
        f'{{"messages": [{{"role": "assistant", "tool_calls": [{call}]}}, {{"role": "user", "content": "go"}}]}}': (
            "characters"
        ),
        '{"messages": [{"role": "user", "content": "go"}], "tools": '
        f'[{{"type": "function", "function": {{"name": "f", "parameters": {nested}}}}}]}}': "messages: ",
    }

    async def run(endpoint: Endpoint) -> None:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {endpoint.key}"}) as session:
            for body, problem in bodies.items():
                async with session.post(f"{endpoint.url}/chat/completions", data=body) as response:
                    assert (response.status, problem in await response.text()) == (400, True)
            squeezed = {"Content-Encoding": "gzip"}
            async with session.post(f"{endpoint.url}/chat/completions", data=b"{}", headers=squeezed) as response:
                assert (response.status, "cannot be read" in await response.text()) == (400, True)

    trajectory, chains = await play(tmp_path, [], run)
    assert (chains.server.requests, trajectory.error) == ([], None)


async def test_sampling_is_the_recipes_and_a_person_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run(client: AsyncOpenAI) -> None:
        messages: list[Any] = [{"role": "user", "content": "go"}]
        await client.chat.completions.create(
            model="m", messages=messages, tools=[TOOL], temperature=0, top_p=0.9, tool_choice="required", seed=3
        )
        await client.chat.completions.create(
            model="m", messages=messages, temperature=1, top_p=1, frequency_penalty=0, tool_choice="auto"
        )

    trajectory, chains = await play(tmp_path, ["one", "two"], run)
    for request in chains.server.requests:
        assert request["sampling_params"]["temperature"] == 1.0
        assert not {"top_p", "seed"} & set(request["sampling_params"])
    assert trajectory.metrics["gateway/unmet_parameters"] == 4
    for name in ("temperature=0", "top_p=0.9", "tool_choice=required", "seed=3"):
        assert f"an agent requests {name}, which is not applied" in caplog.text


async def test_a_chain_ends_when_its_turns_are_taken(tmp_path: Path) -> None:
    async def run(client: AsyncOpenAI) -> None:
        while True:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}])

    trajectory, _ = await play(tmp_path, ["a", "b", "c"], run, rollout={"max_turns": 3})
    assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.MAX_TURNS, StopReason.MAX_TURNS)
    assert (trajectory.turns, trajectory.reward) == (3, 3.0)


async def test_a_conversation_without_room_is_told_so_and_may_be_shortened(tmp_path: Path) -> None:
    async def run(client: AsyncOpenAI, task: dict[str, Any]) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "go" * 200}])
        assert refused.value.code == "context_length_exceeded"
        if task["question"] == "give up":
            raise RuntimeError("too long")
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}])

    fields = {"rollout": {"max_total_tokens": 100}}
    trajectory, _ = await play(tmp_path, ["done"], run, **fields)
    assert trajectory.outcome is Outcome.COMPLETED
    async with scripted_chains(tmp_path, [], agent=FunctionAgent("a.py:run", run), **fields) as chains:
        trajectory = await chains.run(question="give up")
    assert (trajectory.outcome, trajectory.stop_reason) == (Outcome.CONTEXT_OVERFLOW, StopReason.CONTEXT_OVERFLOW)


async def test_an_agent_that_fails_is_an_outcome_of_its_own(tmp_path: Path) -> None:
    async def run(client: AsyncOpenAI) -> None:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}])
        raise KeyError("plan")

    trajectory, _ = await play(tmp_path, ["a"], run)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.AGENT_ERROR, None)
    assert (trajectory.error or "").startswith("run: KeyError: 'plan' (test_gateway.py, line ")
    assert trajectory.turns == 1

    trajectory, _ = await play(tmp_path, ["a"], run, rollout={"on_outcome": {"agent_error": "keep"}})
    assert (trajectory.outcome, trajectory.reward) == (Outcome.AGENT_ERROR, 1.0)


async def test_a_server_that_refuses_loses_the_chain_even_if_the_agent_goes_on(tmp_path: Path) -> None:
    async def run(client: AsyncOpenAI) -> str:
        with pytest.raises(openai.APIError):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}])
        return "fine"

    trajectory, _ = await play(tmp_path, [], run)
    assert trajectory.outcome is Outcome.INFERENCE_ERROR
    assert "the script is at its end" in (trajectory.error or "")


async def test_the_recipes_tools_are_the_agents_to_call(tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "note", "arguments": {"text": "tea"}}\n</tool_call>'
    bad = '<tool_call>\n{"name": "note", "arguments": {"words": "tea"}}\n</tool_call>'
    trajectory, _ = await play(tmp_path, [call, bad, "done"], call_tools)
    results = [m["content"] for m in trajectory.messages if m["role"] == "tool"]
    assert results[0] == "noted tea"
    assert trajectory.metrics["tool/note/calls"] == trajectory.metrics["tool_calls"] == 2
    assert trajectory.metrics["tool_errors/invalid_arguments"] == 1
    assert len(trajectory.rows) == 1


async def test_a_call_that_no_client_can_decode_is_text(tmp_path: Path) -> None:
    half = '<tool_call>\n{"name": "note", "arguments": {"text": "\\ud800"}}\n</tool_call>'

    async def run(client: AsyncOpenAI) -> None:
        messages: list[Any] = [{"role": "user", "content": "go"}]
        answer = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
        message = answer.choices[0].message
        assert (message.content, message.tool_calls) == (half, None)
        messages += [message, {"role": "user", "content": "what?"}]
        await client.chat.completions.create(model="m", messages=messages, tools=[TOOL])

    trajectory, _ = await play(tmp_path, [half, "done"], run)
    assert trajectory.error is None
    assert (len(trajectory.rows), trajectory.malformed_turns) == (1, [0])
    assert trajectory.metrics["tool_errors/malformed_call"] == 1


# ---- every model family: rows as our own loop's, for every reasoning option and call format


# the SDK looks at the machine by `uname`

QUICK = ("qwen3", "qwq", "kimi_k2", "gptoss", "glm_4_7", "deepseek_v3", "mistral_small_3_2")
"""Templates that drop reasoning, write ids of calls, frame words, begin the next turn, or describe no tools."""


def turns_of(renderer: Any) -> list[str]:
    """Three turns with reasoning and a call, and one with reasoning and words."""
    behaviour, parser = renderer.behaviour, renderer.parser
    opening, closing = behaviour.tags
    thought, words = f"{'' if behaviour.opens_reasoning else opening}hm{closing}", "Done."
    if renderer.info["parser"] == "harmony":
        thought, words = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant", "<|channel|>final<|message|>Done."
    write = parser.write_as_content if parser.marks else parser.write
    return [*(thought + write([("note", {"text": text})], []) for text in ("tea", "milk", "tea")), thought + words]


async def call_tools(client: AsyncOpenAI, task: dict[str, Any], tools: ChainTools) -> None:
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    ids = set()
    while True:
        answer = await client.chat.completions.create(model="any", messages=messages, tools=tools.definitions)
        message = answer.choices[0].message
        if not message.tool_calls:
            return
        calls = [call.model_dump() for call in message.tool_calls]
        messages.append({"role": "assistant", "content": message.content, "tool_calls": calls})
        for call in message.tool_calls:
            assert call.id not in ids
            ids.add(call.id)
            content = await tools.call(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


@pytest.mark.parametrize("reasoning", ["keep", "drop", "template"])
@pytest.mark.parametrize(
    "family", [pytest.param(f, id=f.name, marks=() if f.name in QUICK else pytest.mark.long) for f in FAMILIES]
)
async def test_rows_are_those_of_our_own_loop(family: Family, reasoning: str, tmp_path: Path) -> None:
    renderer = renderer_of(family, reasoning=reasoning)
    turns = turns_of(renderer)
    played: list[Trajectory] = []
    for agent in (None, FunctionAgent("a.py:call_tools", call_tools)):
        async with scripted_chains(tmp_path, turns, agent, renderer=renderer) as chains:
            played.append(await chains.run())
            chains.check(played[-1])
    ours, theirs = played
    assert (ours.outcome, ours.turns) == (theirs.outcome, theirs.turns) == ("completed", 4), theirs.error
    assert [(row.token_ids, row.mask) for row in theirs.rows] == [(row.token_ids, row.mask) for row in ours.rows]
    assert theirs.metrics["gateway/unmatched_turns"] == 0
    kept = {"keep": 1, "template": None, "drop": 4 if renderer.info["choice"] == "drop" else None}[reasoning]
    assert kept is None or len(theirs.rows) == kept, json.dumps(renderer.info)
