"""Sync by adapter files, which transfers megabytes and pauses nothing."""

import shutil
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from torch import Tensor

from agentfactory.rollout.inference.adapter_config import WEIGHTS
from agentfactory.trainers.checkpoints.checkpoint_folder import digest
from agentfactory.trainers.networks.policy import Policy
from agentfactory.trainers.sync.server_control import ServerControl, SyncError
from agentfactory.trainers.sync.weight_sync import ForeignWeightsError, SyncReport, find, lock_for_others, on_each


class LoraSync:
    """A sync backend for adapter files, with a new name and path per version: a running turn keeps its adapter.

    No server reports the content of a loaded adapter, so the proof links the name to it. The name was unused on the
    server, which afterwards lists it with exactly the given path. The path contains the digest of the weights, was
    never used before, and the file still has this digest after loading. The canary checks the rest."""

    def __init__(self, servers: list[ServerControl], folder: Path, prefix: str, keep: int) -> None:
        """Adapters are called {prefix}{version}; a repeated push of a version appends -2, -3 and so on.

        Every server must be able to read `folder` under the same path, and have room for the `keep` newest adapters,
        which stay loaded: rollout.max_staleness + 2, because no older one samples a token that is trained."""
        self._servers = servers
        self._folder = folder
        self._prefix = prefix
        self._keep = keep
        self._pushes: dict[int, int] = {}
        self._loaded: OrderedDict[str, Path] = OrderedDict()
        self._last: tuple[int, str, str] | None = None
        self._unfinished: int | None = None

    def push(self, version: int, policy: Policy, state: Mapping[str, Tensor]) -> SyncReport:
        started = time.perf_counter()
        if self._unfinished != version:
            while len(self._loaded) >= self._keep:
                oldest, old_path = next(iter(self._loaded.items()))
                on_each(self._servers, partial(unload, name=oldest))
                del self._loaded[oldest]
                shutil.rmtree(old_path)
            self._pushes[version] = self._pushes.get(version, 0) + 1
            again = f"-{self._pushes[version]}" if self._pushes[version] > 1 else ""
            name = f"{self._prefix}{version}{again}"
            # written under a temporary name, because the final name contains the digest of the file
            passing = (self._folder / f".{name}").resolve()
            content = digest(policy.save_adapter(passing, state))
            lock_for_others(passing)
            path = passing.with_name(f"{name}-{content[:16]}")
            passing.rename(path)
            self._loaded[name] = path
            self._last = version, name, content
            self._unfinished = version
        on_each(self._servers, self._complete)
        self._unfinished = None
        return self._report(started)

    def restore(self, url: str) -> SyncReport:
        """Give the server all adapters in use, under their existing names, which a restarted one has never used."""
        started = time.perf_counter()
        self._complete(find(self._servers, url))
        return self._report(started)

    def _complete(self, server: ServerControl) -> None:
        """Load missing adapters, and unload others, which may remain on a server that was away. After sleep, a server
        may list adapters that it has lost (vLLM #53888), so all are loaded again."""
        listed = _listed(server)
        for name, root in listed.items():
            ours = root is not None and Path(root).parent == self._folder.resolve()
            if ours and (server.asleep or name not in self._loaded):
                unload(server, name)
        for name, path in self._loaded.items():
            if server.asleep or listed.get(name) != str(path):
                load(server, name, path)

    def close(self) -> None:
        """Make the servers unload the adapters, for the next run; the files stay in the run folder."""
        for name in self._loaded:
            # after a failed run, there may be no server left
            with suppress(SyncError):
                on_each(self._servers, partial(unload, name=name))

    def _report(self, started: float) -> SyncReport:
        assert self._last is not None
        version, name, content = self._last
        size = (self._loaded[name] / WEIGHTS).stat().st_size
        return SyncReport(version, name, name, size, time.perf_counter() - started, content)


def load(server: ServerControl, name: str, path: Path) -> None:
    """Load the adapter in the folder `path`, whose name ends with its digest, under an unused name, and prove it."""
    held = _listed(server)
    if name in held:
        raise ForeignWeightsError(server, f"already serves an adapter called {name}, from {held[name]}")
    server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
    place = _listed(server).get(name)
    if place != str(path):
        problem = f"serves it from {place}, not from {path}" if place else "does not list it in /v1/models"
        raise SyncError(f"{server.url} accepted the adapter {name}, but {problem}: it was not loaded")
    if not path.name.endswith(digest(path / WEIGHTS)[:16]):
        problem = f"changed while {server.url} loaded it: its weights are not the trainer's"
        raise SyncError(f"{path / WEIGHTS} {problem}")


def unload(server: ServerControl, name: str) -> None:
    # a restarted server no longer has it
    if name in _listed(server):
        server.post("/v1/unload_lora_adapter", {"lora_name": name})


def _listed(server: ServerControl) -> dict[str, str | None]:
    """Return the path of every model that a server lists, by name."""
    return {card["id"]: card.get("root") for card in server.get("/v1/models").get("data", [])}
