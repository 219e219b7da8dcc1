"""vLLM's parts: its libraries, pushes of full weights and of adapters with their proof, decoding, and `time_share`.

The server's Python is AGENTFACTORY_VLLM_PYTHON, where it is set; else ours, with what gpu_day.py has unpacked. On a CPU
vLLM takes weights by file, and cannot sleep: there, and where it is missing, the embedded engine stands in."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import torch
import yaml

from agentfactory.base.user_code.import_path import is_installed
from agentfactory.rollout.inference.http_transport import authorization
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.networks.policy import Policy, load_policy
from agentfactory.trainers.sync.adapter_sync import LoraSync
from agentfactory.trainers.sync.file_sync import FileSync
from agentfactory.trainers.sync.ipc_sync import IpcSync
from agentfactory.trainers.sync.server_control import ServerControl
from agentfactory.trainers.sync.weight_sync import WeightSync
from benchmarks.gpu_parts.findings import DEVICE, GPU, Findings, NotHereError
from benchmarks.gpu_parts.probes import held_mib
from benchmarks.gpu_parts.training import prepared
from benchmarks.placement import Size, dtype, run_steps, write_recipe
from tests.server_process import serve

PYTHON = os.environ.get("AGENTFACTORY_VLLM_PYTHON")
SEQUENCES = (128, 256) if GPU else (4, 8)
GRAPHS = ["--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}']
"""CUDA graphs without minutes of torch.compile."""


@dataclass(frozen=True)
class Engine:
    """An inference engine, and the section of a recipe that chooses it."""

    name: str
    options: dict[str, Any]

    @property
    def overrides(self) -> list[str]:
        """The same for a command."""
        return [f"server.engine={self.name}", *(f"server.options.{k}={v}" for k, v in self.options.items())]


def engine() -> Engine:
    """Return vLLM; on a CPU without it, the embedded engine. Raises NotHereError."""
    if PYTHON:
        return Engine("vllm", {"python": PYTHON})
    if is_installed("vllm"):
        return Engine("vllm", {})
    if GPU:
        raise NotHereError("vLLM's pieces are not all here")
    return Engine("embedded", {})


LOAD = """
import importlib, json
found = {}
for name in ("vllm._C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa3_C", "vllm.cumem_allocator", "vllm._C",
             "vllm.entrypoints.cli.main", "vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu.model_runner",
             "vllm.distributed.weight_transfer.ipc_engine"):
    try:
        importlib.import_module(name)
        found[name] = "loads"
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"[:300]
    print(json.dumps(found), flush=True)
