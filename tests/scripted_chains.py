"""Chains with scripted turns: the whole runner on a scripted server, with a generated tokenizer."""

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from aiohttp import web
from transformers import PreTrainedTokenizerFast

from agentfactory.rollout.chains.agent_hooks import AgentHooks
from agentfactory.rollout.chains.chain_runner import ChainRunner
from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.chains.simulated_user import open_users
from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.gateway.client_agents import ClientAgent
from agentfactory.rollout.gateway.gateway_runner import GatewayRunner
from agentfactory.rollout.inference.inference_client import InferenceClient
from agentfactory.rollout.rewards import Rewards
from agentfactory.rollout.text.load_renderer import make_renderer
from agentfactory.rollout.text.renderer import Renderer
from agentfactory.rollout.trajectory import Trajectory
from agentfactory.tools.sessions.toolset import open_toolset
from tests.chat_tokenizers import make_tokenizer, trl_template
from tests.scripted_server import ScriptedServer, serve_script

NOTE = '''
from agentfactory import reward, tool


@tool
def note(text: str) -> str:
    """Take a note."""
    return f"noted {text}"
'''
NOTES = f"{NOTE}\n@reward\ndef turns(trajectory):\n    return trajectory.turns\n"

ZERO = """
from agentfactory import reward

@reward
def nothing():
    return 0.0
"""
"""Source of a reward, for sources of tools alone: `rewards=["notes.py:nothing"]`."""


def call(name: str, **arguments: object) -> str:
    """A tool call in Hermes' format."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass
class Scripted:
    """A runner, the server behind it, and the tokenizer of both."""

    runner: ChainRunner
    server: ScriptedServer
    tokenizer: PreTrainedTokenizerFast

    async def run(self, **task: Any) -> Trajectory:
        sampling = Sampling("policy", 1.0, seed="s")
        return await self.runner.run("c0", {"question": "go", **task}, sampling, self.runner.setup.config.scored)

    async def run_all(self, tasks: Iterable[dict[str, Any]]) -> list[Trajectory]:
        sampling = Sampling("policy", 1.0, seed="s")
        runs = (self.runner.run(f"c{number}", task, sampling) for number, task in enumerate(tasks))
        return await asyncio.gather(*runs)

    def sent(self) -> list[str]:
        return [self.tokenizer.decode(request["token_ids"]) for request in self.server.requests]

    def check(self, *trajectories: Trajectory, dropped: int = 0) -> None:
        """Assert that the server sampled the rows' sampled tokens in exactly the rows' contexts, and that all but
        `dropped` of its answers are in some row."""
        answers = defaultdict(list)
        for request, sampled in zip(self.server.requests, self.server.responses, strict=True):
            answers[tuple(request["token_ids"])].append(sampled)
        for row in (row for trajectory in trajectories for row in trajectory.rows):
            starts = [i for i, value in enumerate(row.mask) if value and not (i and row.mask[i - 1])]
            for start in starts:
                end = start + [*row.mask[start:], 0].index(0)
                answers[tuple(row.token_ids[:start])].remove(row.token_ids[start:end])
            assert sum(span.end - span.start for span in row.versions) == sum(row.mask)
            assert all(all(row.mask[span.start : span.end]) for span in row.versions)
            assert all(p == 0.0 for p, sampled in zip(row.logprobs, row.mask, strict=True) if not sampled)
        assert sum(len(left) for left in answers.values()) == dropped


@cache
def _renderer(template: str, parser: str) -> Renderer:
    return make_renderer(make_tokenizer(template), parser=parser)


@asynccontextmanager
async def scripted_chains(
    folder: Path,
    texts: list[str] | Callable[[str], str | list[int]],
    agent: AgentHooks | ClientAgent | None = None,
    template: str | None = None,
    source: str = NOTES,
    renderer: Renderer | None = None,
    knows_stops: bool = False,
    **fields: Any,
) -> AsyncIterator[Scripted]:
    """Answer the n-th request by the n-th of `texts`, or each by `texts` of its prompt, and the end of the turn; ids
    are sent as they are. Truncate the answer at the request's token limit.

    There is a tool `note`, and the reward is the number of turns; `fields` are recipe sections. `knows_stops`: the
    server ends turns at stop strings."""

    def ended(text: str) -> list[int]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return [*ids, used.ends[bool(used.parse(ids).calls)]]

    def script(prompt: list[int]) -> list[int]:
        if callable(texts):
            said = texts(tokenizer.decode(prompt))
            return ended(said) if isinstance(said, str) else said
        ids = next(answers, None)
        if ids is None:
            raise web.HTTPBadRequest(text="the script is at its end")
        return ids

    (folder / "notes.py").write_text(source)
    sections = {"model": {"path": "x"}, "tools": ["notes.py:note"], "rewards": ["notes.py:turns"]}
    recipe = RolloutRecipe.model_validate({**sections, **fields})
    used = renderer or _renderer(template or trl_template("qwen2_5"), recipe.rollout.parser)
    tokenizer = used.tokenizer
    answers = iter([] if callable(texts) else [ended(text) for text in texts])
    async with (
        serve_script(script, decode=used.decode if knows_stops else None) as server,
        InferenceClient(server.url) as client,
        open_toolset(recipe, folder) as toolset,
        Rewards(recipe.rewards, folder) as rewards,
        open_users(recipe.rollout.user, folder) as users,
    ):
        if isinstance(agent, ClientAgent):
            async with agent, agent.gateway() as gateway:
                runner = GatewayRunner(recipe, used, client, toolset, rewards, agent, gateway)
                yield Scripted(runner, server, tokenizer)
        else:
            yield Scripted(ChainRunner(recipe, used, client, toolset, rewards, agent, users), server, tokenizer)
