"""python vllm_stubs.py FOLDER [FLAG ...]: start the vLLM of a GPU wheel, unpacked in FOLDER, by our own launcher, until
it would start its engine, with stubs in place of its compiled modules and of a GPU.

It needs an environment with vLLM for a CPU, for the packages that vLLM imports; of those it shows to vLLM only what the
GPU machine's image has, or what was carried. The last line is JSON: the modules that load, how far the start came, what
was stubbed, and which packages vLLM asked for in vain."""

import importlib
import importlib.metadata
import json
import os
import re
import sys
import tempfile
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

FOLDER = Path(sys.argv[1])
STUBS = ("_C_stable_libtorch", "cumem_allocator", "spinloop", "fs_io_C", "vllm_flash_attn._vllm_fa3_C")
OPERATORS = ("_C", "_C_cache_ops", "_vllm_fa3_C")
MODULES = (
    *("v1.worker.gpu_worker", "v1.worker.gpu.model_runner", "v1.attention.backends.flash_attn", "v1.engine.core"),
    *("model_executor.models.qwen2", "model_executor.models.qwen3", "lora.worker_manager", "device_allocator.cumem"),
    *("distributed.weight_transfer.ipc_engine", "distributed.weight_transfer.nccl_engine"),
)


class Reached(Exception):
    """The engine would start now."""


class Stub(ModuleType):
    """A compiled module that has whatever it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


class Finder(MetaPathFinder, Loader):
    """Gives stubs, and hides packages that the GPU machine will not have."""

    def __init__(self) -> None:
        there = set(json.loads((FOLDER / "packages.json").read_text(encoding="utf-8"))["there"])
        names = importlib.metadata.packages_distributions()
        normal = {top: [re.sub(r"[-_.]+", "-", name).lower() for name in found] for top, found in names.items()}
        self.hidden = {
            top for top, found in normal.items() if not there & {*found} and top not in ("vllm", "agentfactory")
        }
        self.refused: set[str] = set()

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name in {f"vllm.{stub}" for stub in STUBS}:
            return ModuleSpec(name, self)
        if name in self.hidden:
            self.refused.add(name)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stub_gpu() -> None:
    """Let torch describe an H200, and let vLLM find operators in its library."""
    import torch

    properties = SimpleNamespace(
        name="NVIDIA H200", total_memory=139 * 2**30, major=9, minor=0, multi_processor_count=132
    )
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_name = lambda *_: properties.name
    torch.cuda.get_device_properties = lambda *_: properties  # type: ignore[assignment]
    torch.cuda.mem_get_info = lambda *_: (138 * 2**30, 139 * 2**30)
    found, registers = torch._ops._OpNamespace.__getattr__, torch.library.register_fake

    def look_up(namespace: Any, name: str) -> Any:
        try:
            return found(namespace, name)
        except AttributeError:
            if namespace.name not in OPERATORS:
                raise
            return MagicMock(return_value=True)

    def register_fake(name: Any, *rest: Any, **named: Any) -> Any:
        """There is no operator whose shapes could be told."""
        stubbed = isinstance(name, str) and name.partition("::")[0] in OPERATORS
        return (lambda function: function) if stubbed else registers(name, *rest, **named)

    torch._ops._OpNamespace.__getattr__ = look_up  # type: ignore[method-assign]
    torch.library.register_fake = register_fake


def main() -> None:
    """Import, and start."""
    sys.path.insert(0, str(FOLDER / "code"))
    finder = Finder()
    sys.meta_path.insert(0, finder)
    stub_gpu()
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    vllm.platforms._current_platform = NonNvmlCudaPlatform()
    from vllm.distributed.device_communicators import cuda_wrapper

    cuda_wrapper.CudaRTLibrary = MagicMock  # type: ignore[misc]
    found: dict[str, Any] = {"stubbed": [*STUBS, "torch.cuda", "NVML", "libcudart"], "modules": {}}
    for name in MODULES:
        try:
            importlib.import_module(f"vllm.{name}")
            found["modules"][name] = "loads"
        except Exception as error:
            found["modules"][name] = f"{type(error).__name__}: {error}"[:300]
    found["start"] = start()
    found["asked for in vain"] = sorted(finder.refused)
    print(json.dumps(found), flush=True)
    # the warm-up still waits for a server
    os._exit(0)


def start() -> str:
    """Start by the command of a recipe with a weight transfer and an adapter. Returns how that ended."""
    from vllm.v1.engine.async_llm import AsyncLLM

    from agentfactory.rollout.config import RolloutRecipe
    from agentfactory.rollout.inference.server_command_line import server_command
    from agentfactory.rollout.inference.vllm import vllm_server

    def reach(*_: object, vllm_config: Any, **__: object) -> None:
        transfer, graphs = vllm_config.weight_transfer_config.backend, vllm_config.compilation_config.cudagraph_mode
        rank, sleeps = vllm_config.lora_config.max_lora_rank, vllm_config.model_config.enable_sleep_mode
        raise Reached(f"the engine: transfer {transfer}, graphs {graphs}, adapters of rank {rank}, sleep mode {sleeps}")

    with tempfile.TemporaryDirectory() as folder:
        config = {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "num_hidden_layers": 2,
            "hidden_size": 128,
        }
        config |= {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256}
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        model = {"path": folder, "dtype": "bfloat16", "lora": {"rank": 16}}
        server = {"engine": "vllm", "max_model_len": 512, "options": {"args": sys.argv[2:]}}
        recipe = RolloutRecipe.model_validate({"model": model, "server": server})
        command = server_command(recipe, weight_transfer="ipc", sleeps=True)
        sys.argv = ["vllm_server", *command[command.index(folder) :]]
        try:
            with patch.object(AsyncLLM, "from_vllm_config", reach):
                vllm_server.main()
        except Reached as reached:
            return f"reached {reached}"
        except BaseException as error:
            return f"{type(error).__name__}: {error}"[:600]
    return "ended"


if __name__ == "__main__":
    main()
