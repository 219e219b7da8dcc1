"""Checks of a recipe whose server is SGLang: fields that have no counterpart there, and its own options."""

import os
from pathlib import Path

from agentfactory.base.errors import SettingError
from agentfactory.base.http.addresses import is_http_address
from agentfactory.recipe.composition import display
from agentfactory.recipe.schema import Recipe
from agentfactory.recipe.train_checks import has_vision_tower
from agentfactory.rollout.config import Inflight
from agentfactory.rollout.inference.server_command import missing_from, refused_flag

_VLLM = "or set server.engine=vllm"


def check_sglang(recipe: Recipe) -> None:
    """Raise SettingError for the first field that SGLang cannot serve, wherever it runs."""
    if recipe.model.lora is not None:
        problem = "an adapter is trained, and server.engine=sglang serves full weights only"
        raise SettingError("model.lora", problem, f"set model.lora=null, {_VLLM}")
    server, mode = recipe.server, recipe.placement.mode
    if server.quantization is not None:
        problem = f"got {server.quantization!r}, and server.engine=sglang serves unquantised weights only"
        raise SettingError("server.quantization", problem, f"remove it, {_VLLM}")
    if recipe.rollout.inflight == Inflight.KEEP:
        problem = "got 'keep', but SGLang recomputes the caches of turns that an update interrupts"
        raise SettingError("rollout.inflight", problem, f"remove it, {_VLLM}")
    if mode in ("split", "time_share"):
        problem = f"got {mode!r}, and SGLang does not share a GPU with the trainer here"
        raise SettingError("placement.mode", problem, f"use separate, {_VLLM}")
    if has_vision_tower(recipe.model.path):
        problem = f"got 'sglang', and {recipe.model.path} accepts images, which are not supported with it"
        raise SettingError("server.engine", problem, "use vllm, or a text-only model")
    _check_options(recipe)


def check_sglang_is_installed(recipe: Recipe) -> tuple[str, str, str] | None:
    """Return field, problem and fix if SGLang would be started here and is not installed, else None. Raises
    SettingError for a program that is not there."""
    options = recipe.server.sglang
    if options.attach is not None:
        return None
    python = options.python
    if python is not None and not (os.path.isfile(python) and os.access(python, os.X_OK)):
        problem = f"{display(Path(python))}: no such program"
        raise SettingError("server.options.python", problem, "name the Python of an environment with SGLang")
    if missing_from(python, "sglang") is None:
        return None
    fix = "pip install sglang==0.5.23 in an environment of its own, and name its Python by server.options.python, or a "
    fix += "running server by server.options.attach"
    if python is None:
        return "server.engine", "got 'sglang', which is not installed", fix
    return "server.options.python", f"{display(Path(python))} has no SGLang", fix


def _check_options(recipe: Recipe) -> None:
    server, options = recipe.server, recipe.server.sglang
    if (refused := refused_flag(options.args)) is not None:
        flag, fix = refused
        problem = f"got {flag}, which AgentFactory sets itself, or cannot work with"
        raise SettingError("server.options.args", problem, fix)
    if options.attach is None:
        if options.attach_key_env is not None:
            problem = f"got {options.attach_key_env!r} without server.options.attach"
            raise SettingError("server.options.attach_key_env", problem, "name the server by attach, or remove it")
        return
    if not is_http_address(options.attach):
        problem = f"got {options.attach!r}"
        raise SettingError("server.options.attach", problem, "write an address such as http://127.0.0.1:30000")
    if server.url is not None:
        problem = "got an address, and server.url names a running server, too"
        raise SettingError("server.options.attach", problem, "set server.url=null: AgentFactory starts what attaches")
    if options.attach_key_env is not None and not os.environ.get(options.attach_key_env):
        problem = f"the variable {options.attach_key_env!r} is not set"
        raise SettingError("server.options.attach_key_env", problem, "export it, or set null")
    for name in ("python", "tensor_parallel_size", "mem_fraction_static", "args"):
        if name in options.model_fields_set:
            problem = "is set with server.options.attach, whose server already runs"
            raise SettingError(f"server.options.{name}", problem, "remove it, or set attach=null")
