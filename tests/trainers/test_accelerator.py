"""Launches by accelerate's own launcher: several processes equal one; recipes unlike its setup are refused."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3ForCausalLM

from agentfactory.base.errors import SettingError
from agentfactory.trainers.config import TrainConfig, TrainRecipe
from agentfactory.trainers.processes import _WITHOUT_EFFECT
from agentfactory.trainers.processes import accelerator as accelerator_module
from agentfactory.trainers.processes.accelerator import LaunchError, check_launch, check_same_recipe, make_accelerator
from tests.forked import Forked, reserved_port
from tests.saved_groups import write_groups
from tests.trainers.conftest import Make, make_groups, on_cpu

pytestmark = [pytest.mark.processes, pytest.mark.numbers, pytest.mark.extended]

SCRIPT = Path(__file__).with_name("launched.py")
ROOT = SCRIPT.parents[2]
PROCESSES = {"single": 1, "ddp": 2, "fsdp2": 2, "hsdp": 4}
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

_FSDP_SETTINGS = accelerator_module._FSDP_SETTINGS
PLAIN = {"steps": 1, "learning_rate": 1.0, "max_grad_norm": 1e9, "optimizer": {"name": "sgd", "betas": [0.0, 0.0]}}
"""One step by the plain gradient."""
LONGER = {"steps": 2, "learning_rate": 1e-3, "max_grad_norm": 0.5, "updates_per_batch": 2}
"""Several steps of AdamW with clipped gradients."""
CASES: list[dict[str, Any]] = [
    {**PLAIN},
    {**PLAIN, "untied": True},
    {**PLAIN, "lora": {"rank": 3}, "gradient_checkpointing": True},
    {**LONGER},
    {**LONGER, "lora": {"rank": 2}, "dtype": "bfloat16"},
]


def launch(strategy: str, arguments: list[str], cpu_by_environment: bool) -> list[str]:
    """Return the output of `accelerate launch ... SCRIPT ARGUMENTS`, which succeeds. hsdp has two launchers, as if on
    two machines; the output is that of the first."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if cpu_by_environment:
        environment["ACCELERATE_USE_CPU"] = "true"
    flags = ["--config_file", str(ROOT / f"recipes/accelerate/{strategy}.yaml")]
    flags += ["--num_processes", str(PROCESSES[strategy])]
    machines = [["--main_process_port", "0"]]
    if strategy == "hsdp":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
        flags += ["--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", str(reserved_port())]
        machines = [["--machine_rank", "0"], ["--machine_rank", "1"]]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", *flags]
    with ThreadPoolExecutor(len(machines)) as threads:

        def run(machine: list[str]) -> subprocess.CompletedProcess[str]:
            command = [*launcher, *machine, str(SCRIPT), *arguments]
            return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

        done = [*threads.map(run, machines)]
    assert [each.returncode for each in done] == [0] * len(machines), "".join(each.stderr for each in done)
    return done[0].stdout.splitlines()


def run_alone(arguments: list[str], log: Path, on_cpu: bool) -> list[str]:
    environment = {"ACCELERATE_USE_CPU": "true"} if on_cpu else {}
    process = Forked("tests.trainers.launched", *arguments, log=log, **environment)
    assert process.wait() == 0, log.read_text()
    return log.read_text().splitlines()


class Trained:
    def __init__(self, folder: Path, lines: list[str]):
        entries = [json.loads(line) for line in lines if line.startswith("{")]
        firsts = [place for place, entry in enumerate(entries) if entry["step"] == 1]
        self.metrics = [entries[start:end] for start, end in zip(firsts, [*firsts[1:], None], strict=True)]
        self.checkpoints = [max((folder / str(number)).iterdir()) for number in range(len(CASES))]

    def weights(self, case: int) -> dict[str, torch.Tensor]:
        kind = "adapter_model" if "lora" in CASES[case] else "model"
        return load_file(self.checkpoints[case] / f"{kind}.safetensors")


