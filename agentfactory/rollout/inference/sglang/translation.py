"""Our protocol in SGLang's: a turn's request and response, and updates of full weights with their checksums."""

import math
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agentfactory.rollout.inference.http_server import ApiError, BadRequest, Json
from agentfactory.rollout.inference.sglang.upstream import Sglang
from agentfactory.rollout.inference.weight_digest import ON_CPU, ON_GPU, UNKNOWN

RESERVED_TOKENS = 7
"""Tokens at the end of the context that SGLang gives to no prompt (`TpModelWorker.get_worker_info`)."""

_REQUEST = {"request_id", "token_ids", "sampling_params", "model", "cache_salt", "stream", "return_token_ids"}
_SAME = {
    *("temperature", "stop", "stop_token_ids", "ignore_eos", "logit_bias", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
}
"""Sampling parameters with the same name and meaning in both APIs."""
_OWN = {"max_tokens", "min_tokens", "logprobs", "logprob_token_ids", "skip_reading_prefix_cache", "detokenize"}
_NEUTRAL: dict[str, Any] = {"n": 1, "seed": None, "prompt_logprobs": None}
"""Sampling parameters that are accepted only with the value that has no effect."""
_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "int8": 1}
_BYTES |= {"uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}


def to_sglang(body: Json, max_model_len: int) -> Json:
    """Return the body of SGLang's /generate for one of ours. Raises ApiError for what SGLang cannot do."""
    if body.get("content_parts"):
        raise BadRequest("content_parts: images are not supported with SGLang")
    if unknown := (body.keys() - _REQUEST - {"content_parts"}) | ({"stream"} if body.get("stream") else set()):
        raise BadRequest(f"{min(unknown)}: not supported with SGLang")
    ids, params = body.get("token_ids"), body.get("sampling_params")
    if not isinstance(ids, list) or not ids or type(ids[0]) is not int:
        raise BadRequest("token_ids: must be a list of at least one token id")
    if not isinstance(params, dict):
        raise BadRequest("sampling_params: must be an object")
    for key, value in params.items():
        if key not in _SAME and key not in _OWN and not (key in _NEUTRAL and value == _NEUTRAL[key]):
            raise BadRequest(f"sampling_params.{key}: {value!r} is not supported with SGLang")
    if len(ids) > max_model_len - RESERVED_TOKENS:
        raise BadRequest(
            f"This model's maximum context length is {max_model_len} tokens, and SGLang keeps {RESERVED_TOKENS} of "
            f"them free. However, your prompt contains {len(ids)} input tokens. Please reduce its length.",
        )
    candidates = params.get("logprob_token_ids") or []
    if params.get("logprobs") not in (None, len(candidates)):
        raise BadRequest(
            "sampling_params.logprobs: must be 0 (the sampled token only) or the number of logprob_token_ids"
        )
    stops = params.get("stop") or []
    if not all(isinstance(stop, str) and stop for stop in ([stops] if isinstance(stops, str) else stops)):
        raise BadRequest(f"sampling_params.stop: {stops!r} is not a list of non-empty strings")
    sampling = {key: value for key, value in params.items() if key in _SAME and value is not None}
    # without it, SGLang ends a turn after 128 tokens
    most = params.get("max_tokens")
    sampling["max_new_tokens"] = max_model_len - len(ids) if most is None else most
    if params.get("min_tokens"):
        sampling["min_new_tokens"] = params["min_tokens"]
    request: Json = {
        "rid": body.get("request_id") or uuid.uuid4().hex,
        "input_ids": ids,
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": False,
    }
    if candidates:
        request["token_ids_logprob"] = list(dict.fromkeys(candidates))
    salt = body.get("cache_salt")
    if params.get("skip_reading_prefix_cache"):
        # SGLang cannot pass its cache by for one request; a namespace of its own is empty
        salt = uuid.uuid4().hex
    if salt is not None:
        request["cache_salt"] = salt
    return request


def from_sglang(body: Json, request: Json, response: Json) -> Json:
    """Return our response to `body`, from SGLang's to `request`. Raises ApiError if it cannot be trained on."""
    try:
        meta, tokens = response["meta_info"], response["output_ids"]
        sampled = meta.get("output_token_logprobs") or []
        finish, spans = meta["finish_reason"], meta.get("weight_versions")
        listed = [token for _, token, *_ in sampled]
    except (KeyError, TypeError, ValueError) as error:
        raise ApiError(502, f"SGLang's response is not a generation ({error!r}): {str(response)[:200]}") from error
    if listed != tokens:
        problem = f"SGLang returned {len(tokens)} tokens, and log-probabilities of {len(sampled)}"
        raise ApiError(502, f"{problem}, which are not the same tokens")
    if spans is None:
        raise ApiError(502, "SGLang reports no weight_versions: AgentFactory needs SGLang 0.5.23 or newer")
    params = body["sampling_params"]
    reason, stopped = _finish(finish, params)
    logprobs = None
    if params.get("logprobs") is not None:
        content: list[Json] = [{"token_id": token, "logprob": logprob} for logprob, token, *_ in sampled]
        asked = params.get("logprob_token_ids") or []
        for entry, scored in zip(content, meta.get("output_token_ids_logprobs") or [], strict=False):
            found = {entry["token_id"]: entry["logprob"], **{token: value for value, token, *_ in scored or []}}
            top = [{"token_id": token, "logprob": value} for token, value in found.items()]
            entry["top_logprobs"] = top[: len(asked)]
        logprobs = {"content": content}
    choice = {
        "index": 0,
        "finish_reason": reason,
        "stop_reason": stopped,
        "token_ids": tokens,
        "logprobs": logprobs,
        "weight_versions": [{key: span[key] for key in ("version", "start", "end")} for span in spans],
    }
    answer: Json = {"request_id": request["rid"], "choices": [choice]}
    if body.get("return_token_ids"):
        answer |= {"prompt_token_ids": body["token_ids"], "mm_placeholders": None}
    return answer


def _finish(finish: Json, params: Json) -> tuple[str, str | int | None]:
    """Return vLLM's finish_reason and stop_reason. Raises ApiError for NaN logits, which SGLang calls a stop string."""
    kind, matched = finish["type"], finish.get("matched")
    if kind == "abort" and finish.get("status_code") is not None:
        # a fault, not an abort that was asked for
        raise ApiError(int(finish["status_code"]), str(finish.get("message")))
    if kind != "stop":
        return kind, None
    stops = params.get("stop") or []
    if isinstance(matched, str):
        if matched not in ([stops] if isinstance(stops, str) else stops):
            raise ApiError(500, f"SGLang ended the turn: {matched}; the weights may have diverged")
        return kind, matched
    token = matched[-1] if isinstance(matched, list) else matched
    # None for a token that ends the model's own turns
    return kind, token if token in (params.get("stop_token_ids") or []) else None


class WeightUpdates:
    """The updates of one SGLang server. Several requests of our protocol make one update."""

    def __init__(self, sglang: Sglang, on_gpu: bool) -> None:
        self._sglang = sglang
        self.process_group = "nccl" if on_gpu else "gloo"
        """The backend of torch.distributed in which the workers receive a broadcast."""
        self._on_gpu = on_gpu
        self._group: tuple[str, int] | None = None
        """Name of the trainer's and the workers' process group, and the bytes of its buffers."""
        self._session = False  # SGLang's, between begin_weight_update and end_weight_update
        self._loaded = False

    async def join(self, info: Any) -> None:
        """Let SGLang's workers join the trainer's process group, and wait for all; {}, for files, needs none."""
        if not info:
            return
        needed = {"master_address", "master_port", "rank_offset", "world_size", "packed_buffer_size_bytes"}
        if not isinstance(info, dict) or not info.keys() >= needed:
            raise BadRequest(f"init_info: with SGLang, it is {{}} or has {', '.join(sorted(needed))}")
        if self._group is not None:
            await self._sglang.ask("/destroy_weights_update_group", {"group_name": self._group[0]})
            self._group = None
        # a trainer that died may have left SGLang's session open; without one, this answers 400
        await self._sglang.request("POST", "/end_weight_update", {})
        # as in trainers/sync/nccl_sync.py; torch refuses a name twice
        name = f"agentfactory-{int(info['master_port'])}"
        body = {key: info[key] for key in ("master_address", "master_port", "rank_offset", "world_size")}
        await self._sglang.ask(
            "/init_weights_update_group", {**body, "group_name": name, "backend": self.process_group}
        )
        self._group = name, int(info["packed_buffer_size_bytes"])

    async def start(self) -> None:
        """Begin an update. One in progress starts again: all weights must be resent."""
        await self._end_session()
        self._loaded = False

    async def load(self, info: Any) -> None:
        """Load all weights from {"path": FOLDER}, or receive {names, dtype_names, shapes} from the trainer."""
        match info:
            case {"path": str(path), **rest} if not rest:
                if not Path(path).is_dir():
                    problem = f"update_info.path: {path} is not a folder"
                    raise BadRequest(f"{problem}, and SGLang reads a folder of safetensors")
                # the trainer drops the caches in a step of its own
                await self._sglang.ask("/update_weights_from_disk", {"model_path": path, "flush_cache": False})
            case {"names": list(names), "dtype_names": list(dtypes), "shapes": list(shapes)}:
                await self._receive(names, dtypes, shapes)
            case _:
                raise BadRequest('update_info: with SGLang, it is {"path": FOLDER} or {names, dtype_names, shapes}')
        self._loaded = True

    async def finish(self, version: Any) -> None:
        """Finish an update, and name its weights `version` (None: keep the name)."""
        await self._end_session()
        if version is None:
            return
        if not isinstance(version, str):
            raise BadRequest(f"weight_version: {version!r} is not a string")
        if not self._loaded:
            raise BadRequest("weight_version: no weights were updated; POST /update_weights first")
        # by default, SGLang would abort all requests
        await self._sglang.ask("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    async def checksums(self) -> dict[str, str]:
        """Return the checksum of each weight, by worker and name: "FUNCTION:HEX", without dtype and shape, which SGLang
        does not tell. The trainer cannot know which slice a worker of several holds, so these are unknown."""
        body = {"action": "checksum", "selector": "target"}
        ranks = (await self._sglang.ask("/weights_checker", body)).get("ranks") or []
        function = (ON_GPU if self._on_gpu else ON_CPU) if len(ranks) == 1 else UNKNOWN
        found: dict[str, str] = {}
        for rank in ranks:
            place = rank["parallelism_info"][0]
            worker = f"dp0:pp{place['pp_rank']}:pcp0:tp{place['tp_rank']}:"
            found |= {f"{worker}{name}": f"{function}:{checksum}" for name, checksum in rank["checksums"].items()}
        return found

    async def _receive(self, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> None:
        if self._group is None:
            raise BadRequest("update_info: SGLang has joined no process group; POST /init_weight_transfer_engine")
        group, buffer_bytes = self._group
        buckets = list(cut(names, dtypes, shapes, buffer_bytes))
        await self._sglang.ask("/begin_weight_update", {"selector": "target"})
        self._session = True
        for part in buckets:
            body = {
                "names": names[part],
                "dtypes": dtypes[part],
                "shapes": shapes[part],
                "group_name": group,
                "load_format": "flattened_bucket",
                "selector": "target",
                "flush_cache": False,
            }
            await self._sglang.ask("/update_weights_from_distributed", body)

    async def _end_session(self) -> None:
        if self._session:
            await self._sglang.ask("/end_weight_update", {})
            self._session = False


def cut(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]], most: int) -> Iterator[slice]:
    """Yield the slices of the weights that the trainer broadcasts together: a buffer ends with the weight that exceeds
    `most` bytes, as in trainers/sync/nccl_sync.py. Raises ApiError for an unknown dtype, and for weights that SGLang
    could not read in place."""
    if not len(names) == len(dtypes) == len(shapes) > 0:
        raise BadRequest("update_info: names, dtype_names and shapes must be lists of one length, at least 1")
    start = size = 0
    for index, (name, dtype, shape) in enumerate(zip(names, dtypes, shapes, strict=True)):
        if dtype not in _BYTES:
            raise BadRequest(f"update_info: {name} has dtype {dtype!r}, which is not supported with SGLang")
        if size % _BYTES[dtype]:
            raise BadRequest(f"update_info: {name} ({dtype}) would begin at byte {size} of its buffer: not aligned")
        size += math.prod(shape) * _BYTES[dtype]
        if size > most:
            yield slice(start, index + 1)
            start, size = index + 1, 0
    if start < len(names):
        yield slice(start, len(names))
