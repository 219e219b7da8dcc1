"""The sync backends: what each requires of the recipe, the devices and the servers, and `make_sync`. Only `make_sync`
needs torch.

The backends themselves are classes, one per file in this folder, or the user's own `FILE.py:NAME`: see WeightSync in
protocol.py. Nothing else in AgentFactory depends on a backend's name.
"""

import importlib
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from agentfactory.rollout.config import Inflight
from agentfactory.tools.errors import SettingError
from agentfactory.tools.user_code.extension import Extension, load_extension
from agentfactory.trainers.config import TrainRecipe

if TYPE_CHECKING:
    # protocol.py needs torch
    from agentfactory.trainers.sync.server_control import ServerControl
    from agentfactory.trainers.sync.weight_sync import WeightSync

ADAPTER_ROUTES = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
FULL_ROUTES = (
    *("/init_weight_transfer_engine", "/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"),
    *("/weight_info", "/weight_checker", "/reset_prefix_cache", "/resume", "/is_paused"),
)


@dataclass(frozen=True)
class Backend:
    """The properties of a sync backend. A user's own class declares them as class attributes of the same names, where
    they differ from the defaults."""

    name: str
    """Its name in `sync.backend`."""
    adapters: bool = False
    """Whether it sends adapters instead of all weights."""
    routes: tuple[str, ...] = FULL_ROUTES
    """The server routes that it calls."""
    transfer: str | None = "file"
    """Backend of vLLM's --weight-transfer-config; None: the flag is left out."""
    engines: tuple[str, ...] = ("vllm", "embedded")
    """Values of `server.engine` that it supports."""
    devices: Literal["any", "one", "apart"] = "any"
    """one: trainer and vLLM compute on one GPU; apart: on different ones."""


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("file"),
        Backend("lora", adapters=True, routes=ADAPTER_ROUTES, transfer=None),
        Backend("nccl", routes=(*FULL_ROUTES, "/get_world_size"), transfer="nccl", engines=("vllm",), devices="apart"),
        Backend("ipc", transfer="ipc", devices="one"),
    )
}
_CLASSES = {
    "file": "agentfactory.trainers.sync.file_sync:FileSync",
    "lora": "agentfactory.trainers.sync.adapter_sync:LoraSync",
    "nccl": "agentfactory.trainers.sync.nccl_sync:NcclSync",
    "ipc": "agentfactory.trainers.sync.ipc_sync:IpcSync",
}

INPUTS = ("servers", "folder", "prefix", "keep", "keep_caches")
"""Arguments, by name, that a backend's class can take: the servers (ServerControl); a folder for files that it
transfers; the beginning of its versions' names; how many adapter versions turns may use at a time; whether the servers'
caches outlive an update (rollout.inflight: keep)."""


def backend_of(recipe: TrainRecipe) -> Backend:
    """Returns the recipe's backend; for `auto`, the choice that is made without information on devices. Raises
    SettingError if a user's own class cannot be loaded."""
    name = _resolved(recipe)
    if name in BACKENDS:
        return BACKENDS[name]
    own = _load(recipe).function
    fields = [field for field in Backend.__dataclass_fields__ if field != "name"]
    return Backend(name, **{field: getattr(own, field) for field in fields if hasattr(own, field)})


def check_backend(recipe: TrainRecipe) -> None:
    """Raises SettingError if the recipe's backend cannot transfer the trained weights to its servers."""
    backend, lora, engine = backend_of(recipe), recipe.model.lora, recipe.server.engine
    if backend.adapters and lora is None:
        problem, fix = f"got {backend.name!r}, but every weight is trained", "set model.lora.rank, or use file"
    elif not backend.adapters and lora is not None:
        problem, fix = f"got {backend.name!r}, but an adapter is trained", "use lora or auto, or set model.lora=null"
    elif engine not in backend.engines:
        problem, fix = f"got {backend.name!r}, which server.engine={engine} does not have", "use file or auto"
    else:
        return
    raise SettingError("sync.backend", problem, fix)


def make_sync(recipe: TrainRecipe, servers: "list[ServerControl]", folder: Path, run: str) -> "WeightSync":
    """Creates the recipe's backend for `servers`. `folder` is for files that it transfers. Its versions are named after
    `run` and at random, so that those of another process, or of an earlier attempt, are never taken for this one's.

    Raises SyncError if it cannot work, and SettingError if a user's own class lacks a method of WeightSync.
    """
    made = _load(recipe)(
        servers=servers,
        folder=folder,
        prefix=f"{run}-{secrets.token_hex(4)}-v",
        keep=recipe.rollout.max_staleness + 2,
        keep_caches=recipe.rollout.inflight == Inflight.KEEP,
    )
    if lacks := [name for name in ("push", "restore", "close") if not callable(getattr(made, name, None))]:
        problem = f"{recipe.sync.backend} has no {', '.join(lacks)}"
        raise SettingError("sync.backend", problem, "see WeightSync in agentfactory/trainers/sync/weight_sync.py")
    return made


def _resolved(recipe: TrainRecipe) -> str:
    asked = recipe.sync.backend
    return asked if asked != "auto" else "lora" if recipe.model.lora else "file"


def _load(recipe: TrainRecipe) -> Extension:
    name = _resolved(recipe)
    if name not in BACKENDS:
        return load_extension("sync.backend", name, {}, INPUTS, recipe.sync)
    # import it only now: it needs torch
    module, _, attribute = _CLASSES[name].partition(":")
    ours = {name: getattr(importlib.import_module(module), attribute)}
    return load_extension("sync.backend", name, ours, INPUTS, recipe.sync)