@pytest.fixture(scope="module")
def train(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trained]:
    groups, untied = tmp_path_factory.mktemp("launch") / "groups.jsonl", tmp_path_factory.mktemp("untied")
    write_groups(groups, make_groups(6, 3))
    model = Qwen3ForCausalLM.from_pretrained(model_folder)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0).clone())
    model.save_pretrained(untied)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(untied)
    made: dict[tuple[str, str], Trained] = {}

    def train(strategy: str, device: str = "cpu") -> Trained:
        if (strategy, device) not in made:
            recipes = []
            for case in CASES:
                settings = dict(case)
                section = {"path": str(untied if settings.pop("untied", False) else model_folder), "dtype": "float32"}
                section |= {name: settings.pop(name) for name in ("dtype", "lora") if name in settings}
                settings |= {
                    "processes": PROCESSES[strategy],
                    "strategy": strategy,
                    "batch_size": 3,
                    "token_budget": 70,
                }
                recipes.append({"model": section, "train": settings})
            folder = tmp_path_factory.mktemp(strategy)
            arguments, on_cpu = [json.dumps(recipes), str(groups), str(folder)], device == "cpu"
            if strategy == "single":
                lines = run_alone(arguments, folder.with_suffix(".log"), on_cpu)
            else:
                lines = launch(strategy, arguments, on_cpu)
            made[strategy, device] = Trained(folder, lines)
        return made[strategy, device]

    return train


@pytest.mark.parametrize(
    ("strategy", "device"),
    [
        ("fsdp2", "cpu"),
        *(pytest.param(name, "cpu", marks=pytest.mark.long) for name in ("ddp", "hsdp")),
        *(pytest.param(name, "gpus", marks=TWO_GPUS) for name in ("ddp", "fsdp2")),
    ],
)
def test_several_processes_equal_one(train: Callable[..., Trained], strategy: str, device: str) -> None:
    one, several = train("single", device), train(strategy, device)
    for number, case in enumerate(CASES):
        exact = case.get("dtype") != "bfloat16"
        for step, (given, expected) in enumerate(zip(several.metrics[number], one.metrics[number], strict=True)):
            # AdamW's step is as long for a weight whose gradient is only rounding noise, which decides its sign
            norm = 1e-5 if exact else 1e-2 if step == 0 else 1e-1
            assert given["grad_norm"] == pytest.approx(expected["grad_norm"], rel=norm)
            for name in ("loss", "entropy", "clip_fraction", "mismatch/mean", "mismatch/max", "mismatch/kl", "tokens"):
                relative, absolute = (1e-4, 1e-6) if exact else (1e-2, 1e-2)
                assert given[name] == pytest.approx(expected[name], rel=relative, abs=absolute), (case, name)
        weights = several.weights(number)
        for name, value in one.weights(number).items():
            # AdamW's first steps are as long where a gradient is almost 0
            tolerance = 1e-5 if case["steps"] == 1 else 1e-4 if exact else 2e-3
            torch.testing.assert_close(weights[name], value, atol=tolerance, rtol=0, msg=lambda m, c=case: f"{c} {m}")


def test_machines_with_unlike_recipes_are_refused(make_recipe: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gather_object` gives each process the values of all: here, of this recipe and of another machine's."""
    recipe = make_recipe(processes=2, strategy="ddp")

    def check(**sections: dict[str, Any]) -> None:
        fields = recipe.model_dump(mode="json", by_alias=True)
        other = TrainRecipe.model_validate(fields | {name: fields[name] | own for name, own in sections.items()})
        gathered: list[Any] = []
        monkeypatch.setattr(accelerator_module, "gather_object", lambda own: gathered.extend(own) or gathered)
        check_same_recipe(recipe)
        check_same_recipe(other)

    check(server={"url": "http://h:1"})
    with pytest.raises(LaunchError, match=r"process 1 has model\.path='elsewhere', and process 0 has "):
        check(model={"path": "elsewhere"})


def test_one_process_where_the_recipe_asks_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    for strategy in ("ddp", "fsdp2", "hsdp"):
        two = TrainConfig(steps=1, processes=2, strategy=strategy)
        asked = rf"train\.processes=2 and train\.strategy={strategy}, but accelerate set up 1"
        with pytest.raises(LaunchError, match=asked):
            check_launch(two, on_cpu())
    single = TrainConfig(steps=1)
    check_launch(single, on_cpu())
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="they would train independently"):
        check_launch(single, on_cpu())


@pytest.mark.parametrize("setting", _FSDP_SETTINGS)
def test_ignored_settings_of_fsdp_are_refused(make_recipe: Make, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv(setting, "other")
    with pytest.raises(LaunchError, match=rf"{setting.lower()[:14]}\w*: other.* recipes/accelerate/fsdp2\.yaml"):
        make_accelerator(make_recipe(processes=2, strategy="fsdp2"))


@pytest.mark.parametrize("name", _WITHOUT_EFFECT)
def test_a_variable_that_would_train_otherwise_than_the_recipe_is_refused(
    make_recipe: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "Other")
    with pytest.raises(SettingError, match=rf"{name}: got 'Other' from the environment.*; fix: unset it; in the rec"):
        make_accelerator(make_recipe())
