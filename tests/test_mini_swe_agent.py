"""mini-swe-agent, an unmodified command-line agent: its commands run, and none of its processes is left.

`make test-agents` installs it into a separate environment, because it needs other versions of packages."""

import os
from pathlib import Path

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.base.processes.sandbox_limits import SandboxKind
from agentfactory.rollout.config import AgentConfig
from agentfactory.rollout.gateway.program_agent import ProgramAgent
from tests.command_line_agents import call, check_completed, left, play

MINI = os.environ.get("AGENTFACTORY_MINI", "")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not MINI, reason="mini-swe-agent is not installed: make test-agents"),
]
ENV = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_SILENT_STARTUP": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "TERM": "dumb",
}


def mini(folder: Path) -> AgentConfig:
    """The agent's settings; it runs in the sandbox unless its Python is in root's own home."""
    options = ["-y", "--exit-immediately", "-m", "openai/policy", "-c", "mini.yaml", "-o", "${chain}/log.json"]
    config = AgentConfig(command=[MINI, *options, "-t", "${task.question}"], options={"env": ENV})
    try:
        ProgramAgent(config, folder)
    except SettingError as error:
        if "can be read by its owner only" not in str(error):
            raise
        return AgentConfig(command=config.command, options={"env": ENV, "sandbox": SandboxKind.NONE})
    return config


async def test_its_commands_run_and_files_change(tmp_path: Path) -> None:
    first = call("I write.", "bash", command="echo hello > made.txt; sleep 86397 & ls")
    end = call("I finish.", "bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    check_completed(await play(tmp_path, mini(tmp_path), [first, end], "86397"))
    assert not left("86397")
