"""Launches by accelerate's own launcher: two processes equal one, and what accelerate did not set up is refused."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from rollout.trajectory import Group
from trainers.config import TrainConfig, TrainRecipe
from trainers.launch import LaunchError, check_launch, make_accelerator

SCRIPT = Path(__file__).with_name("launched.py")
CONFIGURATION = "compute_environment: LOCAL_MACHINE\nnum_processes: 2\nnum_machines: 1\nmachine_rank: 0\n"
FSDP = CONFIGURATION + "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n"
TWO_PROCESSES = ["--multi_gpu", "--num_processes", "2"]


def launch(flags: list[str], arguments: list[str], cpu_by_environment: bool) -> subprocess.CompletedProcess[str]:
    """`accelerate launch FLAGS launched.py ARGUMENTS` on the CPU, as a user types it; the port is a free one."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[2])}
    if cpu_by_environment:
        environment["ACCELERATE_USE_CPU"] = "true"
    command = [sys.executable, "-m", "accelerate.commands.launch", *flags, "--main_process_port", "0", str(SCRIPT)]
    return subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_two_processes_equal_one(
    make_recipe: Callable[..., TrainRecipe],
    make_groups: Callable[..., list[Group]],
    tmp_path: Path,
    lora: dict[str, Any] | None,
) -> None:
    """Ragged groups, micro-batches that the processes share unevenly, two updates on each batch."""
    groups = tmp_path / "groups.jsonl"
    groups.write_text("".join(group.to_json() + "\n" for group in make_groups(6, 3)))
    logged, weights = [], []
    for processes, flags in ((1, ["--num_processes", "1"]), (2, TWO_PROCESSES)):
        strategy = {1: "single", 2: "ddp"}[processes]
        recipe = make_recipe(
            lora, processes=processes, strategy=strategy, steps=2, batch_size=3, token_budget=70, updates_per_batch=2,
            learning_rate=1e-3,
        )  # fmt: skip
        folder = tmp_path / strategy
        done = launch(flags, [recipe.model_dump_json(), str(groups), str(folder)], cpu_by_environment=True)
        assert done.returncode == 0, done.stderr
        logged.append([json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")])
        weights.append(load_file(folder / "step-000002" / f"{'adapter_' if lora else ''}model.safetensors"))
    one, two = logged
    assert len(one) == len(two) == 2
    assert two[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-5)
    for name in ("loss", "entropy", "clip_fraction", "mismatch/mean", "mismatch/max", "mismatch/kl", "tokens"):
        assert two[0][name] == pytest.approx(one[0][name], rel=1e-4, abs=1e-6), name
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("configuration", "flags", "cpu_by_environment", "reason"),
    [
        (FSDP + "use_cpu: true\n", [], False, "started 2 processes, but accelerate set up 1"),
        (FSDP + "use_cpu: false\n", [], True, "the launcher's configuration asks for FSDP, and accelerate set up 2"),
        (None, ["--cpu", "--num_processes", "2"], False, "but accelerate set up 1 process(es) as NO"),
        (CONFIGURATION + "distributed_type: MULTI_CPU\nuse_cpu: true\n", [], False, "but accelerate set up 1 process"),
    ],
    ids=["fsdp yaml with use_cpu", "fsdp that becomes ddp", "--cpu", "MULTI_CPU yaml"],
)
def test_what_accelerate_does_not_set_up_is_refused(
    make_recipe: Callable[..., TrainRecipe],
    tmp_path: Path,
    configuration: str | None,
    flags: list[str],
    cpu_by_environment: bool,
    reason: str,
) -> None:
    if configuration is not None:
        (tmp_path / "accelerate.yaml").write_text(configuration)
        flags = ["--config_file", str(tmp_path / "accelerate.yaml")]
    recipe = make_recipe(processes=2, strategy="ddp")
    done = launch(flags, [recipe.model_dump_json(), "none", str(tmp_path / "out")], cpu_by_environment)
    assert done.returncode != 0
    refusals = [line for line in done.stdout.splitlines() if "refused" in line]
    assert refusals, done.stderr
    assert all(reason in line for line in refusals)
    assert all("ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2" in line for line in refusals)
    assert not (tmp_path / "out").exists()


def test_one_process_where_the_recipe_asks_for_two(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    two = TrainConfig(steps=1, processes=2, strategy="ddp")
    with pytest.raises(LaunchError, match=r"train\.processes=2 and train\.strategy=ddp, but accelerate set up 1"):
        check_launch(two, accelerator)
    single = TrainConfig(steps=1)
    check_launch(single, accelerator)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="they would train apart"):
        check_launch(single, accelerator)


def test_fsdp2_is_refused_with_the_way_out() -> None:
    with pytest.raises(LaunchError, match=r"train\.strategy: fsdp2 is not supported yet; use ddp"):
        make_accelerator(TrainConfig(steps=1, processes=2, strategy="fsdp2"))
