"""Sync by file: full weights as safetensors files that the servers read."""

import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from safetensors.torch import load_file, save_file

from agentfactory.base.files.disk import set_usual_modes, writing
from agentfactory.trainers.networks.gathered_weights import Weights
from agentfactory.trainers.networks.policy import Policy
from agentfactory.trainers.sync.content_proof import Content, served_checksums
from agentfactory.trainers.sync.full_sync import FullSync, holds_full_weights, parts_beyond
from agentfactory.trainers.sync.server_control import ServerControl, SyncError
from agentfactory.trainers.sync.weight_sync import SyncReport, find, lock_for_others, on_each

_FILE_BYTES = 2**30
"""File size at which the next file begins. At most this and one weight are in memory."""


class FileSync(FullSync):
    """A sync backend for full weights as safetensors files, for CPUs or servers that share a disk. Weights are gathered
    while they are written. Proof: a server echoes the version, and its checksum of every weight equals ours."""

    def __init__(self, servers: list[ServerControl], folder: Path, prefix: str = "", keep_caches: bool = False) -> None:
        """`folder` contains the files of the last version; servers must be able to read them under the same path."""
        super().__init__(servers, prefix, keep_caches)
        self._folder = folder
        self._last: tuple[int, Path] | None = None
        self._written: tuple[Weights, Path, Content] | None = None
        # deletion takes a quarter of the time of writing, and no step need wait for it
        self._deletes = ThreadPoolExecutor(1, "delete")
        self._deleted: Future[None] | None = None
        for server in servers:
            _init(server)

    def push(self, version: int, policy: Policy, state: Weights) -> SyncReport:
        started = time.perf_counter()
        # a lost server interrupts a push, but the written files remain valid
        if self._written is None or self._written[0] is not state:
            self._written = state, *self._write(version, state)
        _, target, content = self._written
        on_each(self._servers, lambda server: self._update(server, version, target, content))
        # a skipped server returns with its previous layout
        self._served = {**self._served, **content.served}
        if self._last is not None and self._last[1] != target:
            self._deleted = self._deletes.submit(_delete, self._last[1])
        # kept until the next version is proven, for restarted servers
        self._last = version, target
        return self._report(version, _size(target), started)

    def restore(self, url: str) -> SyncReport:
        assert self._last is not None
        started = time.perf_counter()
        version, target = self._last
        if not target.is_dir():
            raise SyncError(f"{url} cannot get version {version}: {target} was removed; resume the run")
        state = {name: value for file in sorted(target.iterdir()) for name, value in load_file(file).items()}
        server, content = find(self._servers, url), Content(state)
        if not holds_full_weights(server, self._label(version), content):
            self._update(server, version, target, content)
        return self._report(version, _size(target), started)

    def close(self) -> None:
        self._wait_for_deletes()
        if self._last is not None:
            _delete(self._last[1])
        if self._written is not None:
            # differs from the last version if a signal interrupted its push
            _delete(self._written[1])
        self._last = self._written = None

    def _write(self, version: int, state: Weights) -> tuple[Path, Content]:
        # limits disk use to two versions
        self._wait_for_deletes()
        if not (self._served or state.resident):
            found: dict[str, dict[str, str]] = {}
            on_each(self._servers, lambda server: found.update({server.url: served_checksums(server)}))
            self._served = found
        content = Content(state.meta, self._served, keep=state.resident)
        target = (self._folder / str(version)).resolve()
        target.mkdir(parents=True, exist_ok=True)
        try:
            weights = ((name, value.cpu()) for name, value in content.passing(state.stream()))
            for number, part in enumerate(parts_beyond(weights, _FILE_BYTES)):
                file = target / f"model-{number:05}.safetensors"
                with writing(file):
                    save_file(dict(part), file, metadata={"format": "pt"})
            set_usual_modes(target)
            lock_for_others(target)
        except BaseException:
            _delete(target)
            raise
        return target, content

    def _update(self, server: ServerControl, version: int, target: Path, content: Content) -> None:
        # every time, because a server restarted since the last version is not initialised
        _init(server)

        def transfer() -> None:
            server.post("/update_weights", {"update_info": {"path": str(target)}})

        self._load([server], version, content, transfer)

    def _wait_for_deletes(self) -> None:
        if self._deleted is not None:
            self._deleted.result()


def _size(target: Path) -> int:
    return sum(file.stat().st_size for file in target.iterdir())


def _delete(target: Path) -> None:
    # the user may have deleted it
    shutil.rmtree(target, ignore_errors=True)


def _init(server: ServerControl) -> None:
    server.post("/init_weight_transfer_engine", {"init_info": {}})
