"""Sync by file: full weights as safetensors that the servers read."""

import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from agentfactory.tools.disk import writing
from agentfactory.trainers.checkpoint_folder import set_usual_modes
from agentfactory.trainers.policy import Policy
from agentfactory.trainers.server_control import ServerControl
from agentfactory.trainers.sync.content import Content
from agentfactory.trainers.sync.full import holds_full_weights, update_full_weights
from agentfactory.trainers.sync.protocol import SyncReport, base_model, find, lock_for_others, on_each


class FileSync:
    """Sends full weights as a safetensors file that every server reads: for a CPU, or servers that share a disk.

    Proof: a server echoes the version, and its checksum of every weight equals ours.
    """

    def __init__(self, servers: list[ServerControl], folder: Path, prefix: str = "", keep_caches: bool = False) -> None:
        """`folder` contains the file of the last version; servers must be able to read it under the same path. Versions
        are called {prefix}{version}. `keep_caches`: see update_full_weights."""
        self._servers = servers
        self._folder = folder
        self._prefix = prefix
        self._keep_caches = keep_caches
        self._model = base_model(servers)
        self._last: tuple[int, Path] | None = None
        self._served: Mapping[str, str] = {}
        self._digest = ""
        for server in servers:
            _init(server)

    def push(self, version: int, policy: Policy, state: dict[str, Tensor]) -> SyncReport:
        """See WeightSync."""
        started = time.perf_counter()
        content = Content(state, self._served)
        target = self._folder / str(version)
        target.mkdir(parents=True, exist_ok=True)
        file = (target / "model.safetensors").resolve()
        with writing(file):
            save_file({name: value.cpu() for name, value in state.items()}, file, metadata={"format": "pt"})
        set_usual_modes(target)
        lock_for_others(target)
        on_each(self._servers, lambda server: self._update(server, version, file, content))
        self._served = content.served
        if self._last is not None and self._last[1] != file:
            shutil.rmtree(self._last[1].parent)
        # kept until the next version is proven: a restarted server needs it
        self._last = version, file
        return self._report(started)

    def restore(self, url: str) -> SyncReport:
        """See WeightSync."""
        assert self._last is not None
        started = time.perf_counter()
        version, file = self._last
        server, content = find(self._servers, url), Content(load_file(file))
        if not holds_full_weights(server, self._label(version), content):
            self._update(server, version, file, content)
        return self._report(started)

    def close(self) -> None:
        """See WeightSync."""
        if self._last is not None:
            shutil.rmtree(self._last[1].parent)
            self._last = None

    def _update(self, server: ServerControl, version: int, file: Path, content: Content) -> None:
        # every time: a server that was restarted since the last version is not initialised
        _init(server)

        def transfer() -> None:
            server.post("/update_weights", {"update_info": {"path": str(file)}})

        self._digest = update_full_weights([server], self._label(version), content, transfer, self._keep_caches)

    def _label(self, version: int) -> str:
        return f"{self._prefix}{version}"

    def _report(self, started: float) -> SyncReport:
        assert self._last is not None
        version, file = self._last
        size, label = file.stat().st_size, self._label(version)
        salt = label if self._keep_caches else None
        return SyncReport(version, label, self._model, size, time.perf_counter() - started, self._digest, salt)


def _init(server: ServerControl) -> None:
    server.post("/init_weight_transfer_engine", {"init_info": {}})