"""


def imports(findings: Findings) -> None:
    """Which of vLLM's libraries and modules load; on a CPU, those of the GPU's wheel with stubs (vllm_stubs.py)."""
    code = findings.data / "vllm" / "code"
    if GPU:
        engine()
        findings.add("modules", _last_json([sys.executable, "-c", LOAD]))
        return
    if not PYTHON or not code.exists():
        findings.add("stubs", "not tried: they need AGENTFACTORY_VLLM_PYTHON, and all of vLLM's pieces")
        return
    stubs = [PYTHON, str(Path(__file__).with_name("vllm_stubs.py")), str(code.parent), *GRAPHS]
    findings.add("stubs", _last_json(stubs))


def _last_json(command: list[str]) -> Any:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    ended = {} if done.returncode == 0 else {"status": done.returncode, "last": done.stdout[-600:]}
    return {**(json.loads(lines[-1]) if lines else {}), **ended}


@contextmanager
def served(findings: Findings, lora: bool) -> Iterator[tuple[ServerControl, Policy, Size, str]]:
    """Serve a random model, and load it as the trainer does. Yields the name of the sync backend, too."""
    size, folder = prepared("0.5b", findings.data)
    chosen, options = engine(), {}
    if GPU and chosen.name == "vllm":
        options = {"gpu_memory_utilization": 0.4, "args": GRAPHS}
    backend = "file" if chosen.name == "vllm" and not GPU else "ipc"
    model = {"path": str(folder / "model"), "dtype": dtype(), "lora": {"rank": 16} if lora else None}
    server = {"engine": chosen.name, "max_model_len": 2 * size.length, "max_num_seqs": max(SEQUENCES)}
    if options or chosen.options:
        server["options"] = {**chosen.options, **options}
    findings.add("engine", chosen.name)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        transfer = None if lora else backend
        with serve({"model": model, "server": server}, Path(temporary), transfer) as url:
            findings.add("seconds to start", time.perf_counter() - started)
            policy = load_policy(TrainRecipe.model_validate({"model": model, "train": {"steps": 1}}), DEVICE)
            yield ServerControl(url), policy, size, backend


def full(findings: Findings) -> None:
    """Five pushes of full weights, and the speed of decoding before and after them."""
    with served(findings, lora=False) as (server, policy, size, backend), tempfile.TemporaryDirectory() as folder:
        decode(findings, server, size, "policy", "before")
        sync: Any = IpcSync([server]) if backend == "ipc" else FileSync([server], Path(folder))
        findings.add("backend", backend)
        with closing(sync):
            pushes(findings, server, policy, sync, size)
        decode(findings, server, size, "policy", "after")


def adapters(findings: Findings) -> None:
    """Five pushes of an adapter, and the speed of decoding with the last one."""
    with (
        served(findings, lora=True) as (server, policy, size, _),
        tempfile.TemporaryDirectory() as folder,
        closing(LoraSync([server], Path(folder), "adapter-v", keep=2)) as sync,
    ):
        name = pushes(findings, server, policy, sync, size)
        decode(findings, server, size, name, "with an adapter")


def pushes(findings: Findings, server: ServerControl, policy: Policy, sync: WeightSync, size: Size) -> str:
    """Push five versions, each of which must be proven, and compare log-probabilities. Returns the last one's name."""
    name = ""
    for version in range(5):
        with torch.no_grad():
            for parameter in policy.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05 * max(1e-2, parameter.abs().mean()) * torch.randn_like(parameter))
        report = sync.push(version, policy, policy.gather())
        name = report.model
        ids = [number % size.vocabulary for number in range(100, 160)]
        params = {"temperature": 0.0, "max_tokens": 8, "logprobs": 0, "ignore_eos": True}
        body = {"token_ids": ids, "model": name, "sampling_params": params}
        choice = server.post("/inference/v1/generate", body)["choices"][0]
        given = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
        whole = torch.tensor([ids + choice["token_ids"]], device=DEVICE)
        with torch.no_grad():
            wanted, _ = policy(whole, torch.arange(59, 67, device=DEVICE), whole[0, 60:])
        found = {"seconds": report.seconds, "bytes": report.bytes, "proven": report.digest[:12], "label": report.label}
        found |= {
            "largest difference": float((given - wanted.cpu()).abs().max()),
            "versions": choice["weight_versions"],
        }
        findings.add(f"push {version}", {**found, **memory()})
    return name


def memory() -> dict[str, float]:
    """Return the MiB of the trainer, and of the server too: on a GPU what is not free there, else its processes'."""
    if GPU:
        free, whole = torch.cuda.mem_get_info()
        return {"trainer MiB": held_mib(), "device MiB": (whole - free) / 2**20}
    children = psutil.Process().children(recursive=True)
    return {"trainer MiB": held_mib(), "children MiB": sum(child.memory_info().rss for child in children) / 2**20}


def decode(findings: Findings, server: ServerControl, size: Size, model: str, when: str) -> None:
    """Sampled tokens a second of as many requests at a time as there are sequences, each with a prompt of its own."""
    params = {"temperature": 1.0, "max_tokens": size.answer, "logprobs": 0, "ignore_eos": True}

    async def ask(session: aiohttp.ClientSession) -> int:
        ids = torch.randint(100, size.vocabulary, (size.prompt // 2,)).tolist()
        body = {"token_ids": ids, "model": model, "sampling_params": params}
        async with session.post(server.url + "/inference/v1/generate", json=body) as answer:
            return len((await answer.json())["choices"][0]["token_ids"])

    async def ask_all(count: int) -> float:
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        headers = authorization(server.url, None)
        async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
            started = time.perf_counter()
            tokens = sum(await asyncio.gather(*[ask(session) for _ in range(count)]))
            return tokens / (time.perf_counter() - started)

    for count in SEQUENCES:
        asyncio.run(ask_all(count))  # warms up
        findings.add(f"tokens a second, {count} sequences, {when}", asyncio.run(ask_all(count)))


def time_share(findings: Findings) -> None:
    """Three steps of `agentfactory train` in turns on one device, of full weights and of an adapter: mean seconds of
    the last two, by activity."""
    chosen = engine() if GPU else Engine("embedded", {})
    findings.add("engine", chosen.name)
    size, folder = prepared("0.5b", findings.data)
    recipe = write_recipe(size, folder, steps=3)
    content = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    content["server"]["engine"] = chosen.name
    if chosen.name == "vllm":
        content["server"]["options"] = {**chosen.options, "args": GRAPHS}
    recipe.write_text(yaml.safe_dump(content), encoding="utf-8")
    for lora in (False, True):
        label = "adapter" if lora else "full weights"
        if label not in findings:
            with tempfile.TemporaryDirectory() as runs:
                findings.add(label, run_steps(recipe, "time_share", lora, Path(runs)))
