"""The table of sync backends, with their requirements on recipe, devices and servers, and `make_sync`, which alone
needs torch. A backend is a class of this folder, or the user's own `FILE.py:NAME`; see WeightSync."""

import pkgutil
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from agentfactory.base.errors import SettingError
from agentfactory.base.user_code.extension import Extension, load_extension
from agentfactory.rollout.config import Inflight
from agentfactory.trainers.config import TrainRecipe

if TYPE_CHECKING:
    # these modules need torch
    from agentfactory.trainers.sync.server_control import ServerControl
    from agentfactory.trainers.sync.weight_sync import WeightSync

ADAPTER_ROUTES = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
FULL_ROUTES = (
    *("/init_weight_transfer_engine", "/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"),
    *("/weight_info", "/weight_checker", "/reset_prefix_cache", "/resume", "/is_paused"),
)
_BROADCAST_ROUTES = (*FULL_ROUTES, "/get_world_size")


@dataclass(frozen=True)
class Backend:
    """The properties of a sync backend. A user's own class declares them as class attributes of the same names."""

    name: str
    adapters: bool = False
    """True if it sends adapters instead of all weights."""
    routes: tuple[str, ...] = FULL_ROUTES
    transfer: str | None = "file"
    """Backend in vLLM's --weight-transfer-config; None omits the flag."""
    engines: tuple[str, ...] = ("vllm", "embedded", "sglang")
    """Values of `server.engine` that it supports."""
    devices: Literal["any", "one", "apart"] = "any"
    """one: trainer and vLLM use the same GPU; apart: different GPUs."""


_OURS = (
    Backend("file"),
    Backend("lora", adapters=True, routes=ADAPTER_ROUTES, transfer=None, engines=("vllm", "embedded")),
    Backend("nccl", routes=_BROADCAST_ROUTES, transfer="nccl", engines=("vllm", "sglang"), devices="apart"),
    Backend("ipc", transfer="ipc", engines=("vllm", "embedded"), devices="one"),
)
BACKENDS = {backend.name: backend for backend in _OURS}
_CLASSES = {
    "file": "agentfactory.trainers.sync.file_sync:FileSync",
    "lora": "agentfactory.trainers.sync.adapter_sync:LoraSync",
    "nccl": "agentfactory.trainers.sync.nccl_sync:NcclSync",
    "ipc": "agentfactory.trainers.sync.ipc_sync:IpcSync",
}

INPUTS = ("servers", "folder", "prefix", "keep", "keep_caches")
"""Arguments, by name, that a backend's class can accept: the servers (ServerControl), a folder for transferred files,
the prefix of version names, the number of adapter versions in use at a time, and whether the servers' caches outlive an
update (rollout.inflight: keep)."""


def backend_of(recipe: TrainRecipe) -> Backend:
    """Return the recipe's backend; for `auto`, that without information on devices. Raises SettingError."""
    name = _resolved(recipe)
    if name in BACKENDS:
        return BACKENDS[name]
    own = _load(recipe).function
    fields = [field for field in Backend.__dataclass_fields__ if field != "name"]
    return Backend(name, **{field: getattr(own, field) for field in fields if hasattr(own, field)})


def check_backend(recipe: TrainRecipe) -> None:
    """Raise SettingError if the recipe's backend cannot transfer the trained weights to its servers."""
    backend, lora, engine = backend_of(recipe), recipe.model.lora, recipe.server.engine
    if backend.adapters and lora is None:
        problem, fix = f"got {backend.name!r}, but every weight is trained", "set model.lora.rank, or use file"
    elif not backend.adapters and lora is not None:
        problem, fix = f"got {backend.name!r}, but an adapter is trained", "use lora or auto, or set model.lora=null"
    elif engine not in backend.engines:
        problem, fix = f"got {backend.name!r}, which server.engine={engine} does not support", "use file or auto"
    else:
        return
    raise SettingError("sync.backend", problem, fix)


def make_sync(recipe: TrainRecipe, servers: "list[ServerControl]", folder: Path, run: str) -> "WeightSync":
    """Create the recipe's backend for `servers`, with `folder` for transferred files. Version names contain `run` and a
    random part, so versions of another process or attempt cannot be mistaken for its own.

    Raises SyncError if the backend cannot work, and SettingError if a user's own class lacks a method of WeightSync."""
    made = _load(recipe)(
        servers=servers,
        folder=folder,
        prefix=f"{run}-{secrets.token_hex(4)}-v",
        keep=recipe.rollout.max_staleness + 2,
        keep_caches=recipe.rollout.inflight == Inflight.KEEP,
    )
    if lacks := [name for name in ("push", "restore", "close") if not callable(getattr(made, name, None))]:
        problem = f"{recipe.sync.backend} lacks {', '.join(lacks)}"
        raise SettingError("sync.backend", problem, "define push(version, policy, state), restore(url) and close()")
    return made


def _resolved(recipe: TrainRecipe) -> str:
    asked = recipe.sync.backend
    return asked if asked != "auto" else "lora" if recipe.model.lora else "file"


def _load(recipe: TrainRecipe) -> Extension:
    name, ours = _resolved(recipe), {}
    if name in BACKENDS:
        # imported only now, because it needs torch
        ours[name] = pkgutil.resolve_name(_CLASSES[name])
    return load_extension("sync.backend", name, ours, INPUTS, recipe.sync)
