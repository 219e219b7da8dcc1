"""One GPU, used by trainer and server in turns (`placement.mode: time_share`)."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from agentfactory.trainers.loop.stopping import Stop
from agentfactory.trainers.networks.gathered_weights import Weights
from agentfactory.trainers.networks.policy import Policy
from agentfactory.trainers.sync.proven_push import retry_until_answered
from agentfactory.trainers.sync.server_control import ServerControl, SyncError
from agentfactory.trainers.sync.weight_sync import SyncReport, WeightSync
from agentfactory.trainers.update.learner import Learner
from agentfactory.trainers.update.offload import Offload


class Turns:
    """The training loop's interface: all computation with the policy's weights runs within `training`. In this class,
    trainer and server have separate devices, or separate shares of one, so the methods do nothing."""

    @contextmanager
    def training(self) -> Iterator[None]:
        """Hold the device for the trainer's turn."""
        yield

    server_sleeps = False
    """True if the server sleeps during the trainer's turn."""

    def share(self, learner: Learner) -> None:
        """Register `learner`, which was created in the current turn and leaves the device at its end."""

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds spent on changing turns since the last call, by metric name."""
        return {}


class TimeShare(Turns):
    """The server sleeps while the trainer has the device, and the trainer is offloaded while the server has it:
    `training` sends the server to sleep, and offloads the learner at its end; `waking` wakes the server around the
    update of its weights. A turn that fails offloads nothing. A stopped run leaves its server asleep."""

    server_sleeps = True

    def __init__(
        self,
        server: ServerControl,
        device: torch.device,
        retry_seconds: float,
        stop: Stop | None = None,
        moves: bool | None = None,
    ) -> None:
        """While the server does not answer, wait for `retry_seconds` or until `stop` receives a signal. `moves`:
        whether the learner is copied to and from the trainer's `device` (default: unless it is the CPU)."""
        self._server = server
        self._device = device
        self._retry_seconds = retry_seconds
        self._stop = stop or Stop()
        self._moves = device.type != "cpu" if moves is None else moves
        self._offload: Offload | None = None
        self._seconds: dict[str, float] = {}

    @contextmanager
    def training(self) -> Iterator[None]:
        """Raise SyncError if the server does not sleep, ServerGoneError if it does not come back."""
        with self._timed("seconds/sleep"):
            retry_until_answered(
                self._send_to_sleep, "the trainer's turn", self._retry_seconds, lambda: bool(self._stop.heard)
            )
        with self._timed("seconds/bring_in"):
            if self._offload is not None:
                self._offload.to_device()
        yield
        with self._timed("seconds/park"):
            if self._offload is not None:
                self._offload.to_host()

    def share(self, learner: Learner) -> None:
        self._offload = Offload(learner) if self._moves else None

    def waking(self, sync: WeightSync) -> WeightSync:
        return _WakingSync(sync, self._server, self._timed)

    def take_seconds(self) -> dict[str, float]:
        taken, self._seconds = self._seconds, {}
        return taken

    def _send_to_sleep(self) -> None:
        before = free_memory(self._device)
        # a server that an earlier attempt left asleep frees nothing more
        first = before is not None and self._offload is None and not self._server.is_sleeping()
        self._server.sleep()
        freed = (free_memory(self._device) or 0) - (before or 0)
        if first and freed < 2**20:
            memory = f"{max(freed, 0)} bytes of {self._device}"
            problem = f"{self._server.url} reports that it sleeps but freed only {memory}"
            fix = "start it on the trainer's GPU (vLLM with --enable-sleep-mode), or use placement.mode=separate"
            raise SyncError(f"placement.mode: time_share: {problem}: {fix}")

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started


@dataclass
class _WakingSync:
    """A WeightSync to a sleeping server: it wakes the weights before their update, the KV cache afterwards."""

    _sync: WeightSync
    _server: ServerControl
    _timed: Callable[[str], AbstractContextManager[None]]

    def push(self, version: int, policy: Policy, state: Weights) -> SyncReport:
        """Push to the awake weights. Also raises SyncError if the server does not wake up."""
        if not self._server.asleep:
            # a second push of the same version, because the canary did not reach the server
            return self._sync.push(version, policy, state)
        with self._timed("seconds/wake"):
            self._server.wake_up("weights")
        report = self._sync.push(version, policy, state)
        with self._timed("seconds/wake"):
            self._server.wake_up("kv_cache")
        return report

    def restore(self, url: str) -> SyncReport:
        return self._sync.restore(url)

    def close(self) -> None:
        self._sync.close()


def free_memory(device: torch.device) -> int | None:
    """Return the bytes of a GPU that no process uses; None for other devices."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
