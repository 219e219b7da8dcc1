"""`agentfactory launch` without a cluster: what it writes for each scheduler, and what it refuses.

`make test-cluster` gives the files to the schedulers' own tools."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentfactory.base.errors import SettingError
from agentfactory.cluster import kubernetes, skypilot, slurm
from agentfactory.cluster.description import Job, read_job
from agentfactory.commands.options import parse
from tests.conftest import QUICKSTART

# loading a recipe looks for vLLM in another process
pytestmark = pytest.mark.processes
RECIPE = {
    "model": {"path": "Qwen/Qwen3-8B"},
    "data": {"path": "rows.jsonl"},
    "rewards": ["exact_match"],
    "rollout": {"group_size": 4},
    "train": {"steps": 3, "batch_size": 16, "learning_rate": 1e-6},
}
SHARED = ["cluster.shared=/shared", "cluster.volume=data", "cluster.images={trainer: me/t:1, server: me/s:1}"]


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(RECIPE))
    monkeypatch.chdir(tmp_path)


def job(scheduler: str, *overrides: str, described: Path | None = None) -> Job:
    return read_job(scheduler, "r.yaml", overrides, described)


def machines_of(pods: dict[str, Any]) -> list[str]:
    """The command of a pod's container, parsed as `agentfactory machine` parses it."""
    (container,) = pods["spec"]["containers"]
    assert container["args"][:3] == ["python", "-m", "agentfactory"]
    return [str(word).replace("$(JOB_COMPLETION_INDEX)", "1") for word in container["args"][3:]]


def test_a_slurm_job_has_one_command_for_all_machines() -> None:
    asked = ("cluster.trainers=2", "cluster.gpu=h100", "cluster.slurm=[--partition=gpu]")
    lines = slurm.files(job("slurm", *asked))["slurm.sh"].splitlines()
    options = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines if "#SBATCH" in line)
    assert (options["nodes"], options["gpus-per-node"], options["mem"]) == ("3", "h100:8", "0")
    assert (options["partition"], options["signal"], options["requeue"]) == ("gpu", "B:USR1@600", "")
    (command,) = (line for line in lines if " -m agentfactory machine " in line)
    options_of = parse([*shlex.split(command.rstrip("& ").replace("$machines", "a,b,c"))[3:], "--rank", "0"])
    assert (options_of.trainers, options_of.machines) == (2, ["a", "b", "c"])
    assert "train.processes=16" in options_of.overrides
    assert "train.strategy=fsdp2" in options_of.overrides


def test_kubernetes_gives_every_pod_a_name_that_its_command_knows() -> None:
    text = kubernetes.files(job("kubernetes", "cluster.trainers=2", *SHARED, "cluster.secrets=[WANDB_API_KEY]"))
    found = [*yaml.safe_load_all(text["kubernetes.yaml"])]
    assert [entry["kind"] for entry in found] == ["NetworkPolicy", "Service", "Job", "Service", "Job"]
    jobs = {entry["metadata"]["name"]: entry["spec"] for entry in found if entry["kind"] == "Job"}
    names = [f"{name}-{index}.{name}" for name, spec in jobs.items() for index in range(spec["completions"])]
    for name, spec in jobs.items():
        options = parse(machines_of(spec["template"]))
        assert options.machines == names
        assert (options.role, options.rank) == (name.removeprefix("r-"), 1)
        (container,) = spec["template"]["spec"]["containers"]
        keys = [entry["name"] for entry in container["env"] if "valueFrom" in entry]
        assert keys == ["AGENTFACTORY_SERVER_KEY", "WANDB_API_KEY"]
        assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/dev/shm", "/shared"}
    assert 'output="/shared/r"' in text["kubernetes.yaml"]


def test_sky_gets_no_key_in_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hidden")
    made = job("skypilot", "cluster.gpu=A100", "cluster.secrets=[WANDB_API_KEY]", *SHARED[:2])
    text = skypilot.files(made)["skypilot.yaml"]
    task = yaml.safe_load(text)
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "A100:8")
    assert "hidden" not in text
    ((command, _),) = skypilot.submit(made, Path("x"), {})
    assert command[-5:-1] == ["--secret", "AGENTFACTORY_SERVER_KEY", "--secret", "WANDB_API_KEY"]


