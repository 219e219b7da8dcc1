"""Proof that a server's weights equal the trainer's byte for byte."""

import hashlib
import logging
import math
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from pathlib import Path

import torch
from torch import Tensor

from agentfactory.base.run_notices import notify
from agentfactory.rollout.inference.sglang import ON_CPU, ON_GPU
from agentfactory.rollout.inference.weight_digest import FUNCTIONS, UNKNOWN, sglang_hash, weight_digest
from agentfactory.trainers.sync.served_layouts import Layout, Worker, is_experts, layouts
from agentfactory.trainers.sync.server_control import ServerControl, SyncError

logger = logging.getLogger(__name__)

_VOCABULARY_MULTIPLE = 64
_MOST_PENDING = 2**29
"""Maximum bytes of weights held until their digests are computed."""


def file_digest(file: Path) -> str:
    """Return the sha256 of a file, in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


Served = Mapping[str, Mapping[str, str]]
"""The checksums of each server, by URL."""


def served_checksums(server: ServerControl) -> dict[str, str]:
    """Return the checksums of a server's weights, by worker and name. Raises SyncError."""
    found: dict[str, str] = server.post("/weight_checker", {"action": "checksum"}).get("checksums", {})
    return found


@dataclass
class _Expected:
    """A digest to compare with a server's checksum, if the server's layout has not changed."""

    name: str
    """The name on the server."""
    checksum: str
    worker: Worker
    layout: tuple[object, ...]
    """The Layout.key."""
    missing: set[str]
    """The trainer's names of required weights that have not been read yet."""
    needs: tuple[str, ...]


