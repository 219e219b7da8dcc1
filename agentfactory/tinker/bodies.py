"""JSON bodies of the Tinker API, as the SDK 0.38 sends them. What would change a result is refused if it is unknown."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from agentfactory.tinker.messages import RequestError

NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
"""Of a checkpoint, which becomes the name of a folder."""
MODEL_ID = "[A-Za-z0-9-]{1,64}:train:[0-9]{1,9}"
Name = Annotated[str, Meta(pattern=rf"^{NAME}\Z")]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
AtLeastOne = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Lifetime = Annotated[int, Meta(ge=1, le=10 * 366 * 24 * 3600)]
"""In seconds, up to the API's ten years."""
NotNegative = Annotated[float, Meta(ge=0)]
Rate = Annotated[float, Meta(ge=0, lt=1)]
Metadata = dict[str, Any]

Kind = TypeVar("Kind", bound=Struct)
Entry = TypeVar("Entry")
_MOST_METADATA, _MOST_ENTRIES = 1 << 14, 1000


class Short(Struct):
    """Requests of a few fields, of which each has its own in its body, path or query; and sessions, whose other fields
    change nothing."""

    session_id: str = ""
    sampling_session_id: str = ""
    model_id: str = ""
    request_id: str = ""
    tinker_path: str = ""
    kind: str = ""
    name: str = ""
    ttl_seconds: Lifetime | None = None
    user_metadata: Metadata | None = None
    offset: Count = 0
    limit: Count = 20

    def page(self, found: list[Entry]) -> tuple[list[Entry], dict[str, int]]:
        """Return the asked part of a list, and the API's note of where it lies."""
        limit = min(self.limit, _MOST_ENTRIES)
        cursor = {"offset": self.offset, "limit": limit, "total_count": len(found)}
        return found[self.offset : self.offset + limit], cursor


class Turn(Struct, kw_only=True):
    """The model of a request, and the request's number among those of the model."""

    model_id: str
    seq_id: Count


class InTurn(Turn, forbid_unknown_fields=True, kw_only=True):
    type: str | None = None


class Body(Struct, forbid_unknown_fields=True):
    type: str | None = None


class Lora(Body):
    rank: AtLeastOne = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(Struct):
    type: str = "adamw"


class CreateModel(Body, kw_only=True):
    session_id: Name
    model_seq_id: Count
    base_model: str
    user_metadata: Metadata | None = None
    lora_config: Lora = msgspec.field(default_factory=Lora)
    optimizer_config: Optimizer = msgspec.field(default_factory=Optimizer)


class Adam(Body):
    """Settings of one step; grad_clip_norm 0 is no limit."""

    learning_rate: NotNegative = 1e-4
    beta1: Rate = 0.9
    beta2: Rate = 0.95
    eps: NotNegative = 1e-12
    weight_decay: NotNegative = 0.0
    grad_clip_norm: NotNegative = 0.0


class OptimStep(InTurn, kw_only=True):
    adam_params: Adam = msgspec.field(default_factory=Adam)
    optimizer_params: Optimizer = msgspec.field(default_factory=Optimizer)


class SaveWeights(InTurn, kw_only=True):
    path: Name | None = None
    ttl_seconds: Lifetime | None = None
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
    model_id: str | None = None
    seq_id: Count | None = None
    base_model: str | None = None
    user_metadata: Metadata | None = None
    optimizer_config: Optimizer = msgspec.field(default_factory=Optimizer)
    weights_access_token: str | None = None


class CreateSampler(Body, kw_only=True):
    session_id: Name
    sampling_session_seq_id: Count
    base_model: str | None = None
    model_path: str | None = None


class Chunk(Struct):
    type: str = "encoded_text"
    tokens: list[int] = []


class Prompt(Struct):
    chunks: list[Chunk]


class Sampling(Body):
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


def decode(content: bytes, kind: type[Kind], place: Mapping[str, str] | None = None) -> Kind:
    """Return a body, with what the request's path and query say, its `place`. Raises RequestError, which names the
    field."""
    try:
        body = msgspec.json.decode(content or b"{}", type=kind)
        if place:
            body = msgspec.convert({**msgspec.structs.asdict(body), **place}, kind, strict=False)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"{error}; give the fields of the Tinker API 0.38") from error
    if len(msgspec.json.encode(getattr(body, "user_metadata", None))) > _MOST_METADATA:
        raise RequestError(f"user_metadata: has more than {_MOST_METADATA} bytes; shorten it")
    return body
