"""Updates of a server's full weights with any transport: pause, transfer, resume, prove."""

import time
from collections.abc import Callable, Iterable, Iterator
from string import digits
from typing import Any

from torch import Tensor

from agentfactory.trainers.networks.vision_tower import is_of_tower
from agentfactory.trainers.sync.content_proof import Content, Served
from agentfactory.trainers.sync.server_control import ServerControl, ServerGoneError, SyncError
from agentfactory.trainers.sync.weight_sync import INITIAL_LABEL, ForeignWeightsError, SyncReport, base_model

FORGET_FEATURES = "/reset_encoder_cache"


def update_full_weights(
    servers: list[ServerControl], label: str, content: Content, transfer: Callable[[], None], keep_caches: bool = False
) -> str:
    """Pause all servers, load the content into them by `transfer`, resume them, and prove the content on each. Return
    the digest of the proven content (see Content.check).

    Running requests keep their tokens and continue with the new weights, with recomputed caches. With `keep_caches` all
    caches stay, and requests must avoid those of older weights by their salt. If the proof fails, the server is paused
    again and SyncError raised: the version is not published, and none of its samples are trained on. A server whose
    cache is asleep resumes when the cache wakes, so it is neither paused nor resumed here."""
    for server in servers:
        server.pause()
        server.post("/start_weight_update")
    transfer()
    for server in servers:
        server.post("/finish_weight_update", {"weight_version": label})
        # the server answers 200 even if it did nothing; caches of the old weights would then stay in use
        dropped = keep_caches or server.post("/reset_prefix_cache?reset_running_requests=true").get("success") is True
        if not dropped:
            raise SyncError(f"{server.url}/reset_prefix_cache did not drop the caches of the old weights")
        if any(is_of_tower(name) for name in content.state):
            # even with keep_caches, since known images would otherwise keep the features of the old weights
            server.require([FORGET_FEATURES])
            server.post(FORGET_FEATURES)
    for server in servers:
        server.resume()
    digest = ""
    for server in servers:
        try:
            digest = content.prove(server, label)
        except SyncError as error:
            if not isinstance(error, ServerGoneError):
                server.pause()
            raise
    return digest


def holds_full_weights(server: ServerControl, label: str, content: Content) -> bool:
    """Return whether a server proves that it has this version. False if paused, because a failure has left it so.
    Raises ForeignWeightsError if it has another process's version, which a restart cannot explain."""
    found = str(server.get("/weight_info").get("weight_version"))
    if found != INITIAL_LABEL and found.rstrip(digits) != label.rstrip(digits):
        raise ForeignWeightsError(server, f"serves version {found!r}, but {label!r} was pushed")
    if server.get("/is_paused").get("is_paused") is True:
        return False
    try:
        content.prove(server, label)
    except SyncError as error:
        if isinstance(error, ServerGoneError):
            raise
        return False
    return True


def described(weights: Iterable[tuple[str, Tensor]]) -> dict[str, list[Any]]:
    names, values = zip(*weights, strict=True)
    dtypes = [str(value.dtype).removeprefix("torch.") for value in values]
    return {"names": [*names], "dtype_names": dtypes, "shapes": [list(value.shape) for value in values]}


def parts_beyond(weights: Iterable[tuple[str, Tensor]], most: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield weights in parts, each of which ends with the weight that exceeds `most` bytes."""
    part: list[tuple[str, Tensor]] = []
    size = 0
    for name, value in weights:
        part.append((name, value))
        size += value.nbytes
        if size > most:
            yield part
            part, size = [], 0
    if part:
        yield part


class FullSync:
    """The common part of the backends for full weights: version names, updates with their proof, and reports."""

    def __init__(self, servers: list[ServerControl], prefix: str, keep_caches: bool) -> None:
        """Versions are called {prefix}{version}. `keep_caches`: see update_full_weights."""
        self._servers = servers
        self._prefix = prefix
        self._keep_caches = keep_caches
        self._model = base_model(servers)
        self._served: Served = {}
        """The servers' checksums of the last version, whose layouts the next one probably has, too."""
        self._digest = ""

    def _label(self, version: int) -> str:
        return f"{self._prefix}{version}"

    def _load(self, servers: list[ServerControl], version: int, content: Content, transfer: Callable[[], None]) -> None:
        self._digest = update_full_weights(servers, self._label(version), content, transfer, self._keep_caches)

    def _report(self, version: int, size: int, started: float) -> SyncReport:
        label = self._label(version)
        salt = label if self._keep_caches else None
        return SyncReport(version, label, self._model, size, time.perf_counter() - started, self._digest, salt)
