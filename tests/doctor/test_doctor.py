"""`agentfactory doctor`: every planted problem is found, said with its fix, and nothing else is blamed."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from agentfactory.base.findings import Finding, Severity
from agentfactory.base.http import connections
from agentfactory.base.processes.devices import Speed
from agentfactory.base.processes.memory import memory_room
from agentfactory.commands.doctor import machine_checks as doctor_machine
from agentfactory.commands.doctor import recipe_checks as doctor_recipe
from agentfactory.commands.main import main
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.inference.inference_client import NEEDED_ROUTES
from tests.chat_tokenizers import make_tokenizer, trl_template
from tests.http_pages import serving
from tests.project import load_and_check
from tests.untrained_tokens import make_needs, make_untrained

Command = Callable[..., subprocess.CompletedProcess[str]]


def load(*overrides: str) -> Recipe:
    """The project's recipe, as doctor reads it."""
    return load_and_check("recipe.yaml", overrides, lacks=[])


def the_problem(findings: Iterable[Finding]) -> str:
    """What the only problem says, and its fix."""
    problems = [finding for finding in findings if finding.severity is Severity.PROBLEM]
    assert len(problems) == 1, problems
    assert problems[0].fix
    return f"{problems[0].topic}: {problems[0].text}; {problems[0].fix}"


def levels(findings: Iterable[Finding]) -> set[Severity]:
    return {finding.severity for finding in findings}


@contextmanager
def answering(answers: dict[str, object], key: str) -> Iterator[str]:
    """The address of an HTTP server that gives these JSON answers, to those who know the key, and else 401."""

    def answer(request: BaseHTTPRequestHandler) -> tuple[int, dict[str, str], bytes]:
        allowed = request.headers["Authorization"] == f"Bearer {key}"
        return 200 if allowed else 401, {}, json.dumps(answers[request.path] if allowed else {"error": "no"}).encode()

    with serving(answer) as url:
        yield url


