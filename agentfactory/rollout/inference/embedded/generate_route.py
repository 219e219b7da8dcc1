"""Requests and responses of vLLM's generate route: JSON to engine requests, and sampled tokens back to JSON."""

import random
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from agentfactory.base.messages import is_finite_number
from agentfactory.rollout.inference.embedded.adapters import Adapter
from agentfactory.rollout.inference.embedded.engine import Engine
from agentfactory.rollout.inference.embedded.sampling import HeldImage, Request
from agentfactory.rollout.inference.http_server import BadRequest, Json
from agentfactory.rollout.text.stop_strings import Decode, StopWatch

# Supported sampling parameters, and parameters accepted only with the value that has no effect.
_SAMPLING = {
    *("temperature", "top_k", "top_p", "max_tokens", "logprobs", "stop_token_ids", "ignore_eos", "seed"),
    *("logprob_token_ids", "logit_bias", "skip_reading_prefix_cache", "stop", "prompt_logprobs"),
    "routed_experts_prompt_start",  # of routed experts, which are not returned
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n", "repetition_penalty"), (1,)),
    **dict.fromkeys(("min_p", "min_tokens", "presence_penalty", "frequency_penalty"), (0,)),
    **dict.fromkeys(("skip_special_tokens", "detokenize"), (True, False)),  # no text is returned
}
_REQUEST = {
    *("request_id", "token_ids", "sampling_params", "model", "stream", "cache_salt"),
    *("content_parts", "return_token_ids", "priority"),
}
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    # logits over less than that overflow
    "temperature": (lambda value: is_finite_number(value) and (value == 0 or value >= 1e-5), "0, or at least 1e-5"),
    "top_k": (lambda value: type(value) is int and value >= -1, "an integer of at least 1, or -1 or 0 for all"),
    "top_p": (lambda value: is_finite_number(value) and 0 < value <= 1, "a number above 0, and at most 1"),
    "max_tokens": (lambda value: type(value) is int and value >= 1, "an integer of at least 1"),
    "prompt_logprobs": (lambda value: type(value) is int and value >= 0, "an integer of at least 0"),
    "seed": (lambda value: type(value) is int, "an integer"),
}
"""Sampling parameter -> whether a value is valid, and what it must be."""


def make_request(
    body: Json,
    adapter: Adapter | None,
    engine: Engine,
    eos_token_ids: frozenset[int],
    on_finish: Callable[[Request], None],
    held: Sequence[HeldImage] = (),
    decode: Decode | None = None,
) -> Request:
    """Create the request for `engine`, with the images of its content parts. `decode` converts ids to text; None if the
    model has no tokenizer. Raises ApiError if the engine does not support something in the body."""
    if unknown := body.keys() - _REQUEST:
        raise BadRequest(f"{min(unknown)}: not supported by the embedded engine")
    if body.get("stream"):
        raise BadRequest("stream: not supported by the embedded engine")
    prompt, limit = _token_ids(body.get("token_ids"), "token_ids", engine.vocab_size), engine.max_model_len
    if not len(prompt):
        raise BadRequest("token_ids: must contain at least one token")
    images = None
    if engine.encoder is not None:
        try:
            prompt, images = engine.encoder.images.place(prompt.tolist(), held)
        except ValueError as error:
            raise BadRequest(f"content_parts: {error}") from error
    if len(prompt) >= limit:
        raise BadRequest(
            f"This model's maximum context length is {limit} tokens. However, your prompt contains {len(prompt)} "
            "input tokens, which leaves no room for output tokens. Please reduce the length of the input prompt.",
        )
    params = body.get("sampling_params")
    if not isinstance(params, dict):
        raise BadRequest("sampling_params: must be an object")
    for key, value in params.items():
        if key not in _SAMPLING and value not in _NEUTRAL.get(key, ()):
            only = f"; only {' or '.join(map(str, _NEUTRAL[key]))} is" if key in _NEUTRAL else ""
            raise BadRequest(f"sampling_params.{key}: {value!r} is not supported by the embedded engine{only}")
    for key, (is_valid, what) in _VALUES.items():
        if params.get(key) is not None and not is_valid(params[key]):
            raise BadRequest(f"sampling_params.{key}: {params[key]!r} is not {what}")
    temperature = params.get("temperature")
    scored_ids = params.get("logprob_token_ids") or []
    candidates = _token_ids(scored_ids, "sampling_params.logprob_token_ids", engine.vocab_size).tolist()
    if params.get("logprobs") not in (None, len(candidates), len(candidates) or 1):
        told = "must be 0 or 1 (the sampled token only) or the number of logprob_token_ids"
        raise BadRequest(f"sampling_params.logprobs: {told}")
    scored, salt = params.get("prompt_logprobs"), body.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise BadRequest(f"cache_salt: {salt!r} is not a non-empty string")
    if type(priority := body.get("priority", 0)) is not int:
        raise BadRequest(f"priority: {priority!r} is not an integer")
    stop = frozenset(_token_ids(params.get("stop_token_ids") or [], "sampling_params.stop_token_ids").tolist())
    return Request(
        prompt=prompt,
        max_tokens=params.get("max_tokens") or limit,
        on_finish=on_finish,
        temperature=1.0 if temperature is None else float(temperature),
        top_k=max(0, params.get("top_k") or 0),
        top_p=float(params.get("top_p") or 1.0),
        watch=_stop_watch(params.get("stop"), decode),
        stop=stop if params.get("ignore_eos") else stop | eos_token_ids,
        generator=random.Random(params.get("seed")),
        adapter=adapter,
        candidates=candidates,
        logit_bias=_logit_bias(params.get("logit_bias"), engine.vocab_size),
        images=images,
        fresh=bool(params.get("skip_reading_prefix_cache")) or scored is not None,
        cache_salt=salt,
        prompt_logprobs=scored,
        priority=priority,
    )


