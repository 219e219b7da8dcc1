"""A user's own agent in training, and turns with a forced prefix: rows match the server's requests to the token."""

import re
from pathlib import Path
from typing import Any

import pytest

from agentfactory.base.messages import ToolCall
from agentfactory.rollout.chains.agent_hooks import AgentHooks, Turn, load_agent
from agentfactory.rollout.config import AgentConfig
from agentfactory.rollout.inference.inference_client import Completion
from agentfactory.rollout.text.renderer import Parsed
from agentfactory.rollout.trajectory import Outcome, StopReason
from tests.chat_tokenizers import STRIPS_REASONING
from tests.scripted_chains import scripted_chains

CALL = '<tool_call>\n{"name": "note", "arguments": {"text": "a"}}\n</tool_call>'


@pytest.mark.parametrize("prefix", ["<think>\n", "Well, "])
@pytest.mark.parametrize("template", [None, STRIPS_REASONING])
async def test_turns_begin_with_the_prefix_which_is_context(tmp_path: Path, prefix: str, template: str | None) -> None:
    rest = "hm\n</think>\n\n" if "think" in prefix else ""
    texts = [f"{rest}{CALL}", f"{rest}done"]
    fields = {"rollout": {"assistant_prefix": prefix}}
    async with scripted_chains(tmp_path, texts, template=template, **fields) as chains:
        trajectory = await chains.run()
        assert all(sent.endswith(f"<|im_start|>assistant\n{prefix}") for sent in chains.sent())
        chains.check(trajectory)
        ids = chains.tokenizer.encode(prefix, add_special_tokens=False)
    assert trajectory.stop_reason is StopReason.ANSWER
    assert trajectory.metrics["tool/note/calls"] == 1
    answer = next(m for m in reversed(trajectory.messages) if m["role"] == "assistant")["content"]
    assert answer.endswith("done")
    assert answer.startswith("Well, ") == (prefix == "Well, "), "what the turn was made to begin with is part of it"
    for index, start, _ in trajectory.turn_spans():
        row = trajectory.rows[index]
        assert row.token_ids[start - len(ids) : start] == ids
        assert row.mask[start - len(ids) : start + 1] == [0] * len(ids) + [1]


class ThinksBriefly(AgentHooks):
    async def generate(self, turn: Turn) -> Completion:
        thought = await turn.sample("<think>", max_tokens=4)
        return await turn.sample("</think>", after=thought) if thought.cut else thought


async def test_a_turn_may_be_sampled_in_pieces(tmp_path: Path) -> None:
    texts = ["a long, long thought", CALL, "<", "why not", "done"]
    fields = {"rollout": {"max_tokens": 60}}
    async with scripted_chains(tmp_path, texts, agent=ThinksBriefly(), **fields) as chains:
        trajectory = await chains.run()
        chains.check(trajectory)
        limits = [request["sampling_params"]["max_tokens"] for request in chains.server.requests]
        said = chains.tokenizer.decode(trajectory.rows[0].token_ids)
    assert limits == [4, 56, 4], "a turn's pieces share rollout.max_tokens"
    assert trajectory.outcome is Outcome.COMPLETED
    assert re.search(r"<think>a [^<]*</think><tool_call>", said)
    assert trajectory.turns == 2
    (_, start, end), last = trajectory.turn_spans()
    assert 0 in trajectory.rows[0].mask[start:end], "the first turn holds a token that was put there"
    assert all(trajectory.rows[0].mask[last[1] : last[2]])


class Shouts(AgentHooks):
    def parse(self, turn: Turn, completion: Completion) -> Parsed:
        text = turn.parse(completion).message["content"]
        found = re.match(r"NOTE (\w+)", text)
        calls = [ToolCall(f"call_{turn.number}", "note", {"text": found[1]})] if found else []
        return Parsed({"role": "assistant", "content": text}, calls)


async def test_an_agent_may_read_turns_in_its_own_way(tmp_path: Path) -> None:
    async with scripted_chains(tmp_path, ["NOTE tea", "NOTE milk", "done"], agent=Shouts()) as chains:
        trajectory = await chains.run()
        chains.check(trajectory)
    assert [m["content"] for m in trajectory.messages if m["role"] == "tool"] == ["noted tea", "noted milk"]


class Fails(AgentHooks):
    def __init__(self, where: str) -> None:
        self.where = where

    async def generate(self, turn: Turn) -> Completion:
        completion = await turn.sample()
        match self.where:
            case "generate":
                raise KeyError("plan")
            case "foreign":
                return Completion([1], [-1.0], [], False, [1])
            case "after":
                return await turn.sample(after=completion)
        return completion

    def parse(self, turn: Turn, completion: Completion) -> Any:
        if self.where == "parse":
            raise RuntimeError("no idea")
        return "text"


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("generate", "Fails.generate: KeyError: 'plan'"),
        ("foreign", "Fails.generate: TypeError: it returned Completion"),
        ("after", "Fails.generate: ValueError: after: the model ended its turn there"),
        ("parse", "Fails.parse: RuntimeError: no idea"),
        ("type", "Fails.parse: TypeError: it returned 'text', not a Parsed"),
    ],
)
async def test_an_agent_that_fails_is_named_and_never_a_reward(tmp_path: Path, where: str, error: str) -> None:
    async with scripted_chains(tmp_path, ["done"], agent=Fails(where)) as chains:
        trajectory = await chains.run()
    assert (trajectory.outcome, trajectory.reward, trajectory.stop_reason) == (Outcome.INFERENCE_ERROR, None, None)
    assert (trajectory.error or "").startswith(error)


AGENTS = """
from agentfactory import Agent

number = 3

class Plain:
    async def generate(self, turn): ...

class Sync(Agent):
    def generate(self, turn): ...

class Awaited(Agent):
    async def parse(self, turn, completion): ...

class Short(Agent):
    def parse(self, completion): ...

class Needy(Agent):
    def __init__(self, plan): ...

class Right(Agent):
    async def generate(self, turn):
        return await turn.sample("So ")

async def yielding(client, task):
    yield "an answer"
"""


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("number", "agents.py:number is not an agent but .*; fix: name an async function or a subclass of Agent"),
        ("yielding", "agents.py:yielding yields; fix: return"),
        ("Plain", "Plain is not an agent; fix: write `class Plain"),
        ("Sync", "generate has a wrong signature; fix: write `async def generate"),
        ("Awaited", "parse has a wrong signature; fix: write `def parse"),
        ("Short", "parse has a wrong signature; fix: write `def parse"),
        ("Needy", "cannot be created without arguments: .*'plan'; fix: give its parameters"),
        ("Missing", "defines no Missing"),
    ],
)
def test_what_is_no_agent_is_refused_at_the_start(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "agents.py").write_text(AGENTS)
    with pytest.raises(ValueError, match=problem):
        load_agent(AgentConfig(name=f"agents.py:{name}"), tmp_path)


async def test_the_recipe_names_an_agent(tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text(AGENTS)
    assert type(load_agent(None, tmp_path)) is AgentHooks
    agent = load_agent(AgentConfig(name="agents.py:Right"), tmp_path)
    async with scripted_chains(tmp_path, ["done"], agent=agent) as chains:
        trajectory = await chains.run()
    assert trajectory.messages[-1]["content"] == "So done"
