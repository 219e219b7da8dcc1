"""Unmodified command-line agents: mini-swe-agent, and Qwen Code on Node, in the sandbox. Their commands run, and none
of their processes is left.

`make test-agents` installs mini-swe-agent into a separate environment, because it needs other versions of packages, and
Qwen Code from npm."""

import json
import os
from pathlib import Path

import pytest

from agentfactory.base.errors import SettingError
from agentfactory.base.processes.sandbox_limits import SandboxKind
from agentfactory.rollout.config import AgentConfig
from agentfactory.rollout.gateway.program_agent import ProgramAgent
from tests.command_line_agents import call, check_completed, left, play

MINI, QWEN = (os.environ.get(f"AGENTFACTORY_{name}", "") for name in ("MINI", "QWEN"))
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
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


@pytest.mark.skipif(not MINI, reason="mini-swe-agent is not installed: make test-agents")
async def test_mini_swe_agents_commands_run_and_files_change(tmp_path: Path) -> None:
    first = call("I write.", "bash", command="echo hello > made.txt; sleep 86397 & ls")
    end = call("I finish.", "bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    check_completed(await play(tmp_path, mini(tmp_path), [first, end], "86397"))
    assert not left("86397")


SETTINGS = {"privacy": {"usageStatisticsEnabled": False}, "general": {"disableAutoUpdate": True}}


def qwen(folder: Path) -> AgentConfig:
    template = folder / "template"
    (template / ".qwen").mkdir(parents=True)
    (template / ".qwen" / "settings.json").write_text(json.dumps(SETTINGS))
    return AgentConfig(
        command=[QWEN, "--auth-type", "openai", "--approval-mode", "yolo", "${task.question}"],
        options={"env": {"OPENAI_MODEL": "policy"}, "workspace": str(template)},
    )


@pytest.mark.skipif(not QWEN, reason="@qwen-code/qwen-code is not installed: make test-agents")
async def test_the_commands_of_qwen_code_run_and_files_change(tmp_path: Path) -> None:
    command = "echo hello > made.txt; (sleep 86395 > /dev/null 2>&1 &) ; ls"
    first = call("I write.", "run_shell_command", command=command, is_background=False)
    check_completed(await play(tmp_path, qwen(tmp_path), [first, "I am done."], "86395"))
    assert not left("86395")
