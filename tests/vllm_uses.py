"""What AgentFactory uses of vLLM, found in its own code: tests/vllm_api.py reads the same of vLLM's wheels."""

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from agentfactory.recipe.train_checks import ADAPTED_TOWER
from agentfactory.rollout.inference import http_server, http_transport, server_command_line, teacher_client
from agentfactory.rollout.inference.server_metrics import _CACHE, _FIELDS, LOAD_FIX, REPLICA_HEADER
from agentfactory.rollout.inference.vllm import TABLE_ADAPTERS
from tests.conftest import REPOSITORY

OPENAPI = "/openapi.json"
"""FastAPI's own route."""
ROUTES = {
    **{path: method for path, method in http_server._METHODS.items() if path != OPENAPI},
    **{"/collective_rpc": "POST", "/v1/chat/completions": "POST"},
}
"""Path of a route -> its method."""

METRICS = (*_FIELDS.values(), _CACHE)

_GENERATE = "vllm.entrypoints.scale_out.token_in_token_out.protocol"
_TRANSFER = "vllm.distributed.weight_transfer"
CLASSES = {
    **{name: f"{_GENERATE}:{name}" for name in ("GenerateRequest", "GenerateTokensResponse", "GenerateTokensChoice")},
    **{name: f"{_GENERATE}:{name}" for name in ("GenerateLogProbs", "GenerateLogProbsContent", "PlaceholderRangeInfo")},
    "SamplingParams": "vllm.sampling_params:SamplingParams",
    "WeightVersionSpan": "vllm.outputs:WeightVersionSpan",
    "Logprob": "vllm.logprobs:Logprob",
    "ModelCard": "vllm.entrypoints.openai.models.protocol:ModelCard",
    "LoadLoRAAdapterRequest": "vllm.entrypoints.serve.lora.protocol:LoadLoRAAdapterRequest",
    "UnloadLoRAAdapterRequest": "vllm.entrypoints.serve.lora.protocol:UnloadLoRAAdapterRequest",
    "WeightTransferConfig": "vllm.config.weight_transfer:WeightTransferConfig",
    **{
        name: f"{_TRANSFER}.nccl_engine:{name}"
        for name in ("NCCLWeightTransferInitInfo", "NCCLWeightTransferUpdateInfo")
    },
    **{name: f"{_TRANSFER}.ipc_engine:{name}" for name in ("IPCWeightTransferInitInfo", "IPCWeightTransferUpdateInfo")},
}
"""Class of a request, an answer or a part of one -> where vLLM has it."""

_MOE = "vllm.model_executor.layers.fused_moe"
_MORE = {
    # replaced by the plugin under these names
    *("vllm.distributed.utils:TCPStore", "vllm.v1.worker.gpu_worker:compute_tensor_digests"),
    # reached through objects
    *(f"{_TRANSFER}.base:WeightTransferEngine.{name}" for name in ("device", "model", "model_config")),
    "vllm.model_executor.layers.linear:LinearBase.input_size",
    "vllm.model_executor.layers.linear:RowParallelLinear.input_size_per_partition",
    f"{_MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.unquantized_backend",
    f"{_MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.moe_kernel",
    f"{_MOE}.modular_kernel:FusedMoEKernel.fused_experts",
    *(f"{_MOE}.experts.cpu_moe:CPUUnquantizedExperts.{name}" for name in ("isa", "_use_zentorch")),
    f"{_MOE}.experts.cpu_moe:CPUUnquantizedExperts.process_weights_after_loading",
    *(f"{_MOE}.oracle.unquantized:UnquantizedMoeBackend.{name}" for name in ("CPU", "TRITON", "BATCHED_TRITON")),
    f"{_MOE}.oracle.unquantized:UnquantizedMoeBackend.FLASHINFER_CUTLASS",
    *(f"vllm.distributed.device_communicators.pynccl:PyNcclCommunicator.{name}" for name in ("broadcast", "destroy")),
    *(f"vllm.v1.worker.gpu_worker:Worker.{name}" for name in ("compute_weight_checksums", "start_weight_update")),
    *(f"vllm.v1.worker.gpu_worker:Worker.{name}" for name in ("update_weights", "finish_weight_update")),
    "vllm.config.parallel:ParallelConfig.data_parallel_index",
    *(f"vllm.parser.abstract_parser:Parser.{name}" for name in ("adjust_request", "set_prompt_token_ids", "parse")),
    # values that requests, flags and placement rely on
    *("vllm.plugins:DEFAULT_PLUGINS_GROUP", "vllm.v1.engine:PauseMode", "vllm.config.lora:MaxLoRARanks"),
    *("vllm.config.model:LogprobsMode", "vllm.config.scheduler:SchedulerPolicy", "vllm.config.model:ModelDType"),
    *(f"vllm.config.cache:CacheConfig.{name}" for name in ("gpu_memory_utilization", "num_gpu_blocks", "block_size")),
}
"""Names that no import of ours shows."""


