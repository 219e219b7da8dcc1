"""Weight sync: bringing each version of the policy into the inference server, with proof that it arrived."""

import hashlib
import shutil
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from trainers.policy import Policy
from trainers.server_control import ServerControl, SyncError


@dataclass(frozen=True)
class SyncReport:
    """One version that the server has taken."""

    version: int
    label: str
    """What the server calls the version in `weight_versions`."""
    model: str
    """The name to ask the server for."""
    bytes: int
    """Size of the weights that travelled."""
    seconds: float
    digest: str
    """sha256 of the file that travelled."""


class WeightSync(Protocol):
    """A way to bring weights into a server."""

    def push(self, version: int, policy: Policy, state: dict[str, Tensor]) -> SyncReport:
        """Returns once the server serves `state` (the policy's gathered weights) and has proven it; raises SyncError
        otherwise. Called in one process, with rising versions."""


class FileSync:
    """Full weights, as a safetensors file that the server reads: for a CPU, or servers that share a disk.

    Requests that are running keep their tokens and go on under the new weights; their caches are recomputed. Proof:
    the server echoes the version, and its checksum of every weight equals ours.
    """

    def __init__(self, server: ServerControl, folder: Path) -> None:
        """`folder` takes one file at a time; the server must be able to read it under the same path."""
        self._server = server
        self._folder = folder
        self._model = served_models(server)[0]
        server.post("/init_weight_transfer_engine", {"init_info": {}})

    def push(self, version: int, policy: Policy, state: dict[str, Tensor]) -> SyncReport:
        """See WeightSync."""
        started = time.perf_counter()
        label = str(version)
        target = self._folder / label
        target.mkdir(parents=True, exist_ok=True)
        file = target / "model.safetensors"
        save_file({name: value.cpu() for name, value in state.items()}, file, metadata={"format": "pt"})

        server = self._server
        server.post("/pause?mode=keep")
        server.post("/start_weight_update")
        server.post("/update_weights", {"update_info": {"path": str(file.resolve())}})
        server.post("/finish_weight_update", {"weight_version": label})
        # answers 200 also when it did nothing: caches of the old weights would stay in use
        if server.post("/reset_prefix_cache?reset_running_requests=true").get("success") is not True:
            raise SyncError(f"{server.url}/reset_prefix_cache did not drop the caches of the old weights")
        echoed = server.get("/weight_info").get("weight_version")
        if echoed != label:
            raise SyncError(f"{server.url} says that it serves version {echoed!r} after taking version {label!r}")
        check_content(state, server.post("/weight_checker", {"action": "checksum"}).get("checksums", {}))
        # only proven weights generate: where a proof fails, the server stays paused and the run stops
        server.post("/resume")

        size, digest = file.stat().st_size, file_digest(file)
        shutil.rmtree(target)
        return SyncReport(version, label, self._model, size, time.perf_counter() - started, digest)


class LoraSync:
    """Adapter files, under a new name and path per version: nothing is paused, and a running turn keeps the adapter
    that it began with. Proof: the server lists the name with the path of the file whose digest the report carries."""

    def __init__(self, server: ServerControl, folder: Path, run: str, attempt: int, keep: int) -> None:
        """Adapters are called {run}-{attempt}-v{version}. The `keep` newest stay loaded: rollout.max_staleness + 2, so
        that no turn loses its adapter; the server must hold as many (server.max_loras)."""
        self._server = server
        self._folder = folder
        self._prefix = f"{run}-{attempt}-v"
        self._keep = keep
        self._loaded: OrderedDict[str, Path] = OrderedDict()

    def push(self, version: int, policy: Policy, state: dict[str, Tensor]) -> SyncReport:
        """See WeightSync."""
        started = time.perf_counter()
        name = f"{self._prefix}{version}"
        target = (self._folder / name).resolve()
        file = policy.save_adapter(target, state)
        while len(self._loaded) >= self._keep:
            oldest, path = self._loaded.popitem(last=False)
            self._server.post("/v1/unload_lora_adapter", {"lora_name": oldest})
            shutil.rmtree(path)
        self._server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(target)})
        self._loaded[name] = target
        roots = {card["id"]: card.get("root") for card in self._server.get("/v1/models").get("data", [])}
        if roots.get(name) != str(target):
            raise SyncError(f"{self._server.url}/v1/models lists {name} with root {roots.get(name)}, not {target}")
        seconds = time.perf_counter() - started
        return SyncReport(version, name, name, file.stat().st_size, seconds, file_digest(file))


def served_models(server: ServerControl) -> list[str]:
    """Names of the models that a server offers, the base model first."""
    cards = server.get("/v1/models").get("data", [])
    names = [card["id"] for card in sorted(cards, key=lambda card: card.get("parent") is not None)]
    if not names:
        raise SyncError(f"{server.url}/v1/models lists no model")
    return names


def file_digest(file: Path) -> str:
    """sha256 of a file, in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# vLLM keeps these projections stacked along the output dimension, under one name
_STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def check_content(state: dict[str, Tensor], checksums: dict[str, str]) -> None:
    """Raises SyncError unless the server's checksums are those of `state`, weight by weight.

    A checksum is the sha256 of a parameter's bytes in row-major order, as vLLM computes it; a server may put its
    worker before a name ("dp0:pp0:pcp0:tp0:") and stack projections. One server process holds whole weights.
    """
    unproven = set(state)
    for key, checksum in checksums.items():
        name = key.rsplit(":", 1)[-1]
        parts = [name]
        for stacked, projections in _STACKED.items():
            if f".{stacked}." in name:
                parts = [name.replace(f".{stacked}.", f".{projection}.") for projection in projections]
        missing = [part for part in parts if part not in state]
        if missing:
            raise SyncError(f"the server holds {key}, and {missing[0]} was not sent")
        if parameter_digest([state[part] for part in parts]) != checksum:
            raise SyncError(f"the server's {key} differs from the trainer's after the update")
        unproven -= set(parts)
    if unproven:
        raise SyncError(f"the server gives no checksum for {', '.join(sorted(unproven)[:3])}")


def parameter_digest(parts: list[Tensor]) -> str:
    """sha256 over the bytes of tensors, one after the other, in hex."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
