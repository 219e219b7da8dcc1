"""Sync by NCCL broadcast: full weights from the trainer's GPU to servers on other GPUs.

Untested over NCCL: tests run the protocol over gloo, against a receiver that splits the stream like vLLM 0.32 and 0.33
(vllm/distributed/weight_transfer/nccl_engine.py)."""

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from jaxtyping import UInt8
from torch import Tensor

from agentfactory.trainers.networks.gathered_weights import Weights
from agentfactory.trainers.networks.handover import queued, wait_for
from agentfactory.trainers.networks.policy import Policy
from agentfactory.trainers.sync.content_proof import Content, served_checksums
from agentfactory.trainers.sync.full_sync import FullSync, described, parts_beyond
from agentfactory.trainers.sync.server_control import ServerControl, ServerGoneError, SyncError
from agentfactory.trainers.sync.weight_sync import SyncReport, find

BUFFER_BYTES = 2**28
"""Bytes per broadcast. Both sides split the stream of weights at this size, which is sent in `init_info`."""
BUFFERS = 2
"""Number of broadcasts that a server's worker may hold in memory."""
_TIMEOUT = timedelta(minutes=30)
"""torch's own for gloo, which SGLang's workers keep, too."""
_GROUP_ENDED = "its NCCL group has ended: resume the run from its last checkpoint"


class VllmGroup:
    """The process group of the trainer (rank 0) and all of vLLM's workers, by vLLM's code. Untested on a GPU."""

    def __init__(self, address: str, port: int, world_size: int) -> None:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        rendezvous = {"master_address": address, "master_port": port, "world_size": world_size}
        self._communicator: Any = trainer_init(rendezvous)
        self.device = torch.device("cuda", torch.cuda.current_device())
        """The device of the sent buffers."""

    def broadcast(self, buffer: UInt8[Tensor, "bytes"]) -> None:
        """Send `buffer` to every worker; return when it may be freed."""
        # vLLM's own default is a stream of its own for each thread, which nothing orders after the buffer's
        self._communicator.broadcast(buffer, src=0, stream=torch.cuda.current_stream())
        torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        self._communicator.destroy()


class TorchGroup:
    """The process group of torch.distributed that servers other than vLLM join, by `backend` nccl (untested) or gloo.
    SGLang's workers join by a copy of torch's `init_process_group`; both ends need the same prefixes of the store's
    keys, so this one calls the same function of torch."""

    def __init__(self, address: str, port: int, world_size: int, backend: str) -> None:
        from torch.distributed.distributed_c10d import _new_process_group_helper, _world

        # by default, the store would listen on all interfaces, without a key
        listener = socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        descriptor = listener.detach()
        store = dist.TCPStore(address, port, world_size, True, timeout=_TIMEOUT, master_listen_fd=descriptor)
        name = f"agentfactory-{port}"  # as in rollout/inference/sglang/translation.py
        helper: Any = _new_process_group_helper
        prefixed = dist.PrefixStore(name, store)
        kind = dist.Backend(backend)
        self._group, _ = helper(world_size, 0, [], kind, prefixed, group_name=name, timeout=_TIMEOUT)
        _world.pg_group_ranks[self._group] = {rank: rank for rank in range(world_size)}
        on_gpu = backend == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def broadcast(self, buffer: UInt8[Tensor, "bytes"]) -> None:
        dist.broadcast(buffer, src=0, group=self._group)
        if buffer.is_cuda:
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        dist.destroy_process_group(self._group)


OpenGroup = Callable[[str, int, int], VllmGroup | TorchGroup]
"""(Master address, master port, world size) -> the group, joined as rank 0. Blocks until all have joined."""


def group_for(answers: Sequence[Mapping[str, Any]]) -> OpenGroup:
    """Return how to open the group that the servers join, from their answers to /get_world_size. vLLM's name none; the
    front of SGLang names a backend of torch.distributed. Raises SyncError if this process cannot join it."""
    kinds = {answer.get("process_group") for answer in answers}
    if len(kinds) > 1:
        raise SyncError("sync.backend: nccl: the servers join different kinds of group; use servers of one engine")
    kind = kinds.pop()
    if reason := why_impossible(kind) or next(filter(None, map(_unequal, answers)), None):
        raise SyncError(f"sync.backend: nccl: {reason}")
    return VllmGroup if kind is None else partial(TorchGroup, backend=kind)


def _unequal(answer: Mapping[str, Any]) -> str | None:
    """Return why NCCL would refuse, or never form, a group with these workers; None if nothing is known to differ."""
    if answer.get("process_group") != "nccl":
        return None
    ours, theirs = ".".join(map(str, torch.cuda.nccl.version())), answer.get("nccl")
    if ours != theirs:
        told = f"has NCCL {theirs}" if theirs else "was not started here, so that its version of NCCL is unknown"
        return f"the trainer has NCCL {ours}, and SGLang {told}: NCCL joins equal versions only; use sync.backend: file"
    for name, value in answer.get("variables", {}).items():
        if (found := os.environ.get(name)) != value:
            return f"SGLang sets {name}={value}, and the trainer has {found}; export {name}={value}, or use file"
    return None