def plant_distribution(folder: Path, name: str, version: str) -> None:
    """Another version of a package, before the one that is installed."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "RECORD").touch()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.processes
def test_a_machine_without_problems(project: Path, agentfactory: Command, warm_start: Path, warm_server: str) -> None:
    # this one, as `make setup` leaves it: the real command, against a real server
    result = agentfactory("doctor", "recipe.yaml", f"model.path={warm_start}", f"server.url={warm_server}")
    assert result.returncode == 1, result.stdout
    # the server was started for shorter chains than the recipe's, and that is all
    assert result.stdout.count("problem ") == 1
    assert "takes 1024 tokens, but rollout.max_total_tokens is 8192" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("1 problem, ")
    fixed = ["rollout.max_total_tokens=1024", f"server.url={warm_server}"]
    result = agentfactory("doctor", "recipe.yaml", f"model.path={warm_start}", *fixed)
    assert result.returncode == 0, result.stdout
    assert f"ok       server: {warm_server} answers and has all" in result.stdout
    for subject in ("python", "packages", "devices", "memory", "disk", "open files", "sandbox", "recipe"):
        assert f" {subject}: " in result.stdout
    assert result.stdout.splitlines()[-1].startswith("no problems, ")


def test_the_first_prompt_is_shown(project: Path) -> None:
    make_tokenizer(trl_template("qwen2_5")).save_pretrained(project / "model")
    form, prompt = doctor_recipe.check_format(load())
    assert form.severity is prompt.severity is Severity.OK
    assert form.text.startswith("hermes: rollout.parser=auto: hermes reads the calls that the template writes; rows: ")
    assert "<|im_start|>user\n         1 + 1?<|im_end|>\n" in prompt.text
    assert "a sample call of " in prompt.text
    assert "(its result)" in prompt.text
    assert len(prompt.text) < 6000
    (stops, _) = doctor_recipe.check_format(load("rollout.parser=react"))
    assert stops.text.startswith("react: ")
    said = the_problem(doctor_recipe.check_format(load("rollout.parser=mistral")))
    assert "rollout.parser: got 'mistral', and the chat template writes tool calls in a format that" in said
    assert "use rollout.parser=hermes" in said
    # what a chain meets at its beginning
    refuses = "{{ raise_exception('no sums') if messages[0].content == '1 + 1?' }}"
    make_tokenizer(refuses + trl_template("qwen2_5")).save_pretrained(project / "model")
    assert "refuses the conversation" in the_problem(doctor_recipe.check_format(load()))


def test_what_the_trainer_would_refuse_of_a_model_is_told(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_untrained("untied", project / "model", make_needs())
    *_, told, _ = doctor_recipe.check_format(load())
    assert (told.severity, "cannot tell <tool_call> (" in told.text) == (Severity.WARNING, True)
    for overrides, words in (
        (["model.lora.rank=2"], "model.lora.trainable_tokens: missing, but the network cannot tell <tool_call> ("),
        (["model.lora={rank: 2, target_modules: [nope]}"], "model.lora.target_modules: got ['nope'], but 'nope' fits"),
        (["model.lora.rank=2", "rollout.parser=json"], ""),
    ):
        problems = [str(found) for found in doctor_recipe.check_format(load(*overrides)) if found.severity == "problem"]
        assert main(["train", "recipe.yaml", "--dry-run", *overrides]) == (2 if words else 0)
        assert (words in "".join(problems), words in capsys.readouterr().err, len(problems)) == (
            True,
            True,
            bool(words),
        )


def test_a_package_of_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels(doctor_machine.check_versions()) <= {Severity.OK, Severity.WARNING}
    plant_distribution(tmp_path, "peft", "0.19.1")
    monkeypatch.syspath_prepend(tmp_path)
    said = the_problem(doctor_machine.check_versions())
    assert said == "packages: peft is 0.19.1, but AgentFactory needs <0.22,>=0.21; pip install 'peft<0.22,>=0.21'"


GPU = {"name": "A Card", "total": 24 << 30, "free": 23 << 30, "bf16": True}
OLD_DRIVER = {"build": "cuda 13.0", "error": "The NVIDIA driver on your system is too old"}


@pytest.mark.parametrize(
    ("seen", "driver", "hidden", "told"),
    [
        ({}, False, False, "ok no GPU: "),
        ({}, True, False, "problem .*torch is built for the CPU; fix: install a CUDA"),
        (OLD_DRIVER, True, False, "problem .*too old; fix: update the GPU's driver"),
        ({}, True, True, "warning .*CUDA_VISIBLE_DEVICES is empty"),
        ({"gpus": [GPU]}, True, False, "ok GPU 0: A Card, 23.0 GiB of 24.0 GiB free"),
        ({"gpus": [{**GPU, "free": 12 << 30}]}, True, False, "warning .*end the other processes on it"),
        ({"gpus": [{**GPU, "bf16": False}]}, True, False, "warning GPU 0 has no bfloat16"),
        ({"torchvision": "RuntimeError: no nms"}, False, False, "problem .*pip uninstall torchvision"),
    ],
)
def test_devices(
    monkeypatch: pytest.MonkeyPatch, seen: dict[str, object], driver: bool, hidden: bool, told: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "") if hidden else monkeypatch.delenv("CUDA_VISIBLE_DEVICES", False)
    whole = {"build": "cpu", "gpus": [], "error": "", "torchvision": "", **seen}
    *_, finding = doctor_machine.check_devices(whole, ("/dev/null" if driver else "/dev/none",))
    assert re.match(told, f"{finding.severity} {finding}")


ROUTES = [*NEEDED_ROUTES, "/v1/load_lora_adapter", "/v1/unload_lora_adapter"]


@pytest.mark.parametrize(
    ("routes", "root", "setting", "told"),
    [
        (ROUTES, "", "server.api_key_env=THE_KEY", "ok .* answers and has all"),
        (ROUTES, "", "server.api_key_env=null", "problem .*answered 401"),
        (["/health"], "", "server.api_key_env=THE_KEY", "problem .*lacks /inference/v1/generate"),
        (ROUTES, "", "placement.mode=time_share", "problem .*lacks /sleep, /wake_up, /is_sleeping"),
        (ROUTES, "Other/Model", "server.api_key_env=THE_KEY", "warning .*serves Other/Model"),
    ],
)
def test_a_server_is_asked_for_what_training_needs(
    project: Path, monkeypatch: pytest.MonkeyPatch, routes: list[str], root: str, setting: str, told: str
) -> None:
    monkeypatch.setenv("THE_KEY", "secret")
    card = {"id": "policy", "root": root or str(project / "model"), "parent": None, "max_model_len": 8192}
    told_by_it = {"/openapi.json": {"paths": {route: {} for route in routes}}, "/v1/models": {"data": [card]}}
    with answering(told_by_it, key="secret") as url:
        settings = [f"server.url={url}", "model.lora.rank=8", "server.api_key_env=THE_KEY", setting]
        (finding,) = doctor_recipe.check_servers(load(*settings))
    assert re.match(told, f"{finding.severity} {finding.text}")


def test_a_taken_port(project: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = the_problem(doctor_recipe.check_address(load(f"server.port={port}")))
        assert said.startswith(f"port: nothing can listen on 127.0.0.1:{port}: Address already in use; server.port=0")
    assert levels(doctor_recipe.check_address(load())) == {Severity.OK}


@pytest.mark.processes
def test_a_vllm_of_another_version(project: Path) -> None:
    plant_distribution(project / "packages", "vllm", "0.20.1")
    for package in ("vllm", "rollout"):
        (project / "packages" / package).mkdir()
        (project / "packages" / package / "__init__.py").touch()
    python = project / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={project / "packages"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    recipe = load("server.engine=vllm", f"server.options.python={python}")
    told = "is 0.20.1, but AgentFactory needs <0.34,>=0.32"
    assert told in the_problem(doctor_recipe.check_vllm(recipe, 1))
    (project / "packages" / "vllm-0.20.1.dist-info").rename(project / "packages" / "vllm-0.32.0.dist-info")
    (project / "packages" / "vllm-0.32.0.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.32.0\n")
    assert levels(doctor_recipe.check_vllm(recipe, 1)) == {Severity.OK}
    # vLLM's own build computes on GPUs only
    assert "built for GPUs, but there is none" in the_problem(doctor_recipe.check_vllm(recipe, 0))


@pytest.mark.processes
def test_no_bubblewrap(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels(doctor_machine.check_sandbox(used=True)) == {Severity.OK}
    from agentfactory.tools.sandbox import bubblewrap

    (project / "bwrap").write_text("#!/bin/sh\necho bubblewrap 0.4.1\n")
    (project / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(project))
    # the package's own is of no use where only root may enter its folder; here it is out of sight
    monkeypatch.setattr(bubblewrap, "find_spec", lambda name: None)
    bubblewrap.find_bwrap.cache_clear()
    try:
        assert "install bubblewrap 0.8 or newer" in the_problem(doctor_machine.check_sandbox(used=True))
        assert levels(doctor_machine.check_sandbox(used=False)) == {Severity.WARNING}
    finally:
        bubblewrap.find_bwrap.cache_clear()


def test_a_model_that_fits_neither_memory_nor_disk(project: Path) -> None:
    recipe = load("train.checkpoint_every=2")
    assert levels(doctor_recipe.check_fit(recipe, 2**30)) <= {Severity.OK}
    with (project / "model" / "model.safetensors").open("wb") as file:
        file.truncate(2**43)  # of nothing but holes
    room = memory_room()
    assert "at least 16384.0 GiB of weights" in the_problem(doctor_recipe.check_fit(recipe, room))
    assert "5 checkpoints take at least" in the_problem(doctor_recipe.check_output(recipe))
    few = load("train.checkpoint_every=2", "train.keep_last=1")
    assert "2 checkpoints take at least" in the_problem(doctor_recipe.check_output(few))


def test_a_precision_that_is_slow_here(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = {"float32": [1e-10, 1e-9], "bfloat16": [0.5e-10, 2e-9]}
    monkeypatch.setattr(doctor_recipe, "measured", lambda: Speed({"1024": layers}, operation=1e-6))
    assert levels(doctor_recipe.check_dtype(load("model.dtype=bfloat16"))) == {Severity.WARNING}
    assert levels(doctor_recipe.check_dtype(load("model.dtype=float32"))) == {Severity.OK}
    assert levels(doctor_recipe.check_dtype(load("model.dtype=bfloat16", "placement.gpu_memory_gib=24"))) == set()


def test_a_run_folder_that_is_there_or_cannot_be(project: Path) -> None:
    (project / "runs" / "recipe").mkdir(parents=True)
    (project / "runs" / "recipe" / "summary.json").write_text("{}")
    (finding,) = doctor_recipe.check_output(load())
    assert (finding.severity, "--resume" in finding.fix) == (Severity.WARNING, True)
    (project / "file").touch()
    assert "is a file" in the_problem(doctor_machine.check_disk(project / "file" / "run"))


def test_too_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "raise_open_files", lambda: 1024)
    assert "4000 chains at a time each need a connection" in the_problem(doctor_machine.check_open_files(4000))
    assert levels(doctor_machine.check_open_files()) == {Severity.OK}


def test_a_check_that_fails_is_a_finding_and_the_others_go_on() -> None:
    from agentfactory.commands.doctor import _safely

    def broken() -> Iterator[Finding]:
        raise OSError("no such device")
        yield

    assert "no such device" in the_problem(_safely("disk", broken))
