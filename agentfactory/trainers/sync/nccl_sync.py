"""Sync by NCCL broadcast: full weights from the trainer's GPU to servers on other GPUs.

Untested on a GPU. Tests run the protocol over gloo, against a receiver that splits the stream like vLLM 0.32
(vllm/distributed/weight_transfer/nccl_engine.py), but it has never run over NCCL itself.
"""

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from jaxtyping import UInt8
from torch import Tensor

from agentfactory.trainers.networks.gathered_weights import Weights
from agentfactory.trainers.networks.policy import Policy
from agentfactory.trainers.sync.content_proof import Content, Served, served_checksums
from agentfactory.trainers.sync.full_sync import update_full_weights
from agentfactory.trainers.sync.server_control import ServerControl, ServerGoneError, SyncError
from agentfactory.trainers.sync.torch_group import TorchGroup
from agentfactory.trainers.sync.weight_sync import SyncReport, base_model, find

BUFFER_BYTES = 2**28
"""Bytes per broadcast. Both sides split the stream of weights at this size, which is sent in `init_info`."""
BUFFERS = 2
"""Number of broadcasts that a server's worker may hold in memory."""
_GROUP_ENDED = "its NCCL group has ended: resume the run from its last checkpoint"


class BroadcastGroup(Protocol):
    """A process group of the trainer (rank 0) and all workers of all servers."""

    device: torch.device
    """The device of the sent buffers."""

    def broadcast(self, buffer: UInt8[Tensor, "bytes"]) -> None:
        """Send `buffer` from rank 0 to every worker; return when it may be freed."""

    def close(self) -> None:
        """Leave the group."""


OpenGroup = Callable[[str, int, int], BroadcastGroup]
"""(Master address, master port, world size) -> the group, joined as rank 0. Blocks until all have joined."""


class VllmGroup:
    """The process group that vLLM's workers join, with vLLM's rendezvous and NCCL communicator. Untested on a GPU."""

    def __init__(self, address: str, port: int, world_size: int) -> None:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        rendezvous = {"master_address": address, "master_port": port, "world_size": world_size}
        self._communicator: Any = trainer_init(rendezvous)
        self.device = torch.device("cuda", torch.cuda.current_device())

    def broadcast(self, buffer: UInt8[Tensor, "bytes"]) -> None:
        """See BroadcastGroup."""
        self._communicator.broadcast(buffer, src=0)
        torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """See BroadcastGroup."""
        self._communicator.destroy()


def group_for(answers: Sequence[Mapping[str, Any]]) -> OpenGroup:
    """Return how to open the group that the servers join, from their answers to /get_world_size. vLLM's name none; the
    front of SGLang names a backend of torch.distributed. Raises SyncError if this process cannot join it."""
    kinds = {answer.get("process_group") for answer in answers}
    if len(kinds) > 1:
        raise SyncError("sync.backend: nccl: the servers join different kinds of group; use servers of one engine")
    kind = kinds.pop()
    if reason := why_impossible(kind):
        raise SyncError(f"sync.backend: nccl: {reason}")
    return VllmGroup if kind is None else partial(TorchGroup, backend=kind)


def why_impossible(kind: str | None = None) -> str | None:
    """Return why this process cannot send weights to servers that join groups of this kind (see `group_for`); None if
    it can."""
    if kind != "gloo" and not torch.cuda.is_available():
        return "the trainer has no CUDA device; use sync.backend: file"
    if kind is not None:
        return None
    try:
        import vllm.distributed.weight_transfer.nccl_common  # noqa: F401
    except ImportError as error:
        return f"the trainer needs vLLM's own code to join the servers' group, and cannot import it ({error})"
    return None


