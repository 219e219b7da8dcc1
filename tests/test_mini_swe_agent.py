"""mini-swe-agent, a command-line agent, as it is: its commands run, and nothing of it is left.

`make test-agents` installs it into an environment of its own, because it does not share ours' versions.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from agentfactory.rollout.config import AgentConfig
from agentfactory.rollout.gateway.program import ProgramAgent
from agentfactory.rollout.sampling import Sampling
from agentfactory.rollout.trajectory import Outcome, Trajectory
from tests.scripted_chains import Scripted, scripted_chains

MINI = os.environ.get("AGENTFACTORY_MINI", "")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not MINI, reason="mini-swe-agent is not installed: make test-agents"),
]
CHAINS = 8
TASK = """
from agentfactory import reward, tool


@tool
def note(text: str) -> str:
    \"\"\"Take a note.\"\"\"
    return text


@reward
def turns(workspace):
    file = workspace / "made.txt"
    return float(file.exists() and file.read_text() == "hello\\n")
"""
ENV = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_SILENT_STARTUP": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "TERM": "dumb",
}


def call(words: str, command: str) -> str:
    arguments = {"name": "bash", "arguments": {"command": command}}
    return f"{words}\n<tool_call>\n{json.dumps(arguments)}\n</tool_call>"


@asynccontextmanager
async def mini(folder: Path, first: str, seconds: float) -> AsyncIterator[Scripted]:
    """Chains of mini-swe-agent, whose first turn runs the command `first`, and whose second ends the task."""
    options = ["-y", "--exit-immediately", "-m", "openai/policy", "-c", "mini.yaml", "-o", "${chain}/log.json"]
    command = [MINI, *options, "-t", "${task.question}"]
    texts = [call("I write.", first), call("I finish.", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")]
    limits = {"concurrency": CHAINS, "timeout_seconds": seconds, "max_total_tokens": 32768, "max_tokens": 512}
    agent = ProgramAgent(AgentConfig(command=command, env=ENV), folder)
    async with scripted_chains(folder, texts, agent=agent, source=TASK, rollout=limits) as chains:
        tokenizer = chains.tokenizer
        turns = [tokenizer.encode(text + "<|im_end|>", add_special_tokens=False) for text in texts]
        chains.server.script = lambda ids: turns["I write." in tokenizer.decode(ids)]
        yield chains


async def run(chains: Scripted, marker: str) -> list[Trajectory]:
    runner = chains.runner
    scored = runner.setup.config.scored
    task = {"question": f"Make made.txt, as in {marker}."}
    played = (runner.run(f"c{i}", task, Sampling("p", 1.0, str(i)), scored) for i in range(CHAINS))
    return list(await asyncio.gather(*played))


def left(marker: str) -> list[int]:
    """Processes that still run with the number that is in the task and in the command."""
    found = psutil.process_iter(["cmdline"])
    return [process.pid for process in found if any(marker in part for part in process.info["cmdline"] or [])]


async def test_its_commands_run_and_files_change(tmp_path: Path) -> None:
    async with mini(tmp_path, "echo hello > made.txt; sleep 86397 & ls", 400) as chains:
        played = await run(chains, "86397")
        chains.check(*played)
    assert [(chain.outcome, chain.turns, chain.reward) for chain in played] == [(Outcome.COMPLETED, 2, 1.0)] * CHAINS
    assert [len(chain.rows) for chain in played] == [1] * CHAINS
    assert not left("86397")


async def test_one_that_takes_too_long_is_ended_and_typed(tmp_path: Path) -> None:
    async with mini(tmp_path, "sleep 86398", 60) as chains:
        script = chains.server.script
        chains.server.script = lambda _: script([])  # the same command again and again: it ends each after a while
        played = await run(chains, "86398")
        assert len(chains.server.requests) > 0, "some were in the middle of their command"
    assert [chain.outcome for chain in played] == [Outcome.TIMEOUT] * CHAINS
    assert not left("86398")
