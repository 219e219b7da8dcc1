"""The recipe's `server:` section: the inference server."""

from typing import Literal

from pydantic import Field

from agentfactory.tools.config import Choice, PositiveInt, Section, TypedOptions

EMBEDDED_QUANTIZATIONS = ("int8", "int4")
"""Precisions that the embedded engine rounds to: see rollout/inference/embedded/quantization.py, which needs torch."""


class VllmOptions(Section):
    """Options of vLLM."""

    python: str | None = None
    """Python that runs vLLM, such as .venv-vllm/bin/python; null uses the current one. AgentFactory must be installed
    there too; `pip install --no-deps .` is enough."""
    tensor_parallel_size: PositiveInt = 1
    """Number of devices that share each layer."""
    data_parallel_size: PositiveInt = 1
    """Number of replicas, each with a copy of the model and a cache. A chain stays with one."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of the GPU's memory to use, or of the machine's memory on a CPU. Null uses what `placement` leaves,
    otherwise vLLM's default; on a CPU, 1 GiB of cache."""
    args: list[str] = []
    """Further command-line flags, passed unchanged."""


class ServerConfig(Choice):
    """The inference server: either started by `agentfactory serve` and `agentfactory train`, or already running at
    `url`."""

    chooser = "engine"
    kinds = {"vllm": VllmOptions}

    engine: Literal["vllm", "embedded"] = "vllm"
    """vllm, or embedded: a small decode loop for a CPU or one GPU."""
    options: TypedOptions = None
    """Options of the engine."""
    url: str | list[str] | None = None
    """Address of a running server, or a list of addresses; null starts a server."""
    retry_seconds: float = Field(default=300.0, gt=0)
    """How long to retry recoverable failures: an unreachable server, 5xx, 429. After that the request fails, and the
    run stops if no server has completed any request in that time."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0 picks a free one."""
    model: str | None = None
    """Model to serve instead of `model.path`: a quantised copy of the same model, such as an AWQ or GPTQ checkpoint, to
    which an adapter is applied. Null serves `model.path`."""
    api_key_env: str | None = None
    """Environment variable that contains the API key; the key itself is never stored."""
    max_model_len: PositiveInt = 8192
    """Longest sequence, prompt included."""
    max_num_seqs: PositiveInt = 128
    """Maximum number of sequences decoded together."""
    quantization: str | None = None
    """Quantisation of the served base model. vLLM: fp8, awq, gptq (bitsandbytes through a plugin). embedded: int8 or
    int4, which rounds weights without saving memory, to try how rounding affects learning."""
    startup_seconds: float = Field(default=600.0, gt=0)
    """How long the server may take to start answering."""

    @property
    def urls(self) -> list[str]:
        """The addresses in `url`."""
        return [self.url] if isinstance(self.url, str) else self.url or []

    @property
    def vllm(self) -> VllmOptions:
        """The options of vLLM: the defaults for another engine."""
        return self.options if isinstance(self.options, VllmOptions) else VllmOptions()

    def quantization_fault(self) -> tuple[str, str] | None:
        """Return the problem and the fix if the engine cannot apply `quantization` to the weights that it serves."""
        asked, is_embedded = self.quantization, self.engine == "embedded"
        if asked is None or is_embedded == (asked in EMBEDDED_QUANTIZATIONS):
            return None
        if is_embedded:
            problem = f"got {asked!r}, and the embedded engine rounds to {' or '.join(EMBEDDED_QUANTIZATIONS)}"
            return problem, "use one of these, or set server.engine=vllm"
        problem = f"got {asked!r}, which only the embedded engine knows"
        return problem, "use fp8, awq or gptq, or set server.engine=embedded"
