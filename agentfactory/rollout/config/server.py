"""The recipe's `server:` section: the inference server."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from agentfactory.base.config import Choice, PositiveInt, Section, TypedOptions

EMBEDDED_QUANTIZATIONS = ("int8", "int4")
"""Precisions to which the embedded engine can round weights. Repeated here because
rollout/inference/embedded/packed_linear.py needs torch."""


class EngineOptions(Section):
    """Options of vLLM and SGLang."""

    python: str | None = None
    """Python interpreter that runs the engine, such as .venv-vllm/bin/python. Null: the current one. For vLLM,
    AgentFactory must be installed there too; `pip install --no-deps .` is enough."""
    tensor_parallel_size: PositiveInt = 1
    """Number of devices across which each layer is split."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Fraction of the GPU's memory to use (vLLM: beside its CUDA context; SGLang: for weights and KV cache), or of the
    machine's memory on a CPU. Null: the share that `placement` plans for vLLM, otherwise the engine's default; vLLM
    on a CPU: 1 GiB of KV cache."""
    args: list[str] = []
    """Additional command-line flags, passed unchanged."""


class VllmOptions(EngineOptions):
    """Options of vLLM."""

    data_parallel_size: PositiveInt = 1
    """Number of replicas, each with its own copy of the model and KV cache. A chain stays on one replica."""


class SglangOptions(EngineOptions):
    """Options of SGLang."""

    attach: str | None = None
    """Address of a running SGLang server to use instead of starting one, such as http://gpu-1:30000. If it needs a key,
    this is the one in `server.api_key_env`."""


class ServerConfig(Choice):
    """The inference server, either started by `agentfactory serve` and `agentfactory train` or already running at
    `url`."""

    chooser = "engine"
    kinds = {"vllm": VllmOptions, "sglang": SglangOptions}

    startup_seconds: ClassVar[float] = 1800.0
    """Time within which the server must start to answer requests."""

    engine: Literal["vllm", "embedded", "sglang"] = "vllm"
    """vllm; embedded, which is a small decode loop for a CPU or one GPU; or sglang, for full fine-tuning."""
    options: TypedOptions = None
    """Options of the engine."""
    url: str | list[str] | None = None
    """Address of a running server, or a list of addresses. Null: start a server."""
    retry_seconds: float = Field(default=300.0, gt=0)
    """Time for which to retry recoverable failures: an unreachable server, 5xx, 429. After that the request fails, and
    the run stops if no server completed any request in that time."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0 picks a free one."""
    model: str | None = None
    """Model to serve instead of `model.path`: a quantised copy of it, such as an AWQ or GPTQ checkpoint, to which the
    adapter is applied. Null: serve `model.path`."""
    api_key_env: str | None = None
    """Environment variable that contains the API key; the key itself is never stored."""
    max_model_len: PositiveInt = 8192
    """Maximum length of a sequence in tokens, prompt included."""
    max_num_seqs: PositiveInt = 128
    """Maximum number of sequences decoded in a batch."""
    quantization: str | None = None
    """Quantisation of the served base model. vLLM: fp8, awq, gptq (bitsandbytes through a plugin). embedded: int8, in
    which a CPU with AVX2 computes large layers several times as fast as in float32. Elsewhere it only rounds the
    weights, as int4 does, to test how rounding affects learning."""

    @property
    def urls(self) -> list[str]:
        """`url` as a list, empty if null."""
        return [self.url] if isinstance(self.url, str) else self.url or []

    @property
    def vllm(self) -> VllmOptions:
        """The options of vLLM, or their defaults under another engine."""
        return self.options if isinstance(self.options, VllmOptions) else VllmOptions()

    @property
    def sglang(self) -> SglangOptions:
        """The options of SGLang, or their defaults under another engine."""
        return self.options if isinstance(self.options, SglangOptions) else SglangOptions()

    @property
    def starts(self) -> bool:
        """True if the process that holds the model is started here."""
        return self.url is None and self.sglang.attach is None

    @property
    def devices(self) -> int:
        """The number of devices that a server started here uses."""
        return max(self.vllm.tensor_parallel_size * self.vllm.data_parallel_size, self.sglang.tensor_parallel_size)

    def quantization_fault(self) -> tuple[str, str] | None:
        """Return the problem and the fix if the engine does not support `quantization`, otherwise None."""
        asked, is_embedded = self.quantization, self.engine == "embedded"
        if asked is None or is_embedded == (asked in EMBEDDED_QUANTIZATIONS):
            return None
        if is_embedded:
            problem = f"got {asked!r}, but the embedded engine supports only {' or '.join(EMBEDDED_QUANTIZATIONS)}"
            return problem, "use one of these, or set server.engine=vllm"
        problem = f"got {asked!r}, which only the embedded engine supports"
        return problem, "use fp8, awq or gptq, or set server.engine=embedded"


@dataclass(frozen=True)
class TeacherServer:
    """A teacher's server, and the number of its most likely tokens that are asked for at each sampled token (None: the
    log-probability of the sampled token alone). `field` is where the recipe has its address."""

    url: str
    api_key_env: str | None = None
    top_k: int | None = None
    field: str = "teacher.url"
