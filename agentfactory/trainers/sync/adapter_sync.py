"""Sync by adapter files: transfers megabytes, and pauses nothing."""

import shutil
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from torch import Tensor

from agentfactory.trainers.networks.policy import Policy
from agentfactory.trainers.sync.content_proof import file_digest
from agentfactory.trainers.sync.server_control import ServerControl, SyncError
from agentfactory.trainers.sync.weight_sync import ForeignWeightsError, SyncReport, find, lock_for_others, on_each

_WEIGHTS = "adapter_model.safetensors"


class LoraSync:
    """Sends adapter files, under a new name and path per version: a running turn keeps the adapter that it began with.

    No server reports the bytes of an adapter that it has loaded, so the proof ties the name to them step by step: the
    name was free on the server before (it answered to nothing), the server lists it afterwards with exactly the path
    that was sent, the path contains the digest of the adapter's weights and was never used before, and the file at the
    path still has this digest after loading. The canary checks that the server computes with what it read.
    """

    def __init__(self, servers: list[ServerControl], folder: Path, prefix: str, keep: int) -> None:
        """Adapters are called {prefix}{version}; a version that is pushed again gets -2, -3 and so on.

        Every server must be able to read `folder` under the same path. The `keep` newest stay loaded:
        rollout.max_staleness + 2, so that no turn loses its adapter; a server must have room for as many.
        """
        self._servers = servers
        self._folder = folder
        self._prefix = prefix
        self._keep = keep
        self._pushes: dict[int, int] = {}
        self._loaded: OrderedDict[str, Path] = OrderedDict()
        self._last: tuple[int, str, str] | None = None
        self._unfinished: int | None = None

    def push(self, version: int, policy: Policy, state: Mapping[str, Tensor]) -> SyncReport:
        """See WeightSync."""
        started = time.perf_counter()
        if self._unfinished != version:
            self._begin(version, policy, state)
        on_each(self._servers, self._complete)
        self._unfinished = None
        return self._report(started)

    def restore(self, url: str) -> SyncReport:
        """See WeightSync. The server gets all adapters in use, under their existing names: a restarted server has never
        used these."""
        started = time.perf_counter()
        self._complete(find(self._servers, url))
        return self._report(started)

    def _begin(self, version: int, policy: Policy, state: Mapping[str, Tensor]) -> None:
        """Makes room on the servers, and writes the adapter."""
        while len(self._loaded) >= self._keep:
            oldest, old_path = next(iter(self._loaded.items()))
            on_each(self._servers, partial(_unload, name=oldest))
            del self._loaded[oldest]
            shutil.rmtree(old_path)
        self._pushes[version] = self._pushes.get(version, 0) + 1
        again = f"-{self._pushes[version]}" if self._pushes[version] > 1 else ""
        name = f"{self._prefix}{version}{again}"
        # written under a temporary name: the final name contains the digest of what was written
        passing = (self._folder / f".{name}").resolve()
        digest = file_digest(policy.save_adapter(passing, state))
        lock_for_others(passing)
        path = passing.with_name(f"{name}-{digest[:16]}")
        passing.rename(path)
        self._loaded[name] = path
        self._last = version, name, digest
        self._unfinished = version

    def _complete(self, server: ServerControl) -> None:
        """Loads adapters that are in use and not loaded, and unloads those that are no longer in use, which may remain
        on a server that was away or that an earlier attempt of the run has used. A server that has slept may list
        adapters that it has lost (vLLM #53888), so all are loaded again."""
        listed = _listed(server)
        for name, root in listed.items():
            ours = root is not None and Path(root).parent == self._folder.resolve()
            if ours and (server.asleep or name not in self._loaded):
                _unload(server, name)
        for name, path in self._loaded.items():
            if server.asleep or listed.get(name) != str(path):
                _load(server, name, path)

    def close(self) -> None:
        """See WeightSync. The servers forget the adapters, so that they have room for those of the next run; the files
        stay in the run folder."""
        for name in self._loaded:
            # a run that failed may have no server left
            with suppress(SyncError):
                on_each(self._servers, partial(_unload, name=name))

    def _report(self, started: float) -> SyncReport:
        assert self._last is not None
        version, name, digest = self._last
        size = (self._loaded[name] / _WEIGHTS).stat().st_size
        return SyncReport(version, name, name, size, time.perf_counter() - started, digest)


def _unload(server: ServerControl, name: str) -> None:
    # a restarted server has forgotten it
    if name in _listed(server):
        server.post("/v1/unload_lora_adapter", {"lora_name": name})


def _load(server: ServerControl, name: str, path: Path) -> None:
    """Loads an adapter into a server and proves it. Raises SyncError."""
    held = _listed(server)
    if name in held:
        raise ForeignWeightsError(server, f"already serves an adapter called {name}, from {held[name]}")
    server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
    root = _listed(server).get(name)
    if root != str(path):
        raise SyncError(
            f"{server.url} took the adapter {name} and serves it from {root}, not from {path}: it was not loaded"
            if root
            else f"{server.url} answered that it loaded the adapter {name}, and does not list it in /v1/models"
        )
    if not path.name.endswith(file_digest(path / _WEIGHTS)[:16]):
        raise SyncError(f"{path / _WEIGHTS} changed while {server.url} loaded it: its weights are not the trainer's")


def _listed(server: ServerControl) -> dict[str, str | None]:
    """Returns the path of every model that a server lists, by name."""
    return {card["id"]: card.get("root") for card in server.get("/v1/models").get("data", [])}
