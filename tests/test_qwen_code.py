"""Qwen Code, an unmodified command-line agent on Node, in the sandbox: its commands run, and no process is left.

`make test-agents` installs it from npm."""

import json
import os
from pathlib import Path

import pytest

from agentfactory.rollout.config import AgentConfig
from tests.command_line_agents import call, check_completed, left, play

QWEN = os.environ.get("AGENTFACTORY_QWEN", "")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not QWEN, reason="@qwen-code/qwen-code is not installed: make test-agents"),
]
SETTINGS = {"privacy": {"usageStatisticsEnabled": False}, "general": {"disableAutoUpdate": True}}


def qwen(folder: Path) -> AgentConfig:
    template = folder / "template"
    (template / ".qwen").mkdir(parents=True)
    (template / ".qwen" / "settings.json").write_text(json.dumps(SETTINGS))
    return AgentConfig(
        command=[QWEN, "--auth-type", "openai", "--approval-mode", "yolo", "${task.question}"],
        options={"env": {"OPENAI_MODEL": "policy"}, "workspace": str(template)},
    )


async def test_its_commands_run_and_files_change(tmp_path: Path) -> None:
    command = "echo hello > made.txt; (sleep 86395 > /dev/null 2>&1 &) ; ls"
    first = call("I write.", "run_shell_command", command=command, is_background=False)
    check_completed(await play(tmp_path, qwen(tmp_path), [first, "I am done."], "86395"))
    assert not left("86395")
