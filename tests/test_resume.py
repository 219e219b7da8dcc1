"""A killed run resumes as if nothing had happened: trainer, worker and run folder, by the user's commands.

`AGENTFACTORY_KILLS=50 pytest tests/test_resume.py` kills the recorded run 50 times; the default is three."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from agentfactory.rollout.data import Place
from agentfactory.rollout.groups.group_files import read_groups
from agentfactory.trainers.checkpoints.checkpoint import expand
from agentfactory.trainers.checkpoints.checkpoint_folder import checkpoints, read_info, verify
from tests.conftest import QUICKSTART, REPOSITORY, embedded_server
from tests.forked import TRAINER, Forked, start_ranks
from tests.saved_checkpoint import training_state
from tests.saved_groups import write_groups
from tests.trainers.conftest import make_groups, model_folder  # noqa: F401
from tests.waiting import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.extended]

KILLS = int(os.environ.get("AGENTFACTORY_KILLS", "3"))
UNENDING = {"steps": 1000 + 20 * KILLS, "schedule": "constant"}
"""Steps of a run that will be killed, even late. The final attempt sets the real number, which changes no schedule."""


def start(recipe: Path, output: Path, *arguments: str) -> Forked:
    log = output.with_suffix(".log")
    return Forked(TRAINER, str(recipe), f"output={output}", *arguments, log=log, ACCELERATE_USE_CPU="true")


def steps(output: Path) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl, without values that differ between any two runs."""
    text = (output / "metrics.jsonl").read_text() if (output / "metrics.jsonl").exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    timing = ("seconds/", "tokens_per_second")
    return [{name: value for name, value in line.items() if not name.startswith(timing)} for line in lines]


def newest_step(output: Path) -> int:
    return max((line["step"] for line in steps(output)), default=0)


def wait_until(condition: Callable[[], Any], trainer: Forked, pause: float = 0.002) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert trainer.is_running(), trainer.log.read_text()
        assert time.monotonic() < deadline
        time.sleep(pause)


def is_held_in_write(trainer: Forked, output: Path) -> bool:
    """Suspend the trainer and check whether it is writing a checkpoint; if not, let it continue."""
    os.kill(trainer.pid, signal.SIGSTOP)
    while psutil.Process(trainer.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.0002)
    if any((output / "checkpoints").glob(".step-*.partial")):
        return True
    os.kill(trainer.pid, signal.SIGCONT)
    return False


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


RESUMED = "resumed: "


# --- trained from recorded groups

RECORDED = {"steps": 40, "batch_size": 2, "learning_rate": 1e-3, "checkpoint_every": 3, "schedule": "cosine"}
FULL = {"algorithm": "grpo", "updates_per_batch": 2}
ADAPTERS = {"algorithm": "ppo", "advantage": {"options": {"critic_learning_rate": 1e-3, "critic_warmup_steps": 4}}}
"""Policy and critic are adapters on one base."""


def recorded_recipe(folder: Path, model: Path, train: dict[str, Any]) -> Path:
    train = {"from_trajectories": "groups.jsonl", **RECORDED, **train}
    # two steps more than the recipe has
    groups = make_groups((train["steps"] + 2) * train["batch_size"], 4)
    write_groups(folder / "groups.jsonl", groups)
    lora = {"rank": 2} if train["algorithm"] == "ppo" else None
    recipe = {"model": {"path": str(model), "dtype": "float32", "lora": lora}, "train": train}
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(recipe))
    return file


def last_checkpoints(recipe: Path, broken: Path) -> list[Path]:
    """The final checkpoints of a broken run, resumed for ten steps, and of an unbroken run of the same length."""
    total, whole = f"train.steps={newest_step(broken) + 10}", broken.with_name("whole")
    for trainer in (start(recipe, broken, "--resume", total), start(recipe, whole, total)):
        assert trainer.wait() == 0, trainer.log.read_text()
    assert steps(broken) == steps(whole)
    assert [line["step"] for line in steps(broken)] == list(range(1, newest_step(broken) + 1))
    last = [checkpoints(output / "checkpoints")[-1] for output in (whole, broken)]
    assert same(*map(training_state, last))
    return last


