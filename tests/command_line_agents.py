"""Chains of an unmodified command-line agent with scripted calls, and checks for leftover processes."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.config import AgentConfig
from agentfactory.rollout.gateway.program_agent import ProgramAgent
from agentfactory.rollout.trajectory import Outcome, Trajectory
from tests.scripted_chains import NOTE, Scripted, scripted_chains

CHAINS = 8
SOURCE = f"""{NOTE}
@reward
def turns(workspace):
    file = workspace / "made.txt"
    return float(file.exists() and file.read_text() == "hello\\n")
"""


def call(words: str, tool: str, **arguments: Any) -> str:
    """A turn with a call."""
    return f"{words}\n<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


async def play(folder: Path, config: AgentConfig, texts: list[str], marker: str) -> list[Trajectory]:
    """Run eight concurrent chains. Their first turn is the first of `texts`, and the second turn is the last. `marker`
    is in the task; it identifies these chains' processes."""
    async with _chains(folder, config, texts) as chains:
        tokenizer, first = chains.tokenizer, texts[0].splitlines()[0]
        turns = [tokenizer.encode(text + "<|im_end|>", add_special_tokens=False) for text in texts]
        chains.server.script = lambda ids: turns[first in tokenizer.decode(ids)]
        runner = chains.runner
        task = {"question": f"Make made.txt, as in {marker}."}
        scored = runner.setup.config.scored
        played = (runner.run(f"c{i}", task, Sampling("p", 1.0, str(i)), scored) for i in range(CHAINS))
        trajectories = list(await asyncio.gather(*played))
        chains.check(*trajectories)
    return trajectories


@asynccontextmanager
async def _chains(folder: Path, config: AgentConfig, texts: list[str]) -> AsyncIterator[Scripted]:
    limits = {"concurrency": CHAINS, "timeout_seconds": 400, "max_total_tokens": 131072, "max_tokens": 512}
    agent = ProgramAgent(config, folder)
    async with scripted_chains(folder, texts, agent=agent, source=SOURCE, rollout=limits) as chains:
        yield chains


def check_completed(played: list[Trajectory]) -> None:
    """Assert that each chain is one row of two turns, whose command has made the file."""
    assert [chain.error for chain in played] == [None] * CHAINS
    assert [(chain.outcome, chain.turns, chain.reward) for chain in played] == [(Outcome.COMPLETED, 2, 1.0)] * CHAINS
    assert [len(chain.rows) for chain in played] == [1] * CHAINS


def left(marker: str) -> list[int]:
    """Ids of processes that still run with the marker from the task in their command lines."""
    found = psutil.process_iter(["cmdline"])
    return [process.pid for process in found if any(marker in part for part in process.info["cmdline"] or [])]