OTHERS_FLAGS = {"--api-key-env", TABLE_ADAPTERS, "--adapter", "--jinja", "--url", "--model", "--enable-metrics"}
"""Flags of our launchers, of the embedded engine, and of other programs in the same files."""


@cache
def sources() -> dict[Path, ast.Module]:
    """Return the code that may import vLLM or call its routes."""
    places = (REPOSITORY / name for name in ("agentfactory", "benchmarks", "tests/vllm"))
    return {
        file: ast.parse(file.read_text(encoding="utf-8")) for place in places for file in sorted(place.rglob("*.py"))
    }


def imported(code: ast.Module) -> dict[str, str]:
    """Return what a file imports from vLLM: the name, or a module's dotted one -> "MODULE:NAME"."""
    found = {}
    for node in ast.walk(code):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            found |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name: f"{alias.name}:" for alias in node.names if alias.name.split(".")[0] == "vllm"}
    return found


def _named(base: str, attribute: str) -> str:
    return f"{base}{'' if base.endswith(':') else '.'}{attribute}"


def names() -> set[str]:
    """Return everything of vLLM that is imported, and what is taken from it."""
    found = {*_MORE}
    for code in sources().values():
        known = imported(code)
        found |= {*known.values()}
        for node in ast.walk(code):
            if isinstance(node, ast.Attribute) and (base := known.get(ast.unparse(node.value))):
                found.add(_named(base, node.attr))
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "patch.object":
                found |= {_named(known[base], n.value) for b, n, *_ in [node.args] if (base := ast.unparse(b)) in known}
    return {name for name in found if not name.endswith("__")}


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Yield each call of something that is imported from vLLM."""
    for code in sources().values():
        known = imported(code)
        for node in ast.walk(code):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known:
                yield known[node.func.id], node
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if base := known.get(ast.unparse(node.func.value)):
                    yield _named(base, node.func.attr), node


def flags() -> set[str]:
    """Return vLLM's flags in our commands, errors and plans, without `no-`."""
    parts = [server_command_line.vllm_arguments, server_command_line._image_flags, server_command_line.server_command]
    text = "".join(
        map(inspect.getsource, [*parts, http_transport.missing_routes, teacher_client.TeacherClient._remedy])
    )
    for name in (
        "rollout/inference/vllm/vllm_server.py",
        "rollout/chains/chat_endpoint.py",
        "placement/server_memory.py",
    ):
        text += (REPOSITORY / "agentfactory" / name).read_text(encoding="utf-8")
    found = re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", f"{text} {ADAPTED_TOWER} {LOAD_FIX}")
    return {flag.replace("--no-", "--") for flag in found} - OTHERS_FLAGS


def variables() -> set[str]:
    """Return vLLM's environment variables in our code."""
    names = (node.value for code in sources().values() for node in ast.walk(code) if isinstance(node, ast.Constant))
    found = {word for name in names if isinstance(name, str) for word in re.findall(r"(?<!_)\bVLLM_[A-Z_]+\b", name)}
    return found


def texts() -> set[str]:
    """Return the patterns of vLLM's log lines and messages that our code looks for."""
    stages = {re.escape(mark) for _, mark in server_command_line._STAGES if mark}
    failures = {pattern for pattern, _ in server_command_line._FAILURES}
    return stages | failures | {re.escape(REPLICA_HEADER), r"^dp\d+:pp\d+:pcp\d+:tp\d+:$", "maximum context length"}
