"""The launcher's own work: stages in order, prepared once, failures told. The trainer is a script of a few lines, so
that no model is needed; whole runs are tested with the real one elsewhere."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from agentfactory.commands import main as commands
from agentfactory.launching import launch_plan
from tests.forked import Forked
from tests.waiting import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.extended]

PREPARE = """
def make(folder, seed):
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "talks.jsonl").write_text(f'{{"messages": [{{"role": "user", "content": "seed {seed}"}}]}}')

def bad(folder, seed):
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "talks.jsonl").write_text('{"words": "no question"}')

def fail(folder, seed):
    (folder / "half").write_text("")
    raise RuntimeError("no disk")
"""

TRAINER = """
import json, os, sys, time
import yaml
from pathlib import Path
from agentfactory.launching.launch_plan import Assignment
from agentfactory.launching.run_folder import RunFolder
from agentfactory.trainers.checkpoints.checkpoint_folder import checkpoint_path, written_aside
assert sys.argv[1] == "--assignment"
given = Assignment.read(Path(sys.argv[2]))
recipe, resumed = given.recipe, given.checkpoint
folder = RunFolder(recipe.output)
first = int(resumed.name[-6:]) if resumed else 0
print("training", recipe.name, "from", first, flush=True)
if recipe.train.max_grad_norm == 60:
    time.sleep(600)
if recipe.train.max_grad_norm == 3:
    best = {"path": "checkpoints/step-000002", "step": 2, "metric": "eval/sampled/success", "value": 0.75}
    reason = "train.stop_when: entropy: step 3: too much of it"
    folder.write_summary({"status": "stopped", "reason": reason, "steps": 3, "best_checkpoint": best})
    sys.exit(3)
for step in range(first + 1, recipe.train.steps + 1):
    folder.log({"step": step, "loss": 1 / step})
    if step == recipe.train.steps or step == recipe.train.checkpoint_every:
        with written_aside(checkpoint_path(folder.checkpoints, step)) as aside:
            sizes = {"metrics.jsonl": folder.metrics.stat().st_size}
            info = {"step": step, "recipe": yaml.safe_load(recipe.to_yaml()), "files": sizes}
            (aside / "trainer_state.json").write_text(json.dumps(info))
            (aside / "config.json").write_text("{}")
    if step == recipe.train.checkpoint_every + 1 > 1 and os.environ.get("CRASH"):
        raise ValueError("crashed")
