"""Chains with scripted completions: error turns, endings and failures."""

from contextlib import AbstractAsyncContextManager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from aiohttp import web

from agentfactory.rollout.chains.sampling import Sampler, Sampling
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.inference.http_transport import InferenceError
from agentfactory.rollout.inference.inference_client import Completion
from agentfactory.rollout.trajectory import Outcome
from tests.scripted_chains import Scripted, call, scripted_chains

TOOLS = '''
import asyncio
from typing import Literal
from agentfactory import Environment, reward, tool


class Diary(Environment):
    """Keeps what one chain wrote."""

    def reset(self, word: str = "nothing", **task):
        if word == "forbidden":
            raise ValueError("that word is forbidden")
        self.pages = [word]

    @tool
    async def write(self, text: str, mood: Literal["good", "bad"] = "good") -> str:
        """Write a page."""
        await asyncio.sleep(0.01)
        self.pages.append(text)
        return f"page {len(self.pages)}"

    @tool
    def burn(self) -> str:
        """Burn it."""
        raise RuntimeError("it does not burn")

    @tool
    async def read(self) -> str:
        """Read all pages."""
        await asyncio.sleep(0.01)
        return "/".join(self.pages)

    def reward(self):
        return {"reward": len(self.pages) / 10, "pages": len(self.pages)}


@reward
def broken():
    raise RuntimeError("no verdict")
'''


def diary(folder: Path, texts: Any, **fields: Any) -> AbstractAsyncContextManager[Scripted]:
    return scripted_chains(folder, texts, source=TOOLS, **{"tools": ["notes.py:Diary"], "rewards": [], **fields})


async def test_every_mistake_gets_an_error_turn_and_the_chain_goes_on(tmp_path: Path) -> None:
    turns = [
        '<tool_call>\n{"name": "write", "arguments": {"text": \n</tool_call>',
        call("fly"),
        call("write", text="a", mood="ugly"),
        call("burn"),
        call("write", text="b"),
        "done",
    ]
    async with diary(tmp_path, turns) as chains:
        trajectory = await chains.run()
    assert trajectory.outcome is Outcome.COMPLETED
    answers = [m["content"] for m in trajectory.messages if m["role"] == "tool"]
    told = [("JSON",), ("fly", "write"), ("mood", "bad"), ("it does not burn",), ("page 2",)]
    for answer, words in zip(answers, told, strict=True):
        assert all(word in answer for word in words)
    errors = {name: value for name, value in trajectory.metrics.items() if name.startswith("tool_errors/") and value}
    assert errors == {
        "tool_errors/malformed_call": 1,
        "tool_errors/unknown_tool": 1,
        "tool_errors/invalid_arguments": 1,
        "tool_errors/tool_error": 1,
    }
    assert trajectory.metrics["tool_calls"] == 4
    assert trajectory.reward == 0.2
    assert trajectory.malformed_turns == [0]
    (row,) = trajectory.rows
    roles = [row.roles[start:end] for start, end in row.turn_spans()]
    # of the first nothing can be read, and the second is a call without arguments
    assert [set(roles[turn]) for turn in (0, 1, 4, 5)] == [{"f"}, {"f"}, {"f", "a"}, {"f", "t"}]
    assert all((role == ".") == (not sampled) for role, sampled in zip(row.roles, row.mask, strict=False))


async def test_a_cut_call_is_told_and_its_closing_is_context(tmp_path: Path) -> None:
    turns = [call("write", text="very " * 30), "done"]
    async with diary(tmp_path, turns, rollout={"max_tokens": 15}) as chains:
        trajectory = await chains.run()
    assert trajectory.outcome is Outcome.COMPLETED
    assert "cut at 15 tokens" in trajectory.messages[2]["content"]
    row, end = trajectory.rows[0], chains.tokenizer.convert_tokens_to_ids("<|im_end|>")
    first = len(chains.server.requests[0]["token_ids"])
    assert row.mask[first : first + 16] == [1] * 15 + [0]
    assert row.token_ids[first + 15] == end, "the template's closing token was not sampled, so it is not trained"