def test_kill_9_at_random_moments_changes_nothing(model_folder: Path, tmp_path: Path) -> None:  # noqa: F811
    recipe = recorded_recipe(tmp_path, model_folder, ADAPTERS | UNENDING)
    broken, draw = tmp_path / "broken", random.Random(time.time_ns())
    trainer = start(recipe, broken)
    for number in range(KILLS):
        step = newest_step(broken) + draw.randint(1, 10)
        wait_until(lambda step=step: newest_step(broken) >= step, trainer)
        in_write = number % 3 == 2
        if in_write:
            wait_until(lambda trainer=trainer: is_held_in_write(trainer, broken), trainer, pause=0.001)
        else:
            time.sleep(draw.uniform(0, 0.03))
        assert trainer.kill() == -signal.SIGKILL
        assert not in_write or any((broken / "checkpoints").glob(".step-*.partial"))
        trainer = start(recipe, broken, "--resume")
        wait_until(lambda number=number: broken.with_suffix(".log").read_text().count(RESUMED) > number, trainer)
    trainer.kill()
    last = last_checkpoints(recipe, broken)
    assert same(*(load_file(path / "adapter_model.safetensors") for path in last))
    for path in checkpoints(broken / "checkpoints"):
        verify(path)


def test_sigterm_ends_the_running_step_and_saves_it(model_folder: Path, tmp_path: Path) -> None:  # noqa: F811
    recipe, output = recorded_recipe(tmp_path, model_folder, FULL | UNENDING), tmp_path / "run"
    trainer = start(recipe, output)
    wait_until(lambda: len(steps(output)) >= 7, trainer)
    assert trainer.kill(signal.SIGTERM) == 128 + signal.SIGTERM
    done = steps(output)[-1]["step"]
    assert f"stopped by SIGTERM after step {done}" in trainer.log.read_text()
    assert checkpoints(output / "checkpoints")[-1].name == f"step-{done:06d}"
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("interrupted", done)
    assert not (output / ".stopping").exists()
    last_checkpoints(recipe, output)


