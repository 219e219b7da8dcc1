"""A client of OpenAI-compatible chat endpoints (POST /chat/completions)."""

import json
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from agentfactory.base.errors import SettingError
from agentfactory.base.http.proxies import proxy_for
from agentfactory.base.http.retries import Retries, seconds_asked
from agentfactory.base.http.server_keys import pinned
from agentfactory.base.messages import Content, Message, ToolSpec, text_of
from agentfactory.base.processes.interruption import run_interruptibly
from agentfactory.rollout.inference.http_transport import (
    ContextOverflowError,
    InferenceError,
    LostError,
    ServerUnreachableError,
    refusal,
)
from agentfactory.rollout.inference.inference_client import NEEDED_ROUTES, ROUTES_SECONDS, InferenceClient
from agentfactory.rollout.text.parsers.parser import with_json_arguments

logger = logging.getLogger(__name__)

_TRIAL_TOKENS = 16
"""max_tokens of the trial request; some endpoints refuse fewer."""
_LIMIT_REACHED = "max_tokens or model output limit was reached"
"""Text of OpenAI's status 400 for a model that reasoned up to the token limit without answering."""
_NO_CREDIT = "insufficient_quota"
"""Error code of OpenAI's status 429 for an account without credit, which retrying cannot fix."""


class ChatEndpointError(SettingError):
    """An error for chat endpoints and recipes that cannot be combined."""


@dataclass(frozen=True)
class ChatAnswer:
    """An endpoint's answer. `cut`: it ended at a token limit. `sampled` and `length`: the numbers of tokens of the
    answer and of the whole conversation, None if the endpoint does not report them."""

    message: dict[str, Any]
    cut: bool
    sampled: int | None
    length: int | None


def base_url(url: str) -> str:
    """Return the base address of `/chat/completions`: `url`, with /v1 appended if it has no path."""
    return url.rstrip("/") if urlsplit(url).path.strip("/") else url.rstrip("/") + "/v1"


class ChatEndpoint(InferenceClient):
    """An async context manager: a client of one endpoint. `fields` are added to each request, or removed if None."""

    def __init__(
        self, url: str, model: str | None, api_key_env: str | None, retry_seconds: float, fields: dict[str, Any]
    ):
        super().__init__(base_url(url), api_key_env, retry_seconds, proxy_for(url))
        self._given = pinned(url.rstrip("/"))
        self.model = model or ""
        self._fields = fields
        self._limit_field = "max_tokens"

    async def token_models(self) -> list[dict[str, Any]] | None:
        """Return the models in the server's /v1/models if its routes accept token ids, as on AgentFactory's own
        servers; otherwise, and for an address with a path such as /v1, None. Raise ServerUnreachableError."""
        root = self._given
        if root == self.urls[0]:
            return None
        try:
            status, text = await self._try(root, "GET", root + "/openapi.json")
            paths = set(json.loads(text)["paths"]) if status == 200 else set()
        except (ValueError, KeyError, TypeError, RecursionError):
            return None  # a web page, not an API
        return await self.connection.models(root) if set(NEEDED_ROUTES) <= paths else None

    async def check_routes(self, seconds: float = ROUTES_SECONDS) -> None:
        """Look up the model's name if none was given. Raise ChatEndpointError unless the endpoint lists exactly one."""
        if self.model:
            return
        url = self.urls[0] + "/models"
        try:
            status, text = await self._try(self.urls[0], "GET", url)
            cards = json.loads(text)["data"] if status == 200 else []
            names = [str(card["id"]) for card in cards if not card.get("parent")]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ChatEndpointError("--model", f"{url} returned no list of models ({error!r})", "set it") from None
        if status in (401, 403):
            raise _denied(url, status, text)
        if len(names) != 1:
            problem = f"{url} answered {status}" if status != 200 else f"{url} lists {', '.join(names[:10]) or 'none'}"
            raise ChatEndpointError("--model", problem, "name the model to use")
        self.model = names[0]

    async def try_out(self, specs: Sequence[ToolSpec], temperatures: Iterable[float]) -> None:
        """Send a short request with tools at each temperature, and raise ChatEndpointError or ServerUnreachableError
        for what would fail every chain. If the endpoint requires max_completion_tokens, later requests use it."""
        url = self.urls[0] + "/chat/completions"
        messages = [{"role": "user", "content": "Say hello."}]
        tried: list[dict[str, Any]] = []
        for temperature in temperatures:
            body = self._body(messages, specs, temperature, _TRIAL_TOKENS)
            if body in tried:
                continue  # eval.request sets the temperature
            status, text = await self._try(url, "POST", url, json.dumps(body).encode())
            if self._names_limit_otherwise(status, text, body):
                body = self._body(messages, specs, temperature, _TRIAL_TOKENS)
                status, text = await self._try(url, "POST", url, json.dumps(body).encode())
            self._check_trial(url, status, text, bool(specs))
            tried.append(body)

    async def _try(self, server: str, method: str, url: str, body: bytes | None = None) -> tuple[int, str]:
        try:
            return (await self.connection.request(method, url, body))[:2]
        except LostError as error:
            raise ServerUnreachableError(f"no server answers at {server}: {error}") from error

    def _names_limit_otherwise(self, status: int, text: str, body: dict[str, Any]) -> bool:
        """Return whether the endpoint refused `max_tokens`; if so, later requests use max_completion_tokens."""
        if status != 400 or "max_completion_tokens" not in text or "max_tokens" not in body:
            return False
        logger.info("%s requires max_completion_tokens instead of max_tokens", self.model)
        self._limit_field = "max_completion_tokens"
        return True

    def _check_trial(self, url: str, status: int, text: str, tools: bool) -> None:
        if status == 200:
            try:
                _answer(text)
            except InferenceError as error:
                raise ChatEndpointError("--url", f"{url}: {error}", "use OpenAI's chat API") from error
        if status in (401, 403):
            raise _denied(url, status, text)
        no_tools = tools and "tool" in text.lower()
        # transient errors may be gone when chains run; llama.cpp answers 500 if it does not support tools
        final = (status < 200 or 300 <= status < 500) and not _heals(status, text) and _LIMIT_REACHED not in text
        if final or (status == 500 and no_tools):
            fix = "set eval.request to parameters that it accepts, such as {reasoning_effort: low}"
            if 300 <= status < 400:
                text, _, its_fix = text.partition("; fix: ")
                fix = its_fix or "write the address that it redirects to"
            elif "temperature" in text:
                fix = "use the model's default: eval.request={temperature: null} eval.greedy=false"
            elif _NO_CREDIT in text:
                fix = "buy more credit, or use the key of another account"
            elif no_tools:
                fix = "enable tools on the endpoint: vLLM with --enable-auto-tool-choice --tool-call-parser NAME, "
                fix += "llama.cpp with --jinja"
            elif status == 404:
                fix = "check that it serves OpenAI's chat API and this --model"
            raise ChatEndpointError("--url", f"{url} answered {status} for {self.model!r}: {text[:300]}", fix)

    async def ask(
        self, messages: Sequence[Message], specs: Sequence[ToolSpec], temperature: float, max_tokens: int
    ) -> ChatAnswer:
        """Request the next message, with retries for `server.retry_seconds`. Raise as InferenceClient.generate does."""
        url = self.urls[0] + "/chat/completions"
        retries = Retries(self._limit)
        while True:
            body, asked = self._body(messages, specs, temperature, max_tokens), 0.0
            try:
                status, text, headers = await self.connection.request("POST", url, json.dumps(body).encode())
            except LostError as error:
                problem = str(error)
            else:
                if status == 200:
                    self.router.last_success = time.monotonic()
                    return _answer(text)
                if self._names_limit_otherwise(status, text, body):
                    continue
                if status == 400 and _LIMIT_REACHED in text:
                    return ChatAnswer({"role": "assistant", "content": ""}, True, max_tokens, None)
                refused = refusal(status, text)
                if not _heals(status, text) or isinstance(refused, ContextOverflowError):
                    raise refused
                problem = f"the endpoint answered {status}: {text[:500]}"
                asked = seconds_asked(headers.get("Retry-After", ""))
            await self._wait_to_retry(retries, url, problem, asked)

    def _body(
        self, messages: Sequence[Message], specs: Sequence[ToolSpec], temperature: float, max_tokens: int
    ) -> dict[str, Any]:
        tools = {"tools": [spec.to_openai() for spec in specs]} if specs else {}
        sampling = {"temperature": temperature, self._limit_field: max_tokens}
        sent = [_to_openai(message) for message in messages]
        whole = {"model": self.model, "messages": sent, **tools, **sampling, **self._fields}
        return {key: value for key, value in whole.items() if value is not None}