async def test_failures_are_typed_and_never_a_reward(tmp_path: Path) -> None:
    async with diary(tmp_path, ["done"], rewards=["notes.py:broken"]) as chains:
        trajectory = await chains.run()
    assert (trajectory.outcome, trajectory.reward) == (Outcome.REWARD_ERROR, None)
    assert "no verdict" in (trajectory.error or "")

    async with diary(tmp_path, ["done"]) as chains:
        trajectory = await chains.run(word="forbidden")
        assert trajectory.outcome is Outcome.TOOL_INFRASTRUCTURE, "a task that the environment refuses"
        assert trajectory.reward is None

    def explode(prompt: str) -> str:
        raise web.HTTPBadRequest(text="boom")

    async with diary(tmp_path, explode) as chains:
        trajectory = await chains.run()
    assert (trajectory.outcome, trajectory.reward) == (Outcome.INFERENCE_ERROR, None)


async def test_a_turn_that_says_nothing_ends_the_chain_and_is_a_turn(tmp_path: Path) -> None:
    def then_nothing(prompt: str) -> str | list[int]:
        return call("write", text="a") if prompt.count("<|im_start|>assistant") == 1 else []

    async with diary(tmp_path, then_nothing) as chains:
        trajectory = await chains.run()
    assert [len(ids) for ids in chains.server.responses] == [len(chains.server.responses[0]), 0]
    first, length = len(chains.server.requests[0]["token_ids"]), len(chains.server.requests[1]["token_ids"])
    assert trajectory.turn_spans() == [(0, first, first + len(chains.server.responses[0])), (0, length, length)]


async def test_parallel_calls_answer_in_order(tmp_path: Path) -> None:
    turns = [call("write", text="a") + "\n" + call("burn") + "\n" + call("nothing"), "done"]
    async with diary(tmp_path, turns) as chains:
        trajectory = await chains.run()
    answers = [m for m in trajectory.messages if m["role"] == "tool"]
    assert [m["name"] for m in answers] == ["write", "burn", "nothing"]
    calls = [c["id"] for c in trajectory.messages[1]["tool_calls"]]
    assert [m["tool_call_id"] for m in answers] == calls
    assert len(set(calls)) == 3


async def test_a_chain_records_where_its_time_went(tmp_path: Path) -> None:
    turns = [call("write", text="a") + "\n" + call("write", text="b"), call("burn"), "done"]
    limits = {"calls_per_second": {"write": 1}}
    async with diary(tmp_path, turns, limits=limits) as chains:
        trajectory = await chains.run()
    # on a busy machine the calls of later turns wait for milliseconds, too
    told = [
        (str(one.activity), one.turn, one.name)
        for one in trajectory.timeline
        if one.activity != "wait" or one.turn == 0
    ]
    assert told == [
        ("setup", None, ""),
        ("model", 0, ""),
        ("tool", 0, "write"),
        ("wait", 0, "write"),
        ("tool", 0, "write"),
        ("model", 1, ""),
        ("tool", 1, "burn"),
        ("model", 2, ""),
        ("reward", None, ""),
    ]
    first, wait, second = (one for one in trajectory.timeline if one.name == "write")
    assert wait.start <= first.end
    assert first.end <= wait.end <= second.start
    assert wait.end - wait.start >= 0.01
    for before, after in pairwise(trajectory.timeline):
        assert 0 <= before.start <= before.end <= after.end <= trajectory.seconds + 1e-4


async def test_tokens_that_the_model_lacks_or_did_not_allow_are_the_servers_fault(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 300}')
    recipe: Any = {"model": {"path": str(tmp_path)}, "rollout": {"max_tokens": 4}}
    for ids, told in (
        ([10**9], r"the token 1000000000, and the model has 300"),
        ([5] * 9, "sampled 9 tokens, and max"),
    ):
        client: Any = SimpleNamespace(generate=AsyncMock(return_value=Completion(ids, [0.0] * len(ids), [], False, [])))
        sampler = Sampler(RolloutRecipe.model_validate(recipe), client, [])
        with pytest.raises(InferenceError, match=told):
            await sampler.sample([1], Sampling("policy", 1.0, seed="s"), 0, 4)