def why_impossible(kind: str | None = None) -> str | None:
    """Return why this process cannot join groups of this kind (see `group_for`) to send weights; None if it can."""
    if kind != "gloo" and not torch.cuda.is_available():
        return "the trainer has no CUDA device; use sync.backend: file"
    if kind is not None:
        return None
    try:
        import vllm.distributed.weight_transfer.nccl_common  # noqa: F401
    except ImportError as error:
        return f"the trainer needs vLLM's own code to join the servers' group, and cannot import it ({error})"
    return None


class NcclSync(FullSync):
    """A sync backend for full weights by packed broadcast, through vLLM's `nccl` weight transfer engine. Servers need
    `--weight-transfer-config '{"backend": "nccl"}'` and other devices than the trainer's. Untested on a GPU.

    Weights are gathered from all ranks while they are sent, so the trainer's process group and the servers' are never
    active at the same time. Proof: a server echoes the version, and its checksum of every weight equals ours."""

    def __init__(
        self,
        servers: list[ServerControl],
        prefix: str = "",
        keep_caches: bool = False,
        open_group: OpenGroup | None = None,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        """Join one group with all workers of all servers. Raises SyncError if that cannot work."""
        super().__init__(servers, prefix, keep_caches)
        self._buffer_bytes = buffer_bytes
        self._last: SyncReport | None = None
        # one thread for all pushes, because NCCL and vLLM keep streams for each
        self._sender: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=_run_all, args=(self._sender,), name="sender", daemon=True).start()
        answers = [server.get("/get_world_size") for server in servers]
        workers = [int(answer["world_size"]) for answer in answers]
        open_group = open_group or group_for(answers)
        # SGLang's workers may be elsewhere than its front
        pairs = zip(servers, answers, strict=True)
        hosts = [answer.get("host") or urlsplit(server.url).hostname or "" for server, answer in pairs]
        address = _own_address(hosts)
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
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
        joined: list[VllmGroup | TorchGroup] = []
        bodies = [{"init_info": {**info, "rank_offset": offset}} for offset in offsets]
        posts = [partial(s.post, "/init_weight_transfer_engine", b) for s, b in zip(servers, bodies, strict=True)]
        self._together(lambda: joined.append(open_group(address, port, 1 + sum(workers))), *posts)
        self._group = joined[0]

    def push(self, version: int, policy: Policy, state: Weights) -> SyncReport:
        started = time.perf_counter()
        if not self._served:
            self._served = {server.url: served_checksums(server) for server in self._servers}
        content = Content(state.meta, self._served, keep=False)
        info = described(state.meta.items())

        made = queued()

        def broadcast() -> None:
            wait_for(made)
            for buffer in packed(content.passing(state.stream()), self._buffer_bytes):
                # an offloaded policy's weights are in host memory
                self._group.broadcast(buffer.to(self._group.device))

        def transfer() -> None:
            # servers respond after they have received everything
            body = {"update_info": info}
            self._together(broadcast, *(partial(server.post, "/update_weights", body) for server in self._servers))

        try:
            for server in self._servers:
                # a broadcast would wait forever for a server that was restarted since
                self._check_version(server)
            self._load(self._servers, version, content, transfer)
        except ServerGoneError as error:
            raise SyncError(f"{error}; {_GROUP_ENDED}") from error
        self._served = content.served
        self._last = self._report(version, state.nbytes, started)
        return self._last

    def restore(self, url: str) -> SyncReport:
        """Raise SyncError if the server was restarted: it has left the group, which cannot be repaired."""
        assert self._last is not None
        self._check_version(find(self._servers, url))
        return self._last

    def close(self) -> None:
        self._group.close()

    def _together(self, send: Callable[[], object], *requests: Callable[[], object]) -> None:
        """Run calls that wait for each other, `send` in the sender's thread, and raise the first error immediately.
        Calls that still wait then wait forever: their threads are abandoned."""
        ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def run(call: Callable[[], object]) -> None:
            failure: BaseException | None = None
            try:
                call()
            except BaseException as error:
                failure = error
            ended.put(failure)

        self._sender.put(partial(run, send))
        for call in requests:
            threading.Thread(target=run, args=(call,), daemon=True).start()
        for _ in (send, *requests):
            if (error := ended.get()) is not None:
                raise error

    def _check_version(self, server: ServerControl) -> None:
        if self._last is None:
            return
        echoed = server.get("/weight_info").get("weight_version")
        if echoed != self._last.label:
            raise SyncError(f"{server.url} was restarted and serves version {echoed!r}; {_GROUP_ENDED}")


def packed(weights: Iterable[tuple[str, Tensor]], buffer_bytes: int) -> Iterator[UInt8[Tensor, "bytes"]]:
    """Yield weights as a stream of buffers, each of which ends with the weight that exceeds `buffer_bytes`."""
    for part in parts_beyond(weights, buffer_bytes):
        yield torch.cat([value.contiguous().view(-1).view(torch.uint8) for _, value in part])


def _run_all(calls: "queue.SimpleQueue[Callable[[], None]]") -> None:
    while True:
        calls.get()()


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
