"""Weight sync: bringing each version of the policy into the inference servers, with proof that it arrived."""

from pathlib import Path

from agentfactory.rollout.config import Inflight
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.server_control import ServerControl
from agentfactory.trainers.sync.file import FileSync
from agentfactory.trainers.sync.ipc import IpcSync
from agentfactory.trainers.sync.lora import LoraSync
from agentfactory.trainers.sync.nccl import NcclSync
from agentfactory.trainers.sync.protocol import SyncReport, WeightSync

__all__ = ["FileSync", "IpcSync", "LoraSync", "NcclSync", "SyncReport", "WeightSync", "control_routes", "make_sync"]


_FULL_ROUTES = (
    *("/init_weight_transfer_engine", "/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"),
    *("/weight_info", "/weight_checker", "/reset_prefix_cache", "/resume", "/is_paused"),
)
_ADAPTER_ROUTES = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


def control_routes(recipe: TrainRecipe) -> tuple[str, ...]:
    """The routes that the recipe's backend needs of a server."""
    backend = recipe.sync.backend
    if backend == "lora" or (backend == "auto" and recipe.model.lora):
        return _ADAPTER_ROUTES
    return (*_FULL_ROUTES, "/get_world_size") if backend == "nccl" else _FULL_ROUTES


def make_sync(recipe: TrainRecipe, servers: list[ServerControl], folder: Path, run: str, attempt: int) -> WeightSync:
    """The recipe's backend. `folder` is for files that travel; `run` and `attempt` name adapters, so that those of an
    earlier attempt on the same server are never taken for this one's. Raises SyncError where it cannot work."""
    backend = recipe.sync.backend
    keep_caches = recipe.rollout.inflight == Inflight.KEEP
    if backend == "lora" or (backend == "auto" and recipe.model.lora):
        return LoraSync(servers, folder, run, attempt, recipe.rollout.max_staleness + 2)
    if backend == "nccl":
        return NcclSync(servers, keep_caches)
    if backend == "ipc":
        return IpcSync(servers, keep_caches)
    return FileSync(servers, folder, keep_caches)
