"""Agents with their own loop on every model family: their chains have the same rows as our own loop's, for every
reasoning option and call format."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from agentfactory.rollout.gateway.client_agents import ChainTools, FunctionAgent
from agentfactory.rollout.trajectory import Trajectory
from tests.model_families import FAMILIES, Family, renderer_of
from tests.scripted_chains import scripted_chains

# the SDK looks at the machine by `uname`
pytestmark = pytest.mark.processes

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


async def run(client: AsyncOpenAI, task: dict[str, Any], tools: ChainTools) -> None:
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
    for agent in (None, FunctionAgent("a.py:run", run)):
        async with scripted_chains(tmp_path, turns, agent, renderer=renderer) as chains:
            played.append(await chains.run())
            chains.check(played[-1])
    ours, theirs = played
    assert (ours.outcome, ours.turns) == (theirs.outcome, theirs.turns) == ("completed", 4), theirs.error
    assert [(row.token_ids, row.mask) for row in theirs.rows] == [(row.token_ids, row.mask) for row in ours.rows]
    assert theirs.metrics["gateway/unmatched_turns"] == 0
    kept = {"keep": 1, "template": None, "drop": 4 if renderer.info["choice"] == "drop" else None}[reasoning]
    assert kept is None or len(theirs.rows) == kept, json.dumps(renderer.info)
