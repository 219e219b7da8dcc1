"""A turn in SGLang's format: our generate request to the body of SGLang's /generate, and its response back."""

import uuid
from collections.abc import Sequence
from typing import Any

from agentfactory.rollout.inference.sglang.upstream import ApiError, Json

RESERVED_TOKENS = 7
"""Tokens at the end of the context that SGLang gives to no prompt (`TpModelWorker.get_worker_info`)."""

_REQUEST = {"request_id", "token_ids", "sampling_params", "model", "cache_salt", "stream", "return_token_ids"}
_SAME = {
    *("temperature", "stop", "stop_token_ids", "ignore_eos", "logit_bias", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
}
"""Sampling parameters with the same name and meaning in both APIs."""
_OWN = {"max_tokens", "min_tokens", "logprobs", "logprob_token_ids", "skip_reading_prefix_cache"}
_NEUTRAL: dict[str, Any] = {"n": 1, "seed": None, "prompt_logprobs": None, "detokenize": None}
"""Sampling parameters that are accepted only with the value that has no effect."""


def to_sglang(body: Json, max_model_len: int) -> Json:
    """Return the body of SGLang's /generate for one of ours. Raises ApiError for what SGLang cannot do."""
    if body.get("content_parts"):
        raise ApiError(400, "content_parts: images are not supported with SGLang")
    if unknown := body.keys() - _REQUEST - {"content_parts"}:
        raise ApiError(400, f"{min(unknown)}: not supported with SGLang")
    if body.get("stream"):
        raise ApiError(400, "stream: not supported with SGLang")
    ids, params = body.get("token_ids"), body.get("sampling_params")
    if not isinstance(ids, list) or not ids or type(ids[0]) is not int:
        raise ApiError(400, "token_ids: must be a list of at least one token id")
    if not isinstance(params, dict):
        raise ApiError(400, "sampling_params: must be an object")
    for key, value in params.items():
        if key not in _SAME and key not in _OWN and not (key in _NEUTRAL and value == _NEUTRAL[key]):
            raise ApiError(400, f"sampling_params.{key}: {value!r} is not supported with SGLang")
    if len(ids) > max_model_len - RESERVED_TOKENS:
        raise ApiError(
            400,
            f"This model's maximum context length is {max_model_len} tokens, and SGLang keeps {RESERVED_TOKENS} of "
            f"them free. However, your prompt contains {len(ids)} input tokens. Please reduce its length.",
        )
    candidates = params.get("logprob_token_ids") or []
    if params.get("logprobs") not in (None, len(candidates)):
        raise ApiError(
            400, "sampling_params.logprobs: must be 0 (the sampled token only) or the number of logprob_token_ids"
        )
    request: Json = {
        "rid": body.get("request_id") or uuid.uuid4().hex,
        "input_ids": ids,
        "sampling_params": _sampling(params, max_model_len - len(ids)),
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


def _sampling(params: Json, left: int) -> Json:
    stops = params.get("stop") or []
    if not all(isinstance(stop, str) and stop for stop in ([stops] if isinstance(stops, str) else stops)):
        raise ApiError(400, f"sampling_params.stop: {stops!r} is not a list of non-empty strings")
    sampling = {key: value for key, value in params.items() if key in _SAME and value is not None}
    # without it, SGLang ends a turn after 128 tokens
    sampling["max_new_tokens"] = params["max_tokens"] if params.get("max_tokens") is not None else left
    if params.get("min_tokens"):
        sampling["min_new_tokens"] = params["min_tokens"]
    return sampling


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
            entry["top_logprobs"] = _top_logprobs(entry, scored or [], len(asked))
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


def _top_logprobs(sampled: Json, scored: Sequence[Sequence[Any]], count: int) -> list[Json]:
    """Return the scored tokens in vLLM's format: after the sampled token, each once, at most `count`."""
    found = {sampled["token_id"]: sampled["logprob"], **{token: logprob for logprob, token, *_ in scored}}
    return [{"token_id": token, "logprob": logprob} for token, logprob in found.items()][:count]