def _heals(status: int, text: str) -> bool:
    return status >= 500 or (status == 429 and _NO_CREDIT not in text)


def _denied(url: str, status: int, text: str) -> ChatEndpointError:
    fix = "name the environment variable that holds the key: server.api_key_env=NAME"
    return ChatEndpointError("--url", f"{url} answered {status}: {text[:300]}", fix)


def _to_openai(message: Message) -> Message:
    """Convert a message for OpenAI's API: without internal fields and reasoning, and with images of the user only."""
    content: Content = message.get("content") or ""
    if message["role"] != "user":
        content = text_of(content)
    sent: Message = {"role": message["role"], "content": content}
    if message["role"] == "tool":
        sent["tool_call_id"] = message["tool_call_id"]
    if calls := message.get("tool_calls"):
        sent["tool_calls"] = [with_json_arguments(call) for call in calls]
        sent["content"] = content or None
    return sent


def _answer(text: str) -> ChatAnswer:
    try:
        data = json.loads(text)
        choice, usage = data["choices"][0], data.get("usage") or {}
        message, reason = choice["message"], choice.get("finish_reason")
        if not isinstance(message, dict) or not isinstance(message.get("content") or "", str | list):
            raise TypeError(f"message is {message!r}")
        if not isinstance(message.get("tool_calls") or [], list):
            raise TypeError(f"tool_calls is {message['tool_calls']!r}")
        sampled, length = (_count(usage.get(name)) for name in ("completion_tokens", "total_tokens"))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise InferenceError(f"the endpoint's answer is not a chat completion: {error!r}: {text[:300]}") from error
    if reason not in (None, "stop", "length", "tool_calls", "function_call"):
        raise InferenceError(f"the endpoint ended its answer with finish_reason={reason!r}")
    return ChatAnswer(message, reason == "length", sampled, length)


def _count(tokens: Any) -> int | None:
    if tokens is not None and (type(tokens) is not int or not 0 <= tokens < 1 << 40):
        raise TypeError(f"a token count in usage is {tokens!r}")
    return tokens


def look_at(url: str, model: str | None, api_key_env: str | None) -> list[dict[str, Any]] | str:
    """Return the models that the server at `url` lists if it accepts token ids; for a chat endpoint, the model
    to use: `model`, or the only one that it lists. Blocking. Raise ChatEndpointError or ServerUnreachableError."""

    async def look() -> list[dict[str, Any]] | str:
        async with ChatEndpoint(url, model, api_key_env, 0.0, {}) as endpoint:
            cards = await endpoint.token_models()
            if cards is None:
                await endpoint.check_routes()
            return endpoint.model if cards is None else cards

    return run_interruptibly(look())
