"""Proof of content: the weights on a server are, byte for byte, the trainer's."""

import hashlib
import logging
import math
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from agentfactory.rollout.weight_digest import UNKNOWN, weight_digest
from agentfactory.tools.notices import tell
from agentfactory.trainers.server_control import ServerControl, SyncError
from agentfactory.trainers.sync.layouts import Layout, Worker, is_experts, layouts

logger = logging.getLogger(__name__)

_VOCABULARY_MULTIPLE = 64


def file_digest(file: Path) -> str:
    """Returns the sha256 of a file, in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class Content:
    """The weights of one version, as the trainer has them. Each digest is computed once, for all servers and replicas,
    on the weight's own device."""

    def __init__(self, state: dict[str, Tensor], served: Mapping[str, str] | None = None) -> None:
        """`state` must not change before the last proof. With `served`, those of the version before, the digests
        are computed in a thread for the same layouts, while the weights travel."""
        self.state = state
        self._digests: dict[object, str | None] = {}
        self._lock = threading.Lock()
        self.served: Mapping[str, str] = {}
        """The checksums of the server that was checked last."""
        self._ahead: Future[None] | None = None
        if served:
            pool = ThreadPoolExecutor(1, "digests")
            self._ahead = pool.submit(self._digest_ahead, served)
            pool.shutdown(wait=False)

    def prove(self, server: ServerControl, label: str) -> str:
        """Raises SyncError unless the server reports that it serves version `label` and its checksums match; returns
        their digest."""
        echoed = server.get("/weight_info").get("weight_version")
        if echoed != label:
            raise SyncError(f"{server.url} says that it serves version {echoed!r} after taking version {label!r}")
        checksums = server.post("/weight_checker", {"action": "checksum"}).get("checksums", {})
        return self.check(checksums, len(server.replicas()))

    def check(self, checksums: dict[str, str], replicas: int = 1) -> str:
        """Raises SyncError unless the checksums of all `replicas` of a server match, weight by weight; returns the
        sha256 of names and checksums, in hex.

        A checksum is what `weight_digest` returns, or the sha256 of a parameter's bytes in row-major order, as vLLM
        computes it without our plugin. A server may put its worker before a name ("dp0:pp0:pcp0:tp0:"), stack
        projections, have a slice of them, list a tied head, and fill a vocabulary with zeros: see `layouts`. If a
        layout is not known, a notice says so, and only the canary proves these weights.
        """
        if self._ahead is not None:
            self._ahead.result()
        # several servers are proven at once, and mostly need the same digests
        with self._lock:
            return self._check(checksums, replicas)

    def _check(self, checksums: dict[str, str], replicas: int) -> str:
        workers = Worker.of_keys(list(checksums))
        unproven = {_replica(key): set(self.state) for key in checksums}
        unknown = set()
        if len(unproven) != replicas:
            raise SyncError(f"the server has {replicas} replicas, and gives checksums of {len(unproven)}")
        for key, checksum in checksums.items():
            name = key.rsplit(":", 1)[-1]
            possible = list(layouts(name, self.state))
            found = next((layout for layout in possible if self._matches(layout, workers[key], checksum)), None)
            if found is not None:
                unproven[_replica(key)] -= set(found.names)
            elif not possible or checksum.startswith(UNKNOWN) or (is_experts(name) and ":" not in checksum):
                # without our plugin, a server does not say whether its kernel has reordered the experts
                unknown.add(name)
            else:
                raise SyncError(f"the server's {key} differs from the trainer's after the update")
        left = set().union(*unproven.values())
        if left and not unknown:
            raise SyncError(f"the server gives no checksum for {_some(left)}")
        if unknown:
            tell(
                logger,
                "weights that only the canary proves",
                f"the server has {_some(unknown)} under a name or in a layout that the trainer does not know; of the "
                f"trainer's {len(self.state)} weights, only the canary proves {len(left)}",
                see="docs/servers.md",
            )
        self.served = checksums
        return hashlib.sha256(repr(sorted(checksums.items())).encode()).hexdigest()

    def _digest_ahead(self, checksums: Mapping[str, str]) -> None:
        workers = Worker.of_keys(list(checksums))
        for key, checksum in checksums.items():
            if (layout := next(layouts(key.rsplit(":", 1)[-1], self.state), None)) is not None:
                self._matches(layout, workers[key], checksum)

    def _matches(self, layout: Layout, worker: Worker, checksum: str) -> bool:
        _, _, rest = checksum.partition(":")
        if checksum.startswith(UNKNOWN):
            return False
        if not rest:
            filled = (checksum == self._sha256(layout, filled) for filled in (False, layout.vocabulary))
            return any(filled)
        dtype, shape, _ = rest.split(":")
        key = (layout.names, len(layout.pieces), layout.pieces[0].data_ptr(), worker, dtype, shape)
        if key not in self._digests:
            sizes = [int(size) for size in shape.split("x")] if shape else []
            arranged = layout.arranged(sizes, worker)
            # a server keeps a few weights in another precision than they are sent in
            converted = arranged.to(getattr(torch, dtype)) if arranged is not None else None
            self._digests[key] = weight_digest(converted).rpartition(":")[2] if converted is not None else None
        return self._digests[key] == checksum.rpartition(":")[2]

    def _sha256(self, layout: Layout, filled: bool) -> str:
        key = (layout.names, layout.pieces[0].data_ptr(), filled)
        if (known := self._digests.get(key)) is None:
            whole = layout.arranged(None, Worker())
            assert whole is not None
            zeros = bytes(
                -len(whole) % _VOCABULARY_MULTIPLE * math.prod(whole.shape[1:]) * whole.itemsize if filled else 0
            )
            known = self._digests[key] = hashlib.sha256(_bytes(whole) + zeros).hexdigest()
        return known


def _replica(key: str) -> str:
    """Returns the replica of a checksum's key, "dp0" of "dp0:pp0:pcp0:tp0:NAME"; "" where a server names no worker."""
    return key.split(":")[0] if key.startswith("dp") and ":" in key else ""


def _bytes(weight: Tensor) -> bytes:
    return weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _some(names: set[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