def answer(body: Json, request: Request, eos_token_ids: frozenset[int]) -> Json:
    """Create the response to `body`, whose `request` has ended."""
    tokens = request.tokens
    logprobs = None
    if body["sampling_params"].get("logprobs") is not None:
        content = [_scored(token, logprob) for token, logprob in zip(tokens, request.logprobs, strict=True)]
        logprobs = {"content": content}
        for entry, candidates in zip(content, request.candidate_logprobs, strict=False):
            listed = {entry["token_id"]: entry["logprob"], **dict(zip(request.candidates, candidates, strict=True))}
            entry["top_logprobs"] = [_scored(*pair) for pair in listed.items()][: len(candidates)]
    ends = [start for _, start in request.versions[1:]] + [len(tokens)]
    stopped = request.finish_reason == "stop" and request.stop_string is None and tokens[-1] not in eos_token_ids
    choice = {
        "index": 0,
        "finish_reason": request.finish_reason,
        "stop_reason": tokens[-1] if stopped else request.stop_string,
        "token_ids": tokens,
        "logprobs": logprobs,
        "weight_versions": [
            {"version": version, "start": start, "end": end}
            # a request that ended before its first token has no version
            for (version, start), end in zip(request.versions, ends, strict=False)
        ],
    }
    answered = {"request_id": body.get("request_id") or uuid.uuid4().hex, "choices": [choice]}
    if request.prompt_logprobs is not None:
        answered["prompt_logprobs"] = _prompt_logprobs(request)
    if body.get("return_token_ids"):
        spans = request.images.spans if request.images else []
        places = [{"offset": span.offset, "length": span.length} for span in spans]
        answered |= {"prompt_token_ids": request.token_ids, "mm_placeholders": {"image": places} if places else None}
    return answered


def _prompt_logprobs(request: Request) -> list[Json | None]:
    """Return {id: {logprob, rank}} per prompt token but the first, as vLLM: of the token itself and the likely ones."""
    listed: list[Json | None] = [None]
    for place, token in enumerate(request.token_ids[1:], 1):
        score = request.prompt_scores.get(place)
        if score is None:  # aborted before
            break
        ranked = zip(score.likely, score.logprobs, range(1, len(score.likely) + 1), strict=True)
        found = {token: (score.logprob, score.rank), **{other: (logprob, rank) for other, logprob, rank in ranked}}
        # vLLM writes -inf, which is no JSON, as this
        floored = ((str(token), max(logprob, -9999.0), rank) for token, (logprob, rank) in found.items())
        listed.append({name: {"logprob": p, "rank": rank, "decoded_token": None} for name, p, rank in floored})
    return listed


def _scored(token: int, logprob: float) -> Json:
    """Return a token and its log-probability, under the names of vLLM's newer (token_id) and older (token) servers:
    renderers 0.1, the client of verifiers and prime-rl, reads the older."""
    return {"token_id": token, "token": f"token_id:{token}", "logprob": max(logprob, -9999.0)}


def _logit_bias(value: Any, vocab_size: int) -> dict[int, float]:
    try:
        bias = {int(token): added for token, added in (value or {}).items()}
        # beyond, float32 overflows
        valid = all(0 <= token < vocab_size and is_finite_number(b) and abs(b) <= 1e30 for token, b in bias.items())
    except (AttributeError, ValueError, OverflowError):
        valid = False
    if not valid:
        told = f"must map tokens from 0 to {vocab_size - 1} to numbers from -1e30 to 1e30"
        raise BadRequest(f"sampling_params.logit_bias: {told}")
    return bias


def _stop_watch(value: Any, decode: Decode | None) -> StopWatch | None:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise BadRequest(f"sampling_params.stop: {value!r} is not a list of non-empty strings")
    if stops and decode is None:
        raise BadRequest("sampling_params.stop: stop strings need a tokenizer, and the model's folder has none")
    return StopWatch(stops, decode) if stops and decode else None


def _token_ids(value: Any, name: str, vocab_size: int | None = None) -> np.ndarray:
    if isinstance(value, list):
        if not value:
            return np.empty(0, np.int64)
        try:
            array = np.asarray(value)
        except ValueError:  # nested lists of different lengths
            array = np.empty((0, 0))
        if array.ndim == 1 and array.dtype.kind == "i":
            if vocab_size is not None and not (array.min() >= 0 and array.max() < vocab_size):
                raise BadRequest(f"{name}: must be from 0 to {vocab_size - 1}")
            return array
    raise BadRequest(f"{name}: must be a list of integers")
