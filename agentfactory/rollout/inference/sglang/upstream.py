"""HTTP to one SGLang server, and the checks of its settings and log-probabilities before it serves a run."""

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
import msgspec

from agentfactory.base.errors import SettingError
from agentfactory.base.http.clients import answer_within, open_session
from agentfactory.rollout.inference.http_server import ApiError, Json

_IDLE_SECONDS = 4.0
"""uvicorn closes idle connections after 5 s."""
_ANSWER_BYTES = 1 << 28
"""Maximum size of an answer; the largest are the log-probabilities of a long prompt."""
FIELD = "server.options.attach"
_CANDIDATES = [0, 1, 2, 3]
"""Tokens whose log-probabilities are compared between temperatures; every vocabulary has them."""
_ANSWERS_WITHIN = 30.0
"""Seconds within which its settings must arrive; while it computes a long prompt, they wait."""


class SglangGoneError(ApiError):
    """An SGLang server that does not answer; our clients take status 503 as that of a lost server."""


class Sglang:
    """Connections to one SGLang server; use it as an async context manager. Requests raise SglangGoneError."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    async def __aenter__(self) -> Self:
        # always direct, as all requests to inference servers
        self._session = open_session(None, _IDLE_SECONDS, headers=self._headers)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def request(self, method: str, path: str, body: Json | None = None) -> tuple[int, str]:
        """Send a request without a time limit; return the response's status and text."""
        data = None if body is None else msgspec.json.encode(body)
        try:
            # no limit: a turn takes minutes, and an update waits for the trainer's broadcast
            limit = aiohttp.ClientTimeout(total=None, sock_connect=30.0)
            async with self._session.request(
                method, self.url + path, data=data, timeout=limit, allow_redirects=False
            ) as response:
                return response.status, (await answer_within(response, _ANSWER_BYTES)).decode(errors="replace")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise SglangGoneError(503, f"SGLang at {self.url} does not answer: {error or repr(error)}") from error

    async def ask(self, path: str, body: Json | None = None) -> Json:
        """Get `path`, or post a JSON object to it; return the response if it is an object, else {}. Raises ApiError
        with SGLang's message, also if the response reports no success."""
        status, text = await self.request("GET" if body is None else "POST", path, body)
        answer: Any = None
        with suppress(json.JSONDecodeError):
            answer = json.loads(text)
        answer = answer if isinstance(answer, dict) else {}
        if status == 200 and answer.get("success") is not False:
            return answer
        error = answer.get("error")
        told = (error.get("message") if isinstance(error, dict) else error) or answer.get("message") or text
        raise ApiError(status if status != 200 else 400, f"SGLang's {path} answered {status}: {str(told)[:500]}")


@dataclass(frozen=True)
class Served:
    """The properties of an SGLang server that the front needs: the path or name of the model that it has loaded, its
    context length, the number of processes that hold parts of the model, and their device."""

    model: str
    max_model_len: int
    workers: int
    on_gpu: bool


async def attach(sglang: Sglang) -> Served:
    """Check that a running server can serve a run, and return its properties. Raises SettingError."""
    try:
        async with asyncio.timeout(_ANSWERS_WITHIN):
            info, model = await sglang.ask("/server_info"), await sglang.ask("/model_info")
            cards = (await sglang.ask("/v1/models"))["data"]
        replicas, quantization, mode = info["dp_size"], info["quantization"], info["disaggregation_mode"]
        faults = (
            (not model["is_generation"], "it serves no generation"),
            (replicas != 1, f"it has {replicas} data-parallel replicas, whose weights SGLang updates only from disk"),
            (quantization is not None, f"its weights are quantised ({quantization}), and cannot be proven"),
            (mode != "null", f"it is a {mode} server of several that share turns"),
        )
        for found, fault in faults:
            if found:
                raise SettingError(FIELD, f"got {sglang.url}, but {fault}", "start SGLang without this setting")
        workers = int(info["tp_size"]) * int(info["pp_size"])
        served = Served(model["model_path"], int(cards[0]["max_model_len"]), workers, info["device"] != "cpu")
        # a trainer that died may have left it paused, and the first sync replaces its weights
        await sglang.ask("/continue_generation", {})
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


async def _check_turns(sglang: Sglang) -> None:
    """Raise SettingError if turns report no weight versions, or log-probabilities before temperature: those of a
    distribution that is not uniform stay as they are at another one."""
    scores = []
    for temperature in (0.5, 2.0):
        sampling = {"temperature": temperature, "max_new_tokens": 1, "ignore_eos": True}
        request = {"input_ids": [1, 2], "sampling_params": sampling, "return_logprob": True}
        meta = (await sglang.ask("/generate", {**request, "token_ids_logprob": _CANDIDATES}))["meta_info"]
        scores.append([entry[0] for entry in meta["output_token_ids_logprobs"][0]])
        if meta.get("weight_versions") is None:
            problem = f"{sglang.url} does not report which weights sampled a token (weight_versions)"
            raise SettingError(FIELD, problem, "start SGLang 0.5.23 or newer there")
    sharp, flat = scores
    if sharp == flat and len(set(sharp)) > 1:
        problem = f"{sglang.url} returns log-probabilities before temperature"
        raise SettingError(FIELD, problem, "start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB")