def test_no_name_or_value_is_read_as_code(tmp_path: Path) -> None:
    name = "-$(touch x) '#\"%j.yaml"
    (tmp_path / name).write_text((tmp_path / "r.yaml").read_text())
    made = read_job("slurm", f"./{name}", [], None)
    lines = slurm.files(made)["slurm.sh"].splitlines()
    (command,) = (line for line in lines if " -m agentfactory machine " in line)
    assert parse([*shlex.split(command.rstrip("& "))[3:], "--rank", "0"]).recipe == f"./{name}"
    (output,) = (line for line in lines if line.startswith("#SBATCH --output="))
    assert shlex.split(output.removeprefix("#SBATCH ")) == [
        f"--output={made.folder}".replace("%", "%%") + "/slurm-%j.log"
    ]
    env = 'cluster.env={A: "1e3", B: "$(A)"}'
    text = kubernetes.files(read_job("kubernetes", f"./{name}", [*SHARED, env], None))["kubernetes.yaml"]
    assert 'value: "1e3"' in text
    assert "value: $$(A)" in text
    assert "./-$$(touch x)" in text


def test_the_run_is_in_the_shared_folder_wherever_the_machines_are(tmp_path: Path) -> None:
    shared = [f"cluster.shared={tmp_path}", *SHARED[1:]]
    assert f'output="{tmp_path}/runs/r"' in job("kubernetes", *shared).arguments
    assert f'output="{tmp_path}/x"' in job("kubernetes", *shared, "output=x").arguments


def test_names_of_services_begin_with_a_letter() -> None:
    assert [job("slurm", f"name={name}").name for name in ("2hop", "训练", "a_b")] == ["run-2hop", "run", "a-b"]


def test_the_description_may_be_a_file_and_stages_work(tmp_path: Path) -> None:
    described = tmp_path / "cluster.yaml"
    described.write_text("trainers: 2\ngpus: 0\nhours: 0.5\n")
    made = read_job("slurm", str(QUICKSTART / "quickstart.yaml"), ["cluster.servers=2"], described)
    assert (made.cluster.machines, made.cluster.processes) == (4, 2)
    assert {"sft.train.strategy=fsdp2", "grpo.train.strategy=fsdp2"} <= {*made.arguments}
    assert re.search("--time=0:30:00\n(.*\n)*.*ACCELERATE_USE_CPU=true", slurm.files(made)["slurm.sh"])


@pytest.mark.parametrize(
    ("scheduler", "overrides", "problem"),
    [
        ("slurm", ["cluster.trainer=2"], "cluster.trainer: unknown key"),
        ("slurm", ["cluster.trainers=0"], "cluster.trainers: "),
        ("slurm", ["cluster.servers=0"], "cluster.servers: got 0, but chains run in"),
        ("slurm", ["server.url=http://127.0.0.1:8000"], "server.url: got "),
        ("slurm", ["cluster.gpus=1", "placement.mode=split"], "placement.mode: got 'split'"),
        ("slurm", ["sync.backend=ipc"], "sync.backend: got 'ipc'"),
        ("slurm", ["cluster.secrets=[A B]"], "cluster.secrets.0: got 'A B'"),
        ("slurm", ['cluster.env={"A;id": b}'], "cluster.env.A;id: got 'A;id'"),
        ("slurm", ["cluster.env={AGENTFACTORY_SERVER_KEY: a}"], "cluster.env.AGENTFACTORY_SERVER_KEY: is a key"),
        ("slurm", ['cluster.slurm=["--mem=0\\nid"]'], "cluster.slurm.0: got '--mem=0"),
        ("slurm", ["cluster.gpu=h 100"], "cluster.gpu: got 'h 100'"),
        ("slurm", ["cluster.hours=0.1"], "cluster.hours: got 0.1, within grace_seconds=600"),
        ("slurm", ['output="a\\nb"'], "output: got '"),
        ("kubernetes", [*SHARED, "cluster.kubernetes={volumes: 5}"], "cluster.kubernetes.volumes: is set by the job"),
        ("kubernetes", [*SHARED, "cluster.shared=mine"], "cluster.shared: got mine"),
        ("slurm", ["cluster.port=8000"], "cluster.server_port: got 8000"),
        ("kubernetes", [], "sync.backend: got 'file', which sends weights through shared files"),
        ("kubernetes", ["sync.backend=nccl"], "cluster.images: missing"),
        ("kubernetes", ["sync.backend=nccl", "cluster.trainers=2"], "cluster.shared: null, but cluster.trainers=2"),
        ("kubernetes", [SHARED[0]], "cluster.volume: null, but /shared must be mounted"),
        ("kubernetes", [*SHARED, "output=/elsewhere/run"], "output: /elsewhere/run is not in /shared"),
        ("skypilot", SHARED[:2], "cluster.gpu: null, but each machine has 8 GPUs"),
        ("skypilot", [*SHARED[:2], "model.path=/usr"], "model.path: /usr is on this machine only"),
    ],
)
def test_what_cannot_run_is_refused(scheduler: str, overrides: list[str], problem: str) -> None:
    with pytest.raises(SettingError) as error:
        job(scheduler, *overrides)
    assert problem in str(error.value)
    assert error.value.fix