def test_a_run_of_one_process_goes_on_with_two(model_folder: Path, tmp_path: Path) -> None:  # noqa: F811
    one, strategy = tmp_path / "one", "fsdp2"
    recipe = recorded_recipe(tmp_path, model_folder, ADAPTERS)
    assert start(recipe, one).wait() == 0
    output, log = tmp_path / "run", tmp_path / "run.log"
    shutil.copytree(one, output)
    checkpoint = output / "checkpoints" / "step-000036"
    arguments = ("--resume", str(checkpoint), "train.processes=2", f"train.strategy={strategy}")
    ranks = start_ranks(TRAINER, str(recipe), f"output={output}", *arguments, log=log, strategy=strategy)
    assert [rank.wait() for rank in ranks] == [0, 0], log.read_text()
    assert "later checkpoints are set aside: step-000039, step-000040" in log.read_text()
    assert len(steps(output)) == len(steps(one)) == RECORDED["steps"]
    assert steps(output)[:36] == steps(one)[:36]
    for mine, theirs in zip(steps(output)[36:], steps(one)[36:], strict=True):
        for name in ("loss", "grad_norm", "entropy", "learning_rate", "tokens"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name
    first, second = (training_state(path / "checkpoints" / "step-000040") for path in (one, output))
    for key, weight in first.items():
        if key.startswith("weights/"):
            torch.testing.assert_close(second[key], weight, atol=1e-4, rtol=0)
    # resumed with the same number of ranks, it ends with the same bits
    again = tmp_path / "again"
    shutil.copytree(output, again)
    arguments = ("--resume", str(again / "checkpoints" / "step-000039"), *arguments[2:])
    ranks = start_ranks(TRAINER, str(recipe), f"output={again}", *arguments, log=log, strategy=strategy)
    assert [rank.wait() for rank in ranks] == [0, 0], log.read_text()
    assert steps(again) == steps(output)
    assert same(second, training_state(again / "checkpoints" / "step-000040"))
    # and on with one again, for longer
    assert start(recipe, output, "--resume", "train.steps=42").wait() == 0, log.read_text()
    assert [line["step"] for line in steps(output)] == list(range(1, 43))


# --- live: a worker that samples from an embedded server


LIVE = {"batch_size": 3, "checkpoint_every": 2}


SLOW = REPOSITORY / "benchmarks" / "slow_treasure_hunt.py:SlowTreasureHunt"
FAST = QUICKSTART / "treasure_hunt.py:TreasureHunt"


def live_recipe(folder: Path, model: Path, tasks: Path, url: str, k: int, lora: bool, workers: int) -> Path:
    recipe = {
        "model": {"path": str(model), "dtype": "float32", "lora": {"rank": 2} if lora else None},
        "data": {"path": str(tasks)},
        # with fast tools, groups that run ahead are ready long before they are trained
        "tools": [str(FAST if k else SLOW)],
        "rollout": {"group_size": 3, "max_turns": 5, "max_tokens": 32, "max_total_tokens": 400, "max_staleness": k}
        | {"workers": workers},
        "server": {"engine": "embedded", "url": url, "max_model_len": 512},
        "train": {**LIVE, "steps": 250, "learning_rate": 1e-3},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return folder / "recipe.yaml"


@pytest.mark.long
@pytest.mark.parametrize(
    ("k", "lora", "workers"),
    [pytest.param(0, False, [1, 1], id="synchronous"), pytest.param(2, True, [3, 1], id="three workers, then one")],
)
def test_live_every_task_is_trained_once_whatever_is_killed(
    warm_start: Path, quickstart_run: Path, tmp_path: Path, k: int, lora: bool, workers: list[int]
) -> None:
    rows = [json.loads(line) for line in (quickstart_run / "prepared" / "train.jsonl").read_text().splitlines()]
    latency = {"median": 0.02, "sigma": 0.5, "tail": 0.0, "factor": 1.0}
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({**row, "latency": latency}) + "\n" for row in rows))
    output = tmp_path / "run"
    draw, log = random.Random(time.time_ns()), output.with_suffix(".log")
    # room for one attempt's adapters only: those of killed attempts must be removed
    flags = ("--max-model-len", "512", "--max-num-seqs", "64")
    with embedded_server(warm_start, *flags) as url:
        recipe = live_recipe(tmp_path, warm_start, tmp_path / "tasks.jsonl", url, k, lora, workers[0])
        trainer = start(recipe, output)
        for number, how in enumerate((signal.SIGKILL, signal.SIGTERM, signal.SIGKILL), 1):
            wait_until(lambda number=number: newest_step(output) >= 2 * number + 1, trainer)
            time.sleep(draw.uniform(0, 0.3))
            status = trainer.kill(how)
            if how is signal.SIGTERM:
                # also while it waits for groups; the last step is saved
                assert status == 128 + signal.SIGTERM, log.read_text()
                assert checkpoints(output / "checkpoints")[-1].name == f"step-{newest_step(output):06d}"
            # in the end, every group begun by any attempt is trained
            total = newest_step(output) + k + 3
            end = [f"train.steps={total}"] if number == 3 else []
            trainer = start(recipe, output, f"rollout.workers={workers[number > 1]}", "--resume", *end)
            wait_until(lambda number=number: log.read_text().count(RESUMED) == number, trainer)
        assert trainer.wait() == 0, log.read_text()
    assert [line["step"] for line in steps(output) if "loss" in line] == list(range(1, total + 1))
    line = checkpoints(output / "checkpoints")
    assert [int(path.name[-6:]) for path in line[-1:]] == [total]
    trained = [group for path in line for group in read_info(path)["groups"]]
    assert len(trained) == len(set(trained)) == total * LIVE["batch_size"]
    assert sorted(expand(read_info(line[-1])["trained"])) == sorted(trained)
    positions = sorted(Place.of(group_id).position for group_id in trained)
    assert positions == list(range(len(trained))), "each task, and once"
    assert sorted((output / "trajectories" / "acknowledged.txt").read_text().split()) == sorted(trained)
    files = (output / "trajectories").glob("train*.jsonl")
    saved = [json.loads(text)["id"] for file in files for text in file.read_text().splitlines()]
    assert len(saved) == len(set(saved)), "nothing is on record twice"
    assert set(trained) <= set(saved)
    if k:
        waited = re.findall(r"(\d+) wait to be", (output / "logs" / "worker.log").read_text())
        assert any(int(number) for number in waited), "groups that were ready when it was killed are trained"


