"""The schedulers' own tools and a real SLURM: `make test-cluster`."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from tests.cluster.slurm_machines import namespaces, run, slurm
from tests.cluster.test_launch import RECIPE
from tests.conftest import QUICKSTART, REPOSITORY
from tests.waiting import wait_for

TOOLS = Path(os.environ.get("AGENTFACTORY_CLUSTER_TOOLS", ""))
"""The folder of the tools' programs, set by `make test-cluster`."""
SHARED = ["cluster.shared=/shared", "cluster.volume=s3://data", "cluster.images={trainer: me/t:1, server: me/s:1}"]
CPU = 'cluster.env={ACCELERATE_USE_CPU: "true", OMP_NUM_THREADS: "1", HF_HUB_OFFLINE: "1"}'


def launch(*arguments: str, **options: object) -> str:
    return run(sys.executable, "-m", "agentfactory", "launch", *arguments, **{"cwd": REPOSITORY, **options})


def test_each_file_is_accepted_by_its_tool(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(RECIPE))
    recipe = ["r.yaml", "--dry-run", "cluster.trainers=2", "cluster.gpu=H100", *SHARED, "--on"]
    texts = re.split(r"^# ---- (.+)\n", launch(*recipe, "kubernetes", cwd=tmp_path), flags=re.MULTILINE)
    files = dict(zip(texts[1::2], texts[2::2], strict=True))
    files["skypilot.yaml"] = launch(*recipe, "skypilot", cwd=tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    run(str(TOOLS / "kubernetes-validate"), "--strict", str(tmp_path / "kubernetes.yaml"))
    for name in ("trainer.Dockerfile", "server.Dockerfile"):
        run(str(TOOLS / "hadolint"), str(tmp_path / name))
    read = "import sky, sys; print(sky.Task.from_yaml(sys.argv[1]).num_nodes)"
    told = run(str(TOOLS / "python"), "-c", read, str(tmp_path / "skypilot.yaml"), cwd=tmp_path)
    assert told.split()[-1] == "3"


@pytest.fixture(scope="module")
def machines() -> Iterator[list[tuple[str, str]]]:
    with namespaces(3) as found:
        yield found


def steps(output: Path) -> list[dict]:
    with suppress(FileNotFoundError):
        lines = (output / "grpo" / "metrics.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if "loss" in line]
    return []


SHORT = ["train.warmup_steps=0", "sft.train.steps=20", "eval.data=null", "rollout.group_size=4"]


def test_a_slurm_job_is_preempted_and_goes_on(machines: list[tuple[str, str]], tmp_path: Path) -> None:
    """Two machines train, in shards, and one serves; stages and `prepare` run."""
    output, folder = tmp_path / "run", tmp_path / "slurm"
    folder.mkdir()
    recipe = [str(QUICKSTART / "quickstart.yaml"), f"output={output}", "grpo.train.steps=40", *SHORT]
    size = ["cluster.trainers=2", "cluster.gpus=1", "cluster.cpus=1", "cluster.memory_gib=2", CPU]
    with slurm(folder, machines) as env:
        launch(*recipe, *size, "cluster.grace_seconds=60", "--on", "slurm", env=env)
        wait_for(lambda: len(steps(output)) >= 2, 120)
        run("sbatch", "-p", "high", "-N3", "--exclusive", "-o", f"{tmp_path}/high.log", "--wrap", "true", env=env)
        wait_for(lambda: "PENDING" in run("squeue", "-h", "-p", "low", "-o", "%T", env=env), 60)
        saved = [*(output / "grpo" / "checkpoints").iterdir()]
        done = len(steps(output))
        assert [file.name for file in saved] == [f"step-{done:06d}"], "the step was finished, and saved"
        # by default, a requeued job begins after two minutes
        run("scontrol", "update", "JobId=1", "StartTime=now", env=env)
        wait_for(lambda: not run("squeue", "-h", env=env).strip(), 200)
    summary = json.loads((output / "summary.json").read_text())
    logs = "".join(file.read_text() for file in output.with_name("run-launch").glob("*.log"))
    assert (summary["status"], summary["steps"]) == ("completed", 40), logs
    assert [line["step"] for line in steps(output)] == [*range(1, 41)]
    assert all(line["mismatch/max"] <= 1e-4 for line in steps(output)), "the server has the weights of all shards"


def test_the_commands_of_a_manifest_run_a_minute_before_their_server(
    machines: list[tuple[str, str]], tmp_path: Path
) -> None:
    output = tmp_path / "run"
    recipe = [str(QUICKSTART / "quickstart.yaml"), f"output={output}", "grpo.train.steps=3", *SHORT]
    where = [f"cluster.shared={tmp_path}", "cluster.volume=data", SHARED[2], "cluster.gpus=0", CPU]
    text = launch(*recipe, *where, "--on", "kubernetes", "--dry-run").split("# ---- trainer.Dockerfile")[0]
    jobs = [entry["spec"]["template"]["spec"] for entry in yaml.safe_load_all(text) if entry["kind"] == "Job"]
    processes = []
    for (name, _), pod, wait in zip(machines, jobs, (0, 60), strict=False):
        container = pod["containers"][0]
        words = [word.replace("$(JOB_COMPLETION_INDEX)", "0") for word in container["args"]]
        place = words.index("--machines") + 1
        words[place] = ",".join(address for _, address in machines[:2])
        plain = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
        env = {**os.environ, **plain, "AGENTFACTORY_SERVER_KEY": "0" * 64}
        command = ["nsenter", f"--net=/run/netns/{name}", sys.executable, *words[1:]]
        with (tmp_path / f"{name}.log").open("wb") as log:
            late = ["bash", "-c", f'sleep {wait}; exec "$@"', "machine", *command]
            processes.append(subprocess.Popen(late, cwd=REPOSITORY, env=env, stdout=log, stderr=log))
    try:
        ended = [process.wait(200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    told = (tmp_path / f"{machines[0][0]}.log").read_text()
    assert ended == [0, 0], told
    assert "waiting for a server to listen at http://" in told
    assert len(steps(output)) == 3