class Content:
    """The trainer's weights of one version. Each digest is computed once for all servers and replicas, on the weight's
    own device."""

    def __init__(self, state: Mapping[str, Tensor], served: Served | None = None, keep: bool = True) -> None:
        """`state` must not change before the last proof. With `served`, the checksums of the previous version, a thread
        computes digests for the same layouts during the transfer.

        `state` may be without values (device "meta"), which `passing` then provides. Without `keep`, no weight is held
        for longer than its digest takes, and only the layouts in `served` can be proven.
        """
        self.state = dict(state)
        self.served: dict[str, Mapping[str, str]] = {}
        """The checksums of proven servers."""
        self._keep = keep
        self._digests: dict[object, str | None] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, "digests")  # starts its thread with the first task
        self._pending: deque[tuple[Future[None], int]] = deque()
        self._waiting: defaultdict[str, list[_Expected]] = defaultdict(list)
        self._uses: Counter[str] = Counter()
        for expected in self._expect(served or {}):
            for name in expected.needs:
                self._waiting[name].append(expected)
            self._uses.update(expected.needs)
        for name, value in state.items():
            if not value.is_meta:
                self._arrived(name)

    def passing(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield `weights`, and receive them as values of `state`."""
        for name, value in weights:
            if self._keep or self._uses[name]:
                self.state[name] = value
            self._arrived(name)
            yield name, value

    def prove(self, server: ServerControl, label: str) -> str:
        """Raise SyncError unless the server reports version `label` and its checksums match; return the checksums'
        digest."""
        echoed = server.get("/weight_info").get("weight_version")
        if echoed != label:
            raise SyncError(f"{server.url} reports version {echoed!r} after it accepted version {label!r}")
        checksums = served_checksums(server)
        digest = self.check(checksums, len(server.replicas()))
        self.served[server.url] = checksums
        return digest

    def check(self, checksums: dict[str, str], replicas: int = 1) -> str:
        """Raise SyncError unless the checksums of all `replicas` of a server match, weight by weight; return the sha256
        of names and checksums, in hex.

        A checksum is a `weight_digest`, or the sha256 of a parameter's bytes in row-major order, as vLLM computes it
        without our plugin, or SGLang's (see `sglang_hash`). A server may prefix names with its worker
        ("dp0:pp0:pcp0:tp0:"), stack projections, have a slice of them, list a tied head, and pad a vocabulary with
        zeros: see `layouts`. Weights in an unknown layout are reported, and only the canary proves them.
        """
        # several servers are proven concurrently, and mostly need the same digests
        with self._lock:
            while self._pending:
                self._pending.popleft()[0].result()
            self._pool.shutdown()
            return self._check(checksums, replicas)

    def _check(self, checksums: dict[str, str], replicas: int) -> str:
        workers = Worker.of_keys(list(checksums))
        unproven = {_replica(key): set(self.state) for key in checksums}
        unknown = set()
        if len(unproven) != replicas:
            raise SyncError(f"the server has {replicas} replicas, but returned checksums of {len(unproven)}")
        for key, checksum in checksums.items():
            name = key.rsplit(":", 1)[-1]
            possible = list(layouts(name, self.state))
            found = next((layout for layout in possible if self._matches(layout, workers[key], checksum)), None)
            if found is not None:
                unproven[_replica(key)] -= set(found.names)
            elif not possible or checksum.startswith(UNKNOWN) or (is_experts(name) and _hides_order(checksum)):
                unknown.add(name)
            else:
                raise SyncError(f"the server's {key} differs from the trainer's after the update")
        left = set().union(*unproven.values())
        if left and not unknown:
            raise SyncError(f"the server returned no checksum for {_some(left)}")
        if unknown:
            notify(
                logger,
                "weights that only the canary proves",
                f"the server has {_some(unknown)} under a name or in a layout that the trainer does not know; of the "
                f"trainer's {len(self.state)} weights, only the canary proves {len(left)}",
                see="docs/servers.md",
            )
        return hashlib.sha256(repr(sorted(checksums.items())).encode()).hexdigest()

    def _expect(self, served: Served) -> Iterator[_Expected]:
        for checksums in served.values():
            workers = Worker.of_keys(list(checksums))
            for key, checksum in checksums.items():
                name = key.rsplit(":", 1)[-1]
                # kept weights can still be digested in another layout at the comparison
                for layout in islice(layouts(name, self.state), 1 if self._keep else None):
                    yield _Expected(name, checksum, workers[key], layout.key, set(layout.names), layout.names)

    def _arrived(self, name: str) -> None:
        for expected in self._waiting.pop(name, []):
            expected.missing.discard(name)
            if not expected.missing:
                size = sum(self.state[needed].nbytes for needed in expected.needs)
                self._pending.append((self._pool.submit(self._digest_early, expected), size))
        while not self._keep and sum(size for _, size in self._pending) > _MOST_PENDING:
            self._pending.popleft()[0].result()

    def _digest_early(self, expected: _Expected) -> None:
        for layout in layouts(expected.name, self.state):
            if layout.key == expected.layout:
                self._matches(layout, expected.worker, expected.checksum)
        for name in expected.needs:
            self._uses[name] -= 1
            if not self._keep and not self._uses[name]:
                self.state[name] = self.state[name].to("meta")

    def _matches(self, layout: Layout, worker: Worker, checksum: str) -> bool:
        if checksum.startswith(UNKNOWN):
            return False
        function, _, rest = checksum.partition(":")
        if not rest:
            # compute both, since each may be needed later
            filled = [self._sha256(layout, filled) for filled in {False, layout.vocabulary}]
            return checksum in filled
        if function in (ON_CPU, ON_GPU):
            return any(rest == digest for digest in self._sglang_digests(layout, function))
        if function not in FUNCTIONS:
            raise SyncError(
                f"the server's checksums use {function!r}, and this release knows {' and '.join(FUNCTIONS)}: "
                "install the same release of AgentFactory in both environments"
            )
        dtype, shape, digest = rest.split(":")

        def digest_here() -> str | None:
            sizes = [int(size) for size in shape.split("x")] if shape else []
            arranged = layout.arranged(sizes, worker)
            # a server stores a few weights in another precision than sent
            converted = arranged.to(getattr(torch, dtype)) if arranged is not None else None
            return weight_digest(converted, function).rpartition(":")[2] if converted is not None else None

        return self._digest(layout, (function, worker, dtype, shape), digest_here) == digest

    def _sglang_digests(self, layout: Layout, function: str) -> Iterator[str | None]:
        """Yield the hashes that a weight may have in SGLang, which reports neither its shape nor its dtype."""

        def sglang(filled: bool, dtype: torch.dtype | None) -> str:
            whole = layout.arranged(None, Worker())
            assert whole is not None
            if filled:
                whole = torch.cat([whole, whole.new_zeros(-len(whole) % _VOCABULARY_MULTIPLE, *whole.shape[1:])])
            return sglang_hash(whole.to(dtype) if dtype is not None else whole, function)

        # a server stores a few weights in another precision than sent
        for filled, dtype in product({False, layout.vocabulary}, (None, torch.float32)):
            yield self._digest(layout, (function, filled, dtype), partial(sglang, filled, dtype))

    def _sha256(self, layout: Layout, filled: bool) -> str | None:
        def sha256() -> str:
            whole = layout.arranged(None, Worker())
            assert whole is not None
            zeros = -len(whole) % _VOCABULARY_MULTIPLE * math.prod(whole.shape[1:]) * whole.itemsize if filled else 0
            return hashlib.sha256(_bytes(whole) + bytes(zeros)).hexdigest()

        return self._digest(layout, ("sha256", filled), sha256)

    def _digest(self, layout: Layout, form: tuple[object, ...], compute: Callable[[], str | None]) -> str | None:
        key = (layout.key, form)
        if key not in self._digests:
            if any(piece.is_meta for piece in layout.pieces):
                problem = f"the server has {_some(set(layout.names))} in another layout than before the update"
                raise SyncError(f"{problem}: it was restarted with other options; resume the run")
            self._digests[key] = compute()
        return self._digests[key]


def _hides_order(checksum: str) -> bool:
    """Return whether a server does not report if its kernels have reordered experts: vLLM without our plugin, and
    SGLang."""
    function, colon, _ = checksum.partition(":")
    return not colon or function in (ON_CPU, ON_GPU)


def _replica(key: str) -> str:
    """Return the replica in a checksum's key, "dp0" in "dp0:pp0:pcp0:tp0:NAME"; "" for a key without worker."""
    return key.split(":")[0] if key.startswith("dp") and ":" in key else ""


def _bytes(weight: Tensor) -> bytes:
    return weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _some(names: set[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