assert os.environ["OMP_WAIT_POLICY"] == "passive"
summary = {"status": "completed", "steps": step, "seed": recipe.seed}
folder.write_summary({**summary, "checkpoint": f"checkpoints/{folder.last_checkpoint().name}"})
"""

STAGE = """
model: {path: '${prepared}/model'}
data: {path: '${prepared}/talks.jsonl'}
train: {algorithm: sft, steps: 3, batch_size: 1}
"""


@pytest.fixture
def staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "make.py": PREPARE,
        "trainer.py": TRAINER,
        "first.yaml": STAGE,
        "second.yaml": STAGE,
        "both.yaml": "prepare: make.py:make\nstages: [first.yaml, second.yaml]\n",
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path / "runs" / "both"


def main() -> int:
    """`agentfactory` with the scripted trainer; see Forked."""
    launch_plan.TRAINER = (str(Path("trainer.py").resolve()),)
    return commands.main(sys.argv[1:])


def start(staged: Path, *arguments: str, **env: str) -> Forked:
    said = Path(tempfile.mkdtemp(dir=staged.parents[1]))
    return Forked(__name__, "train", "both.yaml", *arguments, log=said / "out", errors=said / "errors", **env)


def ended(command: Forked) -> "subprocess.CompletedProcess[str]":
    status = command.wait()
    out, errors = (command.log.with_name(name).read_text() for name in ("out", "errors"))
    return subprocess.CompletedProcess((), status, out, errors)


def run(staged: Path, *arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
    return ended(start(staged, *arguments, **env))


def test_stages_run_in_order_each_from_the_last_ones_checkpoint(staged: Path) -> None:
    result = run(staged, "seed=5", "first.train.steps=12")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [row for row in lines if row.startswith("training")] == ["training first from 0", "training second from 0"]
    assert lines[-2].startswith("both: 3 steps; checkpoint runs/both/second/checkpoints/step-000003; ")
    assert lines[-2].endswith("; curve runs/both/curve.png; run folder runs/both")
    assert lines[-1] == "look at it: agentfactory view runs/both"
    second = yaml.safe_load((staged / "second" / "recipe.yaml").read_text())
    assert second["model"]["path"] == "${here}/../first/checkpoints/step-000012"
    assert "seed 5" in (staged / "prepared" / "talks.jsonl").read_text()
    summary = json.loads((staged / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["checkpoint"] == "second/checkpoints/step-000003"

    # --overwrite keeps what the recipe reads
    assert run(staged, "--overwrite", "second.data.path=runs/both/second/metrics.jsonl").returncode == 2
    assert (staged / "second" / "metrics.jsonl").exists()


def test_a_run_that_a_symptom_ended_has_a_status_of_its_own(staged: Path) -> None:
    result = run(staged, "first.train.max_grad_norm=3")
    assert result.returncode == 3
    reason = "train.stop_when: entropy: step 3: too much of it; best checkpoint runs/both/first/checkpoints/step-000002"
    assert f"stopped: {reason} (eval/sampled/success 0.75); run folder runs/both" in result.stderr
    summary = json.loads((staged / "summary.json").read_text())
    assert summary["status"] == "stopped"
    assert summary["reason"].startswith("train.stop_when: entropy")
    # what comes after it is not begun on its weights
    assert not (staged / "second").exists()


def test_what_prepare_made_is_checked_before_anything_starts(staged: Path) -> None:
    result = run(staged, "prepare=make.py:fail")
    assert result.returncode == 1
    assert "the prepare function ended with exit status 1: RuntimeError: no disk" in result.stderr
    assert not (staged / "prepared").exists(), "nothing looks prepared"
    for option in (("--overwrite",), ("--resume",)):
        result = run(staged, "prepare=make.py:bad", *option)
        assert result.returncode == 2
        assert "data.path: " in result.stderr
        assert result.stderr.endswith(
            "fix: correct the prepare function, and delete runs/both/prepared so that it runs again\n"
        )
        assert "training" not in result.stdout
        assert json.loads((staged / "summary.json").read_text())["status"] == "failed"


def begin_long_training(staged: Path) -> Forked:
    launcher = start(staged, "train.max_grad_norm=60.0")
    wait_for(lambda: "training" in (launcher.log.read_text() if launcher.log.exists() else ""))
    return launcher


def test_an_interrupted_run_says_so(staged: Path) -> None:
    launcher = begin_long_training(staged)
    os.kill(launcher.pid, signal.SIGINT)
    result = ended(launcher)
    assert result.returncode == 130
    assert (
        result.stderr.splitlines()[-1]
        == "agentfactory: interrupted by Ctrl-C; run folder runs/both; continue with --resume"
    )
    found = json.loads((staged / "summary.json").read_text())
    assert (found["status"], found["reason"]) == ("interrupted", "Ctrl-C")


def test_a_run_that_is_alive_is_left_alone(staged: Path) -> None:
    launcher = begin_long_training(staged)

    def state() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in staged.rglob("*") if path.is_file()}

    before = state()
    fix = "fix: wait for it, end it, or output=OTHER"
    for option in ("--resume", "--overwrite"):
        result = run(staged, "train.max_grad_norm=60.0", option)
        assert result.returncode == 2
        assert result.stderr == f"agentfactory: output: {staged}: a run is alive there (pid {launcher.pid}); {fix}\n"
    assert state() == before
    assert launcher.is_running()
    trainer = int(Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text())
    launcher.kill()
    try:
        os.kill(trainer, 0)
        result = run(staged, "--overwrite")
    finally:
        os.kill(trainer, signal.SIGKILL)
    assert result.returncode == 0, f"a child keeps the lock of a launcher that was killed: {result.stderr}"


def test_a_staged_run_goes_on_in_the_stage_that_broke(staged: Path) -> None:
    longer = "second.train.steps=9"
    result = run(staged, longer, "second.train.checkpoint_every=5", CRASH="1")
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert "the trainer ended with exit status 1: ValueError: crashed" in last
    assert str(staged / "second" / "logs" / "train.log") in last
    summary = json.loads((staged / "summary.json").read_text())
    assert (summary["status"], "crashed" in summary["reason"]) == ("failed", True)
    # a bare --resume takes no override for a path
    result = run(staged, "--resume", longer)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[:4] == [
        "stage 1 of 2: first (completed)",
        "stage 2 of 2: second (started)",
        f"resumed: {staged}/second/checkpoints/step-000005",
        "training second from 5",
    ]
    metrics = [json.loads(line)["step"] for line in (staged / "second" / "metrics.jsonl").read_text().splitlines()]
    assert metrics == list(range(1, 10)), "step 6 came after the checkpoint"
    summary = json.loads((staged / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", 9)
