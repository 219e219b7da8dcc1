"""JSON bodies of the Tinker API, as the SDK 0.38 sends them. A field that is not listed is refused by its name."""

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from agentfactory.tinker.messages import RequestError

NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
"""Of a checkpoint, which becomes the name of a folder."""
MODEL_ID = "[A-Za-z0-9-]{1,64}:train:[0-9]{1,9}"
Name = Annotated[str, Meta(pattern=rf"^{NAME}\Z")]
ModelId = Annotated[str, Meta(pattern=rf"^{MODEL_ID}\Z")]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
AtLeastOne = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[float, Meta(ge=0)]
Rate = Annotated[float, Meta(ge=0, lt=1)]
Metadata = dict[str, Any]

_MOST_METADATA = 1 << 14


class Part(Struct, forbid_unknown_fields=True):
    """A body, or an object in one."""


class Body(Part):
    type: str | None = None


class Session(Body):
    tags: list[str] = []
    user_metadata: Metadata | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class OfSession(Body, kw_only=True):
    session_id: Name


class Lora(Part):
    rank: AtLeastOne = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(Struct):
    type: str = "adamw"


class CreateModel(OfSession, kw_only=True):
    model_seq_id: Count
    base_model: str
    user_metadata: Metadata | None = None
    lora_config: Lora = msgspec.field(default_factory=Lora)
    optimizer_config: Optimizer = msgspec.field(default_factory=Optimizer)


class OfModel(Body, kw_only=True):
    model_id: ModelId


class Turn(Struct):
    """What gives a request its place among those of its model."""

    model_id: str
    seq_id: Count


class Adam(Part):
    """Settings of one step; grad_clip_norm 0 is no limit."""

    learning_rate: NotNegative = 1e-4
    beta1: Rate = 0.9
    beta2: Rate = 0.95
    eps: NotNegative = 1e-12
    weight_decay: NotNegative = 0.0
    grad_clip_norm: NotNegative = 0.0


class OptimStep(OfModel, kw_only=True):
    seq_id: Count
    adam_params: Adam = msgspec.field(default_factory=Adam)
    optimizer_params: Optimizer = msgspec.field(default_factory=Optimizer)


class SaveWeights(OfModel, kw_only=True):
    seq_id: Count
    path: Name | None = None
    ttl_seconds: AtLeastOne | None = None
    user_metadata: Metadata | None = None
    overwrite: bool = False


class SaveForSampler(SaveWeights, kw_only=True):
    sampling_session_seq_id: Count | None = None
    kind: str = "snapshot"


class LoadWeights(Body, kw_only=True):
    path: str
    optimizer: bool
    session_id: Name | None = None
    model_seq_id: Count | None = None
    model_id: ModelId | None = None
    seq_id: Count | None = None
    base_model: str | None = None
    user_metadata: Metadata | None = None
    optimizer_config: Optimizer = msgspec.field(default_factory=Optimizer)
    weights_access_token: str | None = None


class CreateSampler(OfSession, kw_only=True):
    sampling_session_seq_id: Count
    base_model: str | None = None
    model_path: str | None = None


class Chunk(Struct):
    type: str = "encoded_text"
    tokens: list[int] = []


class Prompt(Struct):
    chunks: list[Chunk]


class Sampling(Part):
    max_tokens: AtLeastOne | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: NotNegative = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = -1
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0


class Asample(Body, kw_only=True):
    prompt: Prompt
    sampling_params: Sampling
    sampling_session_id: str
    seq_id: Count
    num_samples: Annotated[int, Meta(ge=1, le=4096)] = 1
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Meta(ge=0, le=1024)] = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: AtLeastOne | None = None
    record_stability_info: bool | None = None


class Retrieve(Body, kw_only=True):
    request_id: str
    allow_metadata_only: bool = False


class OfPath(Body, kw_only=True):
    tinker_path: str


class Lifetime(Body):
    ttl_seconds: AtLeastOne | None = None


Kind = TypeVar("Kind", bound=Body)


def decode(content: bytes, kind: type[Kind]) -> Kind:
    """Return a body. Raises RequestError, which names the field."""
    try:
        body = msgspec.json.decode(content or b"{}", type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"{error}; give the fields of the Tinker API 0.38") from error
    if len(msgspec.json.encode(getattr(body, "user_metadata", None))) > _MOST_METADATA:
        raise RequestError(f"user_metadata: has more than {_MOST_METADATA} bytes; shorten it")
    return body


def turn_of(content: bytes) -> Turn | None:
    """Return the turn of a body that may be wrong otherwise; None if it names none."""
    try:
        return msgspec.json.decode(content, type=Turn)
    except (ValueError, RecursionError):
        return None
