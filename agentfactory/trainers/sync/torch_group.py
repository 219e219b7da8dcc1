"""A process group of torch.distributed that servers other than vLLM join, such as SGLang."""

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import UInt8
from torch import Tensor

from agentfactory.rollout.inference.sglang.translation import group_name

_TIMEOUT = timedelta(minutes=30)
"""torch's own for gloo, which SGLang's workers keep, too."""


class TorchGroup:
    """The trainer's end of the group, rank 0: see BroadcastGroup. NCCL is untested: it needs GPUs.

    SGLang's workers join by `init_custom_process_group`, which is torch's `init_process_group` without its global
    state. Both ends need the same prefixes of the store's keys, so this one calls the same function of torch.
    """

    def __init__(self, address: str, port: int, world_size: int, backend: str) -> None:
        """`backend` is nccl or gloo."""
        from torch.distributed.distributed_c10d import _new_process_group_helper, _world

        # by default, the store would listen on all interfaces, without a key
        listener = socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        descriptor = listener.detach()
        store = dist.TCPStore(address, port, world_size, True, timeout=_TIMEOUT, master_listen_fd=descriptor)
        name = group_name(port)
        helper: Any = _new_process_group_helper
        prefixed = dist.PrefixStore(name, store)
        kind = dist.Backend(backend)
        self._group, _ = helper(world_size, 0, [], kind, prefixed, group_name=name, timeout=_TIMEOUT)
        _world.pg_group_ranks[self._group] = {rank: rank for rank in range(world_size)}
        on_gpu = backend == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def broadcast(self, buffer: UInt8[Tensor, "bytes"]) -> None:
        """See BroadcastGroup."""
        dist.broadcast(buffer, src=0, group=self._group)
        if buffer.is_cuda:
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """See BroadcastGroup."""
        dist.destroy_process_group(self._group)
