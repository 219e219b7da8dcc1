"""Whole runs where containers, clusters and other users' machines differ from a developer's: another user, a home that
cannot be written, little shared memory, TMPDIR, umask, locale, clock, and names that have only an IPv6 address."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agentfactory.base.user_code.import_path import own_python
from tests.conftest import REPOSITORY

SECONDS = 800
"""Time limit of a run, which takes 30 seconds on a quiet machine."""
pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.timeout(SECONDS + 60)]

AS_NOBODY = "setpriv --reuid=65534 --regid=65534 --clear-groups"
SHORT = [f"{stage}.train.{field}" for stage in ("sft", "grpo") for field in ("steps=1", "warmup_steps=0")]
STARTS_ITSELF = "import subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)"
WITHOUT_A_NAME = "setpriv --reuid=54321 --regid=54321 --clear-groups"

# commands before the run, in a mount namespace; what starts the run; variables; settings
SURROUNDINGS = {
    "nobody, whose home is read-only": ("mount -t tmpfs -o ro tmpfs {home}", AS_NOBODY, {"HOME": "{home}"}, []),
    "a user without a name": ("true", WITHOUT_A_NAME, {"HOME": ""}, []),
    "64 KiB of shared memory": ("mount -t tmpfs -o size=64k tmpfs /dev/shm", "", {}, []),
    "a full TMPDIR": ("mount -t tmpfs -o nr_inodes=1 tmpfs {home}", "", {"TMPDIR": "{home}"}, []),
    "no TMPDIR": ("true", "", {"TMPDIR": "/no/such/folder"}, []),
    "LC_ALL=C": ("true", "", {"LC_ALL": "C", "LANG": "C"}, []),
    "localhost is ::1": ("mount --bind {hosts} /etc/hosts", "", {}, ["grpo.server.host=localhost"]),
}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("surroundings")
    subprocess.run([*command("new", "sums")], cwd=folder, env=environment({}), check=True, capture_output=True)
    for each in (folder, *folder.parents[:2]):
        each.chmod(0o755)
    return folder / "sums"


def command(*arguments: str) -> list[str]:
    return own_python("-m", "agentfactory", *arguments)


def environment(more: dict[str, str]) -> dict[str, str]:
    whole = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1", **more}
    return {name: value for name, value in whole.items() if value}


@pytest.mark.parametrize("case", SURROUNDINGS)
def test_a_run_works(case: str, task: Path, tmp_path: Path) -> None:
    before, start, variables, settings = SURROUNDINGS[case]
    needed = ["unshare", *start.split()[:1]]
    if missing := [name for name in needed if shutil.which(name) is None]:
        pytest.skip(f"{', '.join(missing)} is not installed")
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("this user must not mount")
    if start and subprocess.run([*start.split(), sys.executable, "-c", STARTS_ITSELF], capture_output=True).returncode:
        pytest.skip(f"other users cannot run {sys.executable}")
    home, hosts = tmp_path / "home", tmp_path / "hosts"
    home.mkdir()
    hosts.write_text("::1 localhost\n")
    output = tmp_path / "run"
    # of any user
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o777)
    places = {"home": str(home), "hosts": str(hosts)}
    arguments = ["train", "tiny/recipe.yaml", f"output={output}", *SHORT, *settings]
    script = f"mount --make-rprivate / && {before.format(**places)} && exec {start} {shlex.join(command(*arguments))}"
    run = subprocess.run(
        ["unshare", "-m", "sh", "-c", script],
        cwd=task,
        env=environment({name: value.format(**places) for name, value in variables.items()}),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    summary = json.loads((output / "grpo" / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert "Traceback" not in run.stderr
    assert "matplotlib" not in run.stderr.lower()
    assert ("temporary files go to" in run.stderr) == (case in ("a full TMPDIR", "no TMPDIR")), run.stderr
