"""Checks of an SGLang server before it serves a run: its settings, and how it computes log-probabilities."""

import asyncio
from dataclasses import dataclass

from agentfactory.base.errors import SettingError
from agentfactory.rollout.inference.sglang.upstream import ApiError, Json, Sglang, SglangGoneError

FIELD = "server.options.attach"
_CANDIDATES = [0, 1, 2, 3]
"""Tokens whose log-probabilities are compared between temperatures; every vocabulary has them."""
_ANSWERS_WITHIN = 30.0
"""Seconds within which its settings must arrive; while it computes a long prompt, they wait."""


@dataclass(frozen=True)
class Served:
    """The properties of an SGLang server that the front needs."""

    model: str
    """The path or name of the model that it has loaded."""
    max_model_len: int
    workers: int
    """Processes that hold parts of the model."""
    on_gpu: bool


async def attach(sglang: Sglang) -> Served:
    """Check that a running server can serve a run, and return its properties. Raises SettingError."""
    try:
        async with asyncio.timeout(_ANSWERS_WITHIN):
            info, model = await sglang.get("/server_info"), await sglang.get("/model_info")
            cards = (await sglang.get("/v1/models"))["data"]
        _check(sglang.url, info, model)
        workers = int(info["tp_size"]) * int(info["pp_size"])
        served = Served(model["model_path"], int(cards[0]["max_model_len"]), workers, info["device"] != "cpu")
        # a trainer that died may have left it paused, and the first sync replaces its weights
        await sglang.post("/continue_generation", {})
        await _check_turns(sglang)
    except SettingError:
        raise
    except TimeoutError as error:
        problem = f"{sglang.url} accepts connections, but has not answered within {_ANSWERS_WITHIN:.0f} s"
        raise SettingError(FIELD, problem, "see that server's log, or correct the address") from error
    except SglangGoneError as error:
        raise SettingError(FIELD, str(error), "start SGLang there, or correct the address") from error
    except (ApiError, KeyError, IndexError, TypeError, ValueError) as error:
        fix = "start SGLang 0.5.23 or newer there; a server with a key needs it in server.api_key_env"
        told = str(error) if isinstance(error, ApiError) else repr(error)
        raise SettingError(FIELD, f"{sglang.url} does not answer as SGLang: {told}", fix) from error
    return served


def _check(url: str, info: Json, model: Json) -> None:
    """Raise SettingError for settings with which SGLang cannot train."""
    faults = {
        "it serves no generation": not model["is_generation"],
        f"it has {info['dp_size']} data-parallel replicas, whose weights SGLang updates only from disk": (
            info["dp_size"] != 1
        ),
        f"its weights are quantised ({info['quantization']}), and cannot be proven": info["quantization"] is not None,
        f"it is a {info['disaggregation_mode']} server of several that share turns": (
            info["disaggregation_mode"] != "null"
        ),
    }
    for fault, found in faults.items():
        if found:
            raise SettingError(FIELD, f"got {url}, but {fault}", "start SGLang without this setting")


async def _check_turns(sglang: Sglang) -> None:
    """Raise SettingError if turns report no weight versions, or log-probabilities before temperature: those of a
    distribution that is not uniform stay as they are at another one."""
    scores = []
    for temperature in (0.5, 2.0):
        sampling = {"temperature": temperature, "max_new_tokens": 1, "ignore_eos": True}
        request = {"input_ids": [1, 2], "sampling_params": sampling, "return_logprob": True}
        meta = (await sglang.post("/generate", {**request, "token_ids_logprob": _CANDIDATES}))["meta_info"]
        scores.append([entry[0] for entry in meta["output_token_ids_logprobs"][0]])
        if meta.get("weight_versions") is None:
            problem = f"{sglang.url} does not report which weights sampled a token (weight_versions)"
            raise SettingError(FIELD, problem, "start SGLang 0.5.23 or newer there")
    sharp, flat = scores
    if sharp == flat and len(set(sharp)) > 1:
        problem = f"{sglang.url} returns log-probabilities before temperature"
        raise SettingError(FIELD, problem, "start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB")
