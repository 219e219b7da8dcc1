"""`agentfactory serve` with vLLM, which is several processes: none is left behind, and a failed start is explained."""

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from agentfactory.rollout.inference.http_transport import authorization
from tests.rollout.test_server_contract import make_model
from tests.server_process import VLLM_PYTHON

GONE_WITHIN = 10.0


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    make_model(folder / "model", tied=True)
    server = {"engine": "vllm", "options": {"python": VLLM_PYTHON}, "max_model_len": 512}
    train = {"steps": 1}
    text = json.dumps({"model": {"path": "model", "dtype": "float32"}, "server": server, "train": train})
    (folder / "recipe.yaml").write_text(text)
    return folder / "recipe.yaml"


@contextmanager
def serving(recipe: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "agentfactory", "serve", str(recipe), *overrides]
    process = subprocess.Popen(command, cwd=recipe.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=30)


def ready(process: subprocess.Popen[str]) -> str:
    for line in process.stdout:
        if line.startswith("ready "):
            return line.split()[1]
    raise AssertionError(process.communicate()[1])


@pytest.mark.parametrize("victim", [pytest.param("launcher", marks=pytest.mark.long), "API server"])
def test_kill_leaves_no_process(recipe: Path, victim: str) -> None:
    with serving(recipe) as launcher:
        url = ready(launcher) + "/weight_info"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(url)
        with urllib.request.urlopen(urllib.request.Request(url, headers=authorization(url, None))) as answer:
            assert json.load(answer) == {"weight_version": "default"}
        processes = psutil.Process(launcher.pid).children(recursive=True)
        # the command supervises a process, which starts them
        first, *_, last = [process for process in processes if "vllm" in "".join(process.cmdline()).lower()]
        assert first != last, "an API server, an engine, a worker"
        (launcher if victim == "launcher" else first).send_signal(signal.SIGKILL)
        deadline = time.monotonic() + GONE_WITHIN
        _, alive = psutil.wait_procs(processes, timeout=GONE_WITHIN)
        assert [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
        launcher.wait(max(0.1, deadline - time.monotonic()))
        if victim != "launcher":
            assert launcher.returncode == 1
            assert "the server was ended by signal 9" in launcher.communicate()[1]


def test_a_failed_start_is_explained_in_one_line(recipe: Path) -> None:
    command = [sys.executable, "-m", "agentfactory", "serve", str(recipe), "server.max_model_len=9000"]
    result = subprocess.run(command, cwd=recipe.parent, capture_output=True, text=True, timeout=300)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert "server.max_model_len=9000 is more than the model supports" in last
    assert "; fix: " in last
