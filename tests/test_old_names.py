"""Old names of modules that the documentation once gave, before they moved."""

import subprocess
import sys

import pytest

from agentfactory.old_names import MOVED

USED = """
import warnings
warnings.simplefilter("error")
from agentfactory.tools.prebuilt.shell import Shell
from agentfactory.rollout.text.parsers.formats.tags import Tags
from agentfactory.worlds.screens.sites import screens_tasks
warnings.simplefilter("ignore")
from agentfactory.tools import shell
from agentfactory.rollout.parsers.tags import Tags as Old
from agentfactory.tools.screens import sites
assert (shell.Shell, Old, sites.screens_tasks) == (Shell, Tags, screens_tasks)
assert shell.__spec__.name == "agentfactory.tools.prebuilt.shell"
"""


@pytest.mark.processes
@pytest.mark.parametrize("command", [["-c", USED], ["-m", "agentfactory.tools.harbor.check", "--help"]])
def test_an_old_name_finds_the_module_itself(command: list[str]) -> None:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.processes
def test_an_old_name_tells_the_new_one() -> None:
    code = "".join(f"import {old}\n" for old in MOVED)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    for old, new in MOVED.items():
        assert f"FutureWarning: {old} has moved: import {new}" in done.stderr
