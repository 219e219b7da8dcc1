"""JSON bodies of the Tinker API, as the SDK 0.38 sends them. A field that is not listed is refused by its name."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from agentfactory.tinker.messages import RequestError

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")]
"""Of a checkpoint or a session, which becomes the name of a folder."""
ModelId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9-]{1,64}:train:[0-9]{1,9}\Z")]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Rate = Annotated[float, Meta(ge=0, lt=1)]
Metadata = dict[str, Any]

_MOST_METADATA = 1 << 14


class Body(Struct, forbid_unknown_fields=True, kw_only=True):
    type: str | None = None


class Session(Body):
    tags: list[str] = []
    user_metadata: Metadata | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class OfSession(Body):
    session_id: Name


class Lora(Struct, forbid_unknown_fields=True, kw_only=True):
    rank: Annotated[int, Meta(ge=1)] = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(Struct, kw_only=True):
    type: str = "adamw"


class CreateModel(OfSession):
    model_seq_id: Count
    base_model: str
    user_metadata: Metadata | None = None
    lora_config: Lora | None = None
    optimizer_config: Optimizer = field(default_factory=Optimizer)


class OfModel(Body):
    model_id: ModelId


class Adam(Struct, forbid_unknown_fields=True, kw_only=True):
    """Settings of one step; grad_clip_norm 0 is no limit."""

    learning_rate: Annotated[float, Meta(ge=0)] = 1e-4
    beta1: Rate = 0.9
    beta2: Rate = 0.95
    eps: Annotated[float, Meta(ge=0)] = 1e-12
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    grad_clip_norm: Annotated[float, Meta(ge=0)] = 0.0


class OptimStep(OfModel):
    seq_id: Count
    adam_params: Adam | None = None
    optimizer_params: Optimizer | None = None


class Saving(OfModel):
    seq_id: Count
    path: Name | None = None
    ttl_seconds: Annotated[int, Meta(ge=1)] | None = None
    user_metadata: Metadata | None = None


class SaveWeights(Saving):
    overwrite: bool = False


class SaveForSampler(Saving):
    sampling_session_seq_id: Count | None = None
    kind: str = "snapshot"


class LoadWeights(Body):
    path: str
    optimizer: bool
    session_id: Name | None = None
    model_seq_id: Count | None = None
    model_id: ModelId | None = None
    seq_id: Count | None = None
    base_model: str | None = None
    user_metadata: Metadata | None = None
    optimizer_config: Optimizer | None = None
    weights_access_token: str | None = None


class CreateSampler(OfSession):
    sampling_session_seq_id: Count
    base_model: str | None = None
    model_path: str | None = None


class Chunk(Struct, kw_only=True):
    type: str = "encoded_text"
    tokens: list[int] = []


class Prompt(Struct, kw_only=True):
    chunks: list[Chunk]


class Sampling(Struct, forbid_unknown_fields=True, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = -1
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0


class Asample(Body):
    prompt: Prompt
    sampling_params: Sampling
    sampling_session_id: str | None = None
    seq_id: Count | None = None
    num_samples: Annotated[int, Meta(ge=1, le=4096)] = 1
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Meta(ge=0, le=1024)] = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: Annotated[int, Meta(ge=1)] | None = None
    record_stability_info: bool | None = None


class Retrieve(Body):
    request_id: str
    allow_metadata_only: bool = False


class OfPath(Body):
    tinker_path: str


class Lifetime(Body):
    ttl_seconds: Annotated[int, Meta(ge=1)] | None = None


Kind = TypeVar("Kind", bound=Body)


def decode(content: bytes, kind: type[Kind]) -> Kind:
    """Return a body. Raises RequestError, which names the field."""
    try:
        body = msgspec.json.decode(content or b"{}", type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"{error}; the body must be that of {kind.__name__} in the Tinker API 0.38") from error
    for name, number in _numbers(body):
        if not math.isfinite(number):
            raise RequestError(f"{name}: got {number}; give a finite number")
    metadata = getattr(body, "user_metadata", None)
    if metadata and len(msgspec.json.encode(metadata)) > _MOST_METADATA:
        raise RequestError(f"user_metadata: has more than {_MOST_METADATA} bytes; shorten it")
    return body


def _numbers(body: Struct) -> Iterator[tuple[str, float]]:
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if isinstance(value, Struct):
            yield from _numbers(value)
        elif isinstance(value, float):
            yield name, value