class NcclSync:
    """A sync backend for full weights by packed broadcast, through vLLM's `nccl` weight transfer engine. Servers need
    `--weight-transfer-config '{"backend": "nccl"}'` and other devices than the trainer's. Untested on a GPU.

    Weights are gathered from all ranks while they are sent, one buffer at a time, so the trainer's process group and
    the servers' group are never active at the same time. Proof: a server echoes the version, and its checksum of every
    weight equals ours.
    """

    def __init__(
        self,
        servers: list[ServerControl],
        prefix: str = "",
        keep_caches: bool = False,
        open_group: OpenGroup | None = None,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        """Join one group with all workers of all servers. Raises SyncError with the reason if NCCL cannot work.
        `open_group` replaces NCCL by another transport. Versions are called {prefix}{version}. `keep_caches`: see
        update_full_weights."""
        self._servers = servers
        self._prefix = prefix
        self._keep_caches = keep_caches
        self._buffer_bytes = buffer_bytes
        self._model = base_model(servers)
        self._last: SyncReport | None = None
        self._served: Served = {}
        answers = [server.get("/get_world_size") for server in servers]
        workers = [int(answer["world_size"]) for answer in answers]
        open_group = open_group or group_for(answers)
        # SGLang's workers may be elsewhere than its front
        hosts = [answer.get("host") or _host(server) for server, answer in zip(servers, answers, strict=True)]
        address, port = _own_address(hosts), _free_port()
        info = {
            "master_address": address,
            "master_port": port,
            "world_size": 1 + sum(workers),
            "packed": True,
            "packed_buffer_size_bytes": buffer_bytes,
            "packed_num_buffers": BUFFERS,
        }
        # servers respond only when the group is complete, so call them while joining it
        offsets = [1 + sum(workers[:index]) for index in range(len(servers))]
        joined: list[BroadcastGroup] = []
        _together(
            lambda: joined.append(open_group(address, port, 1 + sum(workers))),
            *(
                _post(server, "/init_weight_transfer_engine", {"init_info": {**info, "rank_offset": offset}})
                for server, offset in zip(servers, offsets, strict=True)
            ),
        )
        self._group = joined[0]

    def push(self, version: int, policy: Policy, state: Weights) -> SyncReport:
        """See WeightSync."""
        started = time.perf_counter()
        label = f"{self._prefix}{version}"
        if not self._served:
            self._served = {server.url: served_checksums(server) for server in self._servers}
        content = Content(state.meta, self._served, keep=False)
        info = {
            "names": list(state.meta),
            "dtype_names": [str(value.dtype).removeprefix("torch.") for value in state.meta.values()],
            "shapes": [list(value.shape) for value in state.meta.values()],
        }

        def broadcast() -> None:
            for buffer in packed(content.passing(state.stream()), self._buffer_bytes):
                # an offloaded policy's weights are in host memory
                self._group.broadcast(buffer.to(self._group.device))

        def transfer() -> None:
            # servers respond after they have received everything
            _together(broadcast, *(_post(s, "/update_weights", {"update_info": info}) for s in self._servers))

        try:
            self._check_joined()
            digest = update_full_weights(self._servers, label, content, transfer, self._keep_caches)
        except ServerGoneError as error:
            raise SyncError(f"{error}; {_GROUP_ENDED}") from error
        self._served = content.served
        size = state.nbytes
        salt = label if self._keep_caches else None
        seconds = time.perf_counter() - started
        self._last = SyncReport(version, label, self._model, size, seconds, digest, salt)
        return self._last

    def restore(self, url: str) -> SyncReport:
        """See WeightSync. Raises SyncError: a restarted server has left the group, which cannot be repaired."""
        assert self._last is not None
        self._check_version(find(self._servers, url), self._last.label)
        return self._last

    def close(self) -> None:
        """See WeightSync."""
        self._group.close()

    def _check_joined(self) -> None:
        """Raise SyncError if a server was restarted since the last push: a broadcast would wait for it forever."""
        for server in self._servers:
            if self._last is not None:
                self._check_version(server, self._last.label)

    def _check_version(self, server: ServerControl, label: str) -> None:
        echoed = server.get("/weight_info").get("weight_version")
        if echoed != label:
            raise SyncError(f"{server.url} was restarted and serves version {echoed!r}; {_GROUP_ENDED}")


def packed(weights: Iterable[tuple[str, Tensor]], buffer_bytes: int) -> Iterator[UInt8[Tensor, "bytes"]]:
    """Yield weights as a stream of buffers. A buffer ends with the weight that exceeds `buffer_bytes`; the receiver
    applies the same rule to names, dtypes and shapes alone."""
    parts: list[Tensor] = []
    size = 0
    for _, value in weights:
        parts.append(value.contiguous().view(-1).view(torch.uint8))
        size += parts[-1].numel()
        if size > buffer_bytes:
            yield torch.cat(parts)
            parts, size = [], 0
    if parts:
        yield torch.cat(parts)


def _post(server: ServerControl, path: str, body: dict[str, Any]) -> Callable[[], None]:
    def post() -> None:
        server.post(path, body)

    return post


def _together(*calls: Callable[[], None]) -> None:
    """Run calls that wait for each other, and raise the first error immediately.

    Calls that still wait then wait for a peer that will never come. Their threads are abandoned, and must not keep the
    process from ending.
    """
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            ended.put(error)
        else:
            ended.put(None)

    for call in calls:
        threading.Thread(target=run, args=(call,), daemon=True).start()
    for _ in calls:
        error = ended.get()
        if error is not None:
            raise error


def _host(server: ServerControl) -> str:
    return urlsplit(server.url).hostname or ""


def _own_address(hosts: Iterable[str]) -> str:
    """Return this machine's address from the servers' point of view, without sending a packet."""
    found = set()
    for host in hosts:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 80))
            found.add(probe.getsockname()[0])
    if len(found) > 1:
        raise SyncError(f"sync.backend: nccl: the servers reach this machine by different addresses: {sorted(found)}")
    return found.pop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
