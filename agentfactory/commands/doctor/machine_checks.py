"""Checks of a machine, with or without a recipe: versions, devices, memory, disk, sandbox."""

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement

from agentfactory.base.errors import SettingError
from agentfactory.base.findings import Finding, ok, problem, warning
from agentfactory.base.http import connections
from agentfactory.base.processes.devices import GPU_DRIVERS
from agentfactory.base.processes.interruption import run_interruptibly
from agentfactory.base.processes.sandbox_limits import SandboxSettings, SandboxUnavailable
from agentfactory.base.user_code.entry_points import WORLDS
from agentfactory.base.user_code.extras import DISTRIBUTION
from agentfactory.tools.sandbox.session import Sandbox

_LITTLE_MEMORY = 3 * 2**30
"""Bytes that the quickstart's processes take, with some reserve."""
_LITTLE_DISK, _NO_DISK = 5 * 2**30, 2**30
_CHAINS = 256
"""Chains at a time of which any machine should be able to open the files."""


def check_versions() -> Iterator[Finding]:
    """Check Python, every package against AgentFactory's requirements, and for packages of its former name."""
    yield ok("python", f"{sys.version.split()[0]} at {sys.executable}")
    right = 0
    for text in importlib.metadata.requires(DISTRIBUTION) or []:
        requirement = Requirement(text)
        required = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if not required and "extra" not in str(requirement.marker):
            continue  # for another operating system
        wanted = f"{requirement.name}{requirement.specifier}"
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            if required:
                yield problem("packages", f"{requirement.name} is not installed", f"pip install '{wanted}'")
            continue
        if requirement.specifier.contains(version, prereleases=True):
            right += required
            continue
        text = f"{requirement.name} is {version}, but AgentFactory needs {requirement.specifier}"
        yield (problem if required else warning)("packages", text, f"pip install '{wanted}'")
    for other in importlib.metadata.distributions(name="agentfactory"):
        # only installed files have a RECORD; a clone may also contain the .egg-info of an earlier setup
        if other.read_text("RECORD") is not None:
            older = other.entry_points.select(group=WORLDS)
            what = f"an AgentFactory from before the name {DISTRIBUTION}" if older else "another project"
            fix = "pip uninstall agentfactory, then install AgentFactory again: they share files"
            yield (warning if older else problem)("packages", f"agentfactory {other.version} is {what}", fix)
    yield ok("packages", f"{right} required packages have the right versions")


def check_devices(seen: dict[str, Any], drivers: tuple[str, ...] = GPU_DRIVERS) -> Iterator[Finding]:
    driver = next(filter(os.path.exists, drivers), None)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    for index, gpu in enumerate(seen["gpus"]):
        text = f"GPU {index}: {gpu['name']}, {gib(gpu['free'])} of {gib(gpu['total'])} free"
        fix = "end the other processes on it (`nvidia-smi` shows them)"
        yield warning("devices", text, fix) if gpu["free"] < 0.9 * gpu["total"] else ok("devices", text)
        if not gpu["bf16"]:
            yield warning("devices", f"GPU {index} has no bfloat16", "use model.dtype=float32")
    if not seen["gpus"]:
        cores = f"{len(os.sched_getaffinity(0))} cores" if hasattr(os, "sched_getaffinity") else f"{os.cpu_count()}"
        if driver and hidden:
            text, fix = "this machine has a GPU, but CUDA_VISIBLE_DEVICES is empty", "unset CUDA_VISIBLE_DEVICES"
            yield warning("devices", text, fix)
        elif driver and seen["build"] == "cpu":
            fix = "install a CUDA (or ROCm) build of torch: https://pytorch.org/get-started/locally"
            yield problem("devices", f"this machine has a GPU ({driver}), but torch is built for the CPU", fix)
        elif driver:
            text = f"this machine has a GPU ({driver}), but torch ({seen['build']}) cannot use it: {seen['error']}"
            yield problem("devices", text, "update the GPU's driver, or install a torch that is built for it")
        else:
            yield ok("devices", f"no GPU: {cores} of a CPU, for the embedded engine and small models")
    if seen["torchvision"]:
        text = f"torchvision, which peft and vLLM import, cannot be imported: {seen['torchvision']}"
        fix = "install torch's own (vLLM needs it for images), or pip uninstall torchvision torchaudio torchcodec"
        yield problem("packages", text, fix)


def check_memory(room: int) -> Iterator[Finding]:
    text, fix = f"{gib(room)} of {gib(psutil.virtual_memory().total)} free", "end other processes; small models need"
    yield warning("memory", text, f"{fix} {gib(_LITTLE_MEMORY)}") if room < _LITTLE_MEMORY else ok("memory", text)


def check_disk(folder: Path) -> Iterator[Finding]:
    """Check that a run folder can be written there; `folder` need not exist yet."""
    place = existing(folder)
    if not (place.is_dir() and os.access(place, os.W_OK)):
        told = "cannot be written" if place.is_dir() else f"is a file, so {folder} cannot be created in it"
        yield problem("disk", f"{place} {told}", "output=OTHER, or change who may write there")
        return
    free = shutil.disk_usage(place).free
    text, fix = f"{gib(free)} free in {place}", "make room, or output=OTHER on another disk"
    bad = problem if free < _NO_DISK else warning
    yield bad("disk", text, fix) if free < _LITTLE_DISK else ok("disk", text)


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def existing(folder: Path) -> Path:
    """Return `folder`, or its nearest existing parent."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.exists())


def check_open_files(chains: int = _CHAINS) -> Iterator[Finding]:
    try:
        connections.check_open_files(chains)
        yield ok("open files", f"a process may have {connections.raise_open_files() or 'any number'}")
    except SettingError as error:
        yield problem("open files", error.problem, error.fix)


def check_sandbox(used: bool) -> Iterator[Finding]:
    """Check that a sandbox of the code interpreter starts. `used`: the recipe runs code."""
    try:
        shown = run_interruptibly(_try_sandbox())
    except SandboxUnavailable as error:
        told = error.problem if used else f"{error.problem} (for the code interpreter only)"
        yield (problem if used else warning)("sandbox", told, error.fix)
        return
    fix = "update bubblewrap (0.8 or newer) and the system's python3, or set `sandbox: none` for trusted code"
    yield ok("sandbox", "bubblewrap runs code") if shown == "42" else problem("sandbox", f"6 * 7 is {shown!r}", fix)


async def _try_sandbox() -> str:
    settings = SandboxSettings()
    sandbox = await Sandbox.ready(settings, Sandbox.begin(settings))
    try:
        return (await sandbox.run("6 * 7", 10.0)).text
    finally:
        sandbox.close()