# ---- after a death nothing of a run is left


GONE_WITHIN = 10.0
"""Seconds after which no process of a broken run may remain."""

MARKS = {
    "launcher": "-m agentfactory train ",
    "trainer": "-m agentfactory.train ",
    "worker": "agentfactory.rollout.workers.rollout_worker",
    "server": "agentfactory.rollout.inference.embedded",
    "tool server": "agentfactory.tools.serve",
}
"""Process -> a text that only its command line contains."""


@pytest.fixture
def run(tmp_path: Path, warm_start: Path, quickstart_run: Path) -> Iterator["subprocess.Popen[str]"]:
    """`agentfactory train` of the treasure hunt over a stdio tool server, into `run`: five processes."""
    hunt = ["-m", "agentfactory.tools.serve", str(QUICKSTART / "treasure_hunt.py:TreasureHunt")]
    recipe = {
        "model": {"path": str(warm_start), "dtype": "float32"},
        "data": {"path": str(quickstart_run / "prepared" / "train.jsonl")},
        "mcp_servers": {"hunt": {"command": "python", "args": hunt, "environment": {}}},
        "rollout": {"group_size": 4, "max_turns": 8, "max_tokens": 32, "max_total_tokens": 512},
        "server": {"engine": "embedded", "max_model_len": 512},
        "train": {"steps": 1000, "batch_size": 4, "learning_rate": 1e-4, "checkpoint_every": 2},
    }
    # JSON is YAML
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "agentfactory", "train", str(tmp_path / "recipe.yaml"), f"output={tmp_path}/run"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, **pipes, start_new_session=True, env=environment) as process:
        yield process
        if process.poll() is None:
            process.send_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("victim", "number", "last_words"),
    [
        ("launcher", signal.SIGTERM, "interrupted by SIGTERM"),
        pytest.param("worker", signal.SIGKILL, "the rollout worker was killed by signal 9", marks=pytest.mark.long),
        pytest.param("server", signal.SIGKILL, "the server was ended by signal 9", marks=pytest.mark.long),
    ],
)
def test_a_death_ends_the_whole_run(
    run: "subprocess.Popen[str]", tmp_path: Path, victim: str, number: signal.Signals, last_words: str
) -> None:
    output = tmp_path / "run"
    metrics = output / "metrics.jsonl"
    wait_for(lambda: run.poll() is not None or (metrics.exists() and '"loss"' in metrics.read_text()), 120)
    launcher = psutil.Process(run.pid)
    family = [launcher, *launcher.children(recursive=True)]
    found = {name: next(p for p in family if mark in " ".join(p.cmdline())) for name, mark in MARKS.items()}
    assert len({process.pid for process in found.values()}) == len(MARKS)
    found[victim].send_signal(number)
    said, _ = run.communicate(timeout=GONE_WITHIN)
    _, alive = psutil.wait_procs(family[1:], timeout=GONE_WITHIN)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    last = said.strip().splitlines()[-1]
    assert last_words in last
    assert str(output) in last
    assert json.loads((output / "summary.json").read_text())["status"] in ("interrupted", "failed")
    assert run.returncode == (130 if "interrupted" in last else 1)
    # the folder can be read
    assert any("loss" in json.loads(line) for line in metrics.read_text().splitlines())
    assert len(list(read_groups(output / "trajectories"))) >= 4
    assert (output / "recipe.yaml").exists()
