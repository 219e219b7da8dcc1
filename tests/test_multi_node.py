"""Multi-node training: the SLURM script with all machines simulated on this one by real processes.

Each machine has its own loopback address, and the two trainer machines run one process each, or two. NCCL is not
tested."""

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from tests.conftest import QUICKSTART, REPOSITORY
from tests.forked import reserved_port

pytestmark = pytest.mark.processes

FOLDER = REPOSITORY / "recipes" / "multi-node"
SCRIPT = FOLDER / "slurm.sh"

SRUN = """#!/bin/bash
# The command on each machine of --nodelist, all of which are this one. Signals go on to them, as with SLURM's.
for option; do
    case $option in
        --nodelist=*) nodes=${option#*=} ;;
        --output=*) output=${option#*=} ;;
        --*) ;;
        *) break ;;
    esac
    shift
done
tasks=() rank=0 status=0
trap 'kill -TERM "${tasks[@]}"' TERM
for node in ${nodes//,/ }; do
    SLURM_PROCID=$rank "$@" >"${output//%t/$rank}" 2>&1 &
    tasks+=($!)
    rank=$((rank + 1))
done
for task in "${tasks[@]}"; do
    while
        wait "$task"
        ended=$?
        kill -0 "$task" 2>/dev/null
    do :; done
    ((ended == 0)) || status=$ended
done
exit $status
"""
SCONTROL = """#!/bin/bash
tr ',' '\\n' <<<"$3"
"""


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE")},
        "MAIN_PORT": str(reserved_port()),
        "SERVER_PORT": str(reserved_port()),
        "PATH": f"{commands}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(REPOSITORY),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "127.0.0.1,127.0.0.2,127.0.0.3",
        "GPUS_PER_NODE": "1",
        "OUTPUT": str(tmp_path / "run"),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "each"), [("fsdp2", 1), ("hsdp", 2)])
def test_two_machines_train_against_the_server_of_a_third(
    cluster: dict[str, str], quickstart_run: Path, warm_start: Path, tmp_path: Path, strategy: str, each: int
) -> None:
    """When SLURM signals the end of the job's time, the step is finished and a checkpoint is written."""
    overrides = [
        f"model.path={warm_start}",
        f"data.path={quickstart_run}/prepared/train.jsonl",
        *("prepare=null", "eval.data=null", "rollout.group_size=4", "rollout.concurrency=32", "server.max_num_seqs=16"),
        *("train.steps=1000", "train.batch_size=2", "train.warmup_steps=0"),
    ]
    command = ["bash", str(SCRIPT), str(QUICKSTART / "grpo.yaml"), *overrides]
    metrics, logs = tmp_path / "run" / "metrics.jsonl", tmp_path / "run-slurm" / "7"
    machines = {**cluster, "STRATEGY": strategy, "GPUS_PER_NODE": str(each)}
    with subprocess.Popen(command, env=machines, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as batch:
        deadline = time.monotonic() + 120
        while '"step": 2' not in (metrics.read_text() if metrics.exists() else ""):
            told = "".join(file.read_text() for file in logs.glob("*.log"))
            assert batch.poll() is None, told
            assert time.monotonic() < deadline, told
            time.sleep(0.1)
        address = f"127.0.0.3:{cluster['SERVER_PORT']}"
        without_key = ["curl", "--silent", "--noproxy", "*", "--data", "{}", f"http://{address}/pause"]
        assert json.loads(subprocess.check_output(without_key)) == {"error": "Unauthorized"}
        batch.send_signal(signal.SIGTERM)
        output, _ = batch.communicate(timeout=120)
    assert "the trainers ended with status" in output, output

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert Path(summary["checkpoint"]).name == f"step-{summary['steps']:06d}"
    steps = [line for line in map(json.loads, metrics.read_text().splitlines()) if "loss" in line]
    assert len(steps) == summary["steps"] >= 2
    for line in steps:
        # the sampling server has the weights of all shards
        assert line["mismatch/max"] <= 1e-4
    # the signal came within the last step, or before it: then its weights are left to the next attempt
    assert all(line["sync/bytes"] > 0 for line in steps[:-1])
    recipe = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert (recipe["train"]["processes"], recipe["train"]["strategy"]) == (2 * each, strategy)
    assert recipe["server"]["url"] == [f"http://{address}"]
    assert sorted(file.name for file in logs.glob("*.log")) == [
        *("serve_here-0.log", "train_here-0.log", "train_here-1.log")
    ]
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.3", int(cluster["SERVER_PORT"])))


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"TRAINER_NODES": "3"}, "error: the job has 3 machines, and TRAINER_NODES=3 of them train: none is left"),
        ({"SERVER": "exit 1"}, "error: a server has ended; its log: "),
        ({"SERVER": "sleep 60", "STARTUP_SECONDS": "1"}, "does not answer after STARTUP_SECONDS=1 s"),
    ],
)
def test_a_job_that_cannot_start_ends_with_the_reason(
    cluster: dict[str, str], tmp_path: Path, variables: dict[str, str], message: str
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\n[[ "$*" == *--dry-run* ]] || exec bash -c "$SERVER"\n')
    python.chmod(0o755)
    machines = {**cluster, "PYTHON": str(python), **variables}
    done = subprocess.run(["bash", str(SCRIPT)], env=machines, capture_output=True, text=True)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "run").exists()


def test_what_the_script_cannot_run_is_refused_before_a_server_loads(cluster: dict[str, str], tmp_path: Path) -> None:
    command = ["bash", str(SCRIPT), str(QUICKSTART / "quickstart.yaml")]
    done = subprocess.run(command, env=cluster, capture_output=True, text=True)
    assert done.returncode == 2
    assert "quickstart.yaml has several stages or a `prepare`" in done.stderr
    assert list((tmp_path / "run-slurm").rglob("*.log")) == []
    wrong = subprocess.run(
        [*command[:2], str(FOLDER / "multi-node.yaml"), "train.stepz=1"], env=cluster, capture_output=True
    )
    assert wrong.returncode == 2
    assert b"train.stepz" in wrong.stderr
