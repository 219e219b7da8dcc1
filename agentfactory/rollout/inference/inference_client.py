"""The inference client: token ids in, sampled token ids out, over the HTTP routes of one or several servers."""

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import msgspec

from agentfactory.base.http.proxies import Proxy
from agentfactory.base.http.retries import Retries
from agentfactory.base.http.server_keys import pinned
from agentfactory.base.run_notices import notify
from agentfactory.rollout.inference.http_transport import (
    Connection,
    ContextOverflowError,
    InferenceError,
    LostError,
    RefusedError,
    ServerUnreachableError,
    missing_routes,
    refusal,
)
from agentfactory.rollout.inference.routing import PrefixTokens, Recovery, Replica, Router, ServerState
from agentfactory.rollout.inference.server_metrics import LOAD_FIX, Load
from agentfactory.rollout.inference.stalls import StallWatch
from agentfactory.rollout.token_row import LARGEST_LOGPROB, LEAST_LOGPROB, Span

if TYPE_CHECKING:
    from agentfactory.rollout.images.image_intake import RequestImages, SentImages

logger = logging.getLogger(__name__)

GENERATE = "/inference/v1/generate"
NEEDED_ROUTES = (GENERATE, "/health", "/v1/models")
LOAD_SECONDS = 10.0
"""Timeout of a request for metrics."""
ROUTES_SECONDS = 60.0
_PAGE = "docs/servers.md"


@dataclass(frozen=True)
class Completion:
    """One turn: its token ids, their log-probabilities after temperature, and the weights that sampled them. `cut` is
    true if a token limit ended it. `mask` is 1 for sampled tokens and 0 for inserted ones, such as a forced beginning,
    which are context with log-probability 0."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[Span]
    cut: bool
    mask: list[int]
    stop: str | None = None
    """The stop string at which the server ended the turn."""
    prompt_logprobs: Any = None
    """The server's scores of the prompt, unchecked; None if they were not asked for."""

    def beginning(self, count: int) -> "Completion":
        spans = [replace(span, end=min(span.end, count)) for span in self.versions if span.start < count]
        return Completion(self.token_ids[:count], self.logprobs[:count], spans, False, self.mask[:count])


class EncodedIds:
    """An incremental JSON encoder of a row's ids. Encoding all of 16 thousand ids at each turn would take 0.2 ms."""

    def __init__(self) -> None:
        self._json = bytearray()
        self._count = 0

    def of(self, ids: Sequence[int]) -> bytearray:
        """Return the JSON of `ids` without brackets. `ids` must begin with the ids of the last call."""
        if len(ids) < self._count:
            raise ValueError(f"the row must not shrink: it had {self._count} tokens, and now has {len(ids)}")
        if new := ids[self._count :]:
            self._json += b"," * (self._count > 0) + msgspec.json.encode(new)[1:-1]
            self._count = len(ids)
        return self._json


class InferenceClient:
    """A client that sends turns to the servers; use it as an async context manager. `Router` chooses the replica,
    `Recovery` brings back a server that is lost or has other weights, and `StallWatch` detects one that produces no
    tokens."""

    def __init__(
        self,
        urls: str | Sequence[str],
        api_key_env: str | None = None,
        retry_seconds: float = 300.0,
        proxy: Proxy | None = None,
        section: str = "server",
    ):
        """Recoverable failures are retried for `retry_seconds`. Without `proxy`, the servers are reached directly,
        whatever the environment says. `section` is the section of the recipe that errors name."""
        self.urls = [pinned(url.rstrip("/")) for url in ([urls] if isinstance(urls, str) else urls)]
        self._limit = retry_seconds
        self.router = Router(self.urls)
        self.prefixes = PrefixTokens()
        self.connection = Connection(api_key_env, proxy, section)
        self.recovery = Recovery(self.connection, self.router, retry_seconds)
        # a run's trainer pauses its own server, and resumes it; nobody does that for a teacher's
        self._is_own = section == "server"
        self._stalls = StallWatch(self.connection, retry_seconds, patient=self._is_own)
        self._sent: dict[tuple[str, int | None], SentImages] = {}
        """Server and replica -> images that it holds."""

    async def __aenter__(self) -> Self:
        await self.connection.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stalls.close()
        await self.recovery.close()
        await self.connection.__aexit__(*exception)

    async def check_routes(self, seconds: float = ROUTES_SECONDS) -> None:
        """Check that each server describes the routes that rollouts need. Raises ServerUnreachableError."""
        for url in self.urls:
            try:
                status, text, _ = await self.connection.request("GET", url + "/openapi.json", seconds=seconds)
                if status == 401:
                    raise ServerUnreachableError(f"server {url} answered 401: {self.connection.lacking_key(url)}")
                if status != 200:
                    raise ServerUnreachableError(
                        f"server {url} answered {status} to /openapi.json; is it an inference server?"
                    )
                described = json.loads(text)
                paths = described.get("paths", {}) if isinstance(described, dict) else None
                if not isinstance(paths, dict):
                    raise ValueError(f"not an OpenAPI description: {text[:200]}")
                if problem := missing_routes(url, list(paths), NEEDED_ROUTES):
                    raise ServerUnreachableError("; ".join(problem))
                cards = await self.connection.models(url)
                self.recovery.base_models |= {card["id"] for card in cards if not card.get("parent")}
                if not await self.connection.is_guarded(url):
                    text = f"server {url} accepts requests without a key: anyone who reaches it can change its weights"
                    notify(logger, f"{url} has no key", f"{text}; start it with `agentfactory serve`", see=_PAGE)
                try:
                    await self.recovery.count_replicas(url)
                except ValueError as error:
                    unknown = "stalls cannot be detected, nor the number of replicas and the size of their caches"
                    text = f"server {url} does not report its load ({error}): {unknown}"
                    notify(logger, f"{url} reports no load", f"{text}; {LOAD_FIX}", see=_PAGE)
            except LostError as error:
                own = "set server.url=null to start one here" if self._is_own else "correct teacher.url"
                fix = f"start it (agentfactory serve RECIPE), or {own}"
                raise ServerUnreachableError(f"no server answers at {url}: {error}; fix: {fix}") from error
            except (ValueError, RecursionError) as error:
                raise ServerUnreachableError(f"server {url} answered invalid JSON to /openapi.json: {error}") from error

    async def generate(
        self,
        token_ids: Sequence[int],
        model: str,
        sampling: dict[str, Any],
        cache_salt: str | None = None,
        chain: str = "",
        images: "RequestImages | None" = None,
        encoded: EncodedIds | None = None,
        priority: int = 0,
    ) -> Completion:
        """Sample one turn of `chain` after `token_ids` with the weights called `model`. Requests with different
        `cache_salt` share no cache. `images` are the images in `token_ids`; `encoded` has the JSON of earlier requests,
        whose ids `token_ids` begin with. A lost turn is sampled again from the same ids, on another server if
        necessary; a paused or sleeping server is waited for. Raises ContextOverflowError or InferenceError for a
        refused request, ServerUnreachableError if no server has answered for `retry_seconds`."""
        # only a server's search for stop strings needs text
        own = {"logprobs": 0, "detokenize": bool(sampling.get("stop"))}
        request: dict[str, Any] = {"model": model, "sampling_params": {**own, **sampling}}
        request |= {"cache_salt": cache_salt} if cache_salt is not None else {}
        request |= {"priority": priority} if priority else {}
        if images is not None:
            request |= {"token_ids": images.collapsed(), "return_token_ids": True}
        else:
            ids = (encoded or EncodedIds()).of(token_ids)
            body = b"".join((b'{"token_ids":[', ids, b"],", msgspec.json.encode(request)[1:]))
        # the answer has what is sampled, and with `prompt_logprobs` the listed tokens of each id, each in less than 512
        # bytes of JSON
        scored = sampling.get("prompt_logprobs")
        entries = sampling.get("max_tokens", 0) + len(token_ids) * (1 if scored is None else scored + 2)
        most = (1 << 20) + 512 * entries
        oldest = self.recovery.published
        retries = Retries(self._limit)
        failed_at = set[str]()
        while True:
            replica = await self.recovery.take(chain, token_ids, failed_at)
            url = replica.url
            if images is not None:
                parts = await images.parts(self._sent_to(url, replica.rank))
                body = msgspec.json.encode({**request, "content_parts": parts})
            self.router.load[replica] += 1
            lost = None
            try:
                async with self._stalls.request(replica):
                    status, text, _ = await self.connection.request(
                        "POST", url + GENERATE, body, replica=replica.rank, most=most
                    )
            except LostError as error:
                lost = str(error)
            finally:
                self.router.load[replica] -= 1
            if lost is not None:
                self.recovery.lose(url, lost)
                # a healthy server that drops every turn counts as back immediately
                await self._wait_to_retry(retries, url, lost)
                continue
            completion = None
            if status == 200:
                self.router.last_success = time.monotonic()
                completion = _completion(text)
                if images is not None:
                    self._sent_to(url, replica.rank).note(images.spans)
                    if completion and (fault := images.fault(_decoded(text).get("prompt_token_ids"))):
                        raise InferenceError(fault)
            unanswered = status == 503 or (status == 200 and completion is None)
            if unanswered and self._is_own and await self.recovery.held_back(url):
                # waiting is not a failure, however long it took
                retries = Retries(self._limit)
                continue
            if status == 200:
                if completion is None:
                    problem = "the server aborted the request"
                elif self.recovery.is_current(completion.versions, model, oldest):
                    self.prefixes.note(chain, token_ids, (model, oldest), len(completion.token_ids))
                    return completion
                else:
                    problem = f"it sampled with {completion.versions[0].version}, not with {oldest and oldest.label}"
                    self.recovery.distrust(url, problem)
            elif status == 404 and self.recovery.published is not None and model == self.recovery.published.model:
                problem = f"it does not know {model}"
                self.recovery.distrust(url, problem)
            elif status == 429 or status >= 500:
                problem = f"the server answered {status}: {text[:500]}"
                failed_at.add(url)
            elif status == 401:
                raise RefusedError(f"the server answered 401: {self.connection.lacking_key(url)}")
            else:
                refused = refusal(status, text)
                # a restarted server, or one that received many images since, no longer holds some
                if images is None or isinstance(refused, ContextOverflowError) or all(p["url"] for p in parts):
                    raise refused
                self._sent_to(url, replica.rank).forget(images.spans)
                continue
            await self._wait_to_retry(retries, url, problem)

    def _sent_to(self, url: str, rank: int | None) -> "SentImages":
        from agentfactory.rollout.images.image_intake import SentImages

        return self._sent.setdefault((url, rank), SentImages())

    async def loads(self) -> dict[Replica, Load]:
        """Return the load of each replica of the serving servers. Raises InferenceError if one does not report it, or
        none is serving."""

        async def loads_of(url: str) -> dict[Replica, Load]:
            try:
                loads = await self.connection.loads(url, LOAD_SECONDS)
            except (LostError, ValueError) as error:
                raise InferenceError(f"cannot read the load of {url}: {error}") from error
            self.router.has_replicas(url, len(loads))
            return dict(zip(self.router.replicas(url), loads, strict=True))

        serving = [url for url, state in self.router.states.items() if state is ServerState.SERVING]
        if not serving:
            raise InferenceError("no server is serving")
        found = await asyncio.gather(*map(loads_of, serving))
        return {replica: load for loads in found for replica, load in loads.items()}

    async def _wait_to_retry(self, retries: Retries, url: str, problem: str, asked: float = 0.0) -> None:
        if (delay := retries.delay(time.monotonic(), asked=asked)) is not None:
            logger.info("%s: %s; trying again in %.1f s", url, problem, delay)
            await asyncio.sleep(delay)
            return
        successful = self.router.last_success
        if successful is None or successful < (retries.failing_since or 0.0):
            raise ServerUnreachableError(f"no server completed a request for {self._limit:g} s; {url}: {problem}")
        raise InferenceError(f"{problem} (for {self._limit:g} s)")


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        # a server written in Python may send NaN; the check of log-probabilities names it in its error
        return json.loads(text)


def _completion(text: str) -> Completion | None:
    """Parse the turn in a server's response; None if the server aborted it. Raises InferenceError for a response that
    cannot be trained on."""
    try:
        answer = _decoded(text)
        choice = answer["choices"][0]
        if choice["finish_reason"] == "abort":
            return None
        token_ids = choice["token_ids"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        # vLLM returns no span for a turn without tokens
        versions = [Span(span["version"], span["start"], span["end"]) for span in choice["weight_versions"] or []]
        count = len(token_ids)
        reason = choice.get("stop_reason")  # for a stop token, its id
        stop = reason if isinstance(reason, str) else None
        scores = answer.get("prompt_logprobs")
    except json.JSONDecodeError as error:
        raise InferenceError(f"the server's response is not JSON: {error}: {text[:200]}") from error
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise InferenceError(f"the server's response is not a completion ({error!r}): {text[:200]}") from error
    if count != len(logprobs):
        raise InferenceError(f"the server sent {count} tokens with {len(logprobs)} log-probabilities")
    for token, logprob in zip(token_ids, logprobs, strict=True):
        if type(token) is not int or token < 0:
            raise InferenceError(f"the server sent {token!r} as a token id")
        if type(logprob) not in (int, float) or not LEAST_LOGPROB <= logprob <= LARGEST_LOGPROB:
            raise InferenceError(f"the server sent {logprob!r} as the log-probability of token {token}")
    for span in versions:
        edges = (0, span.start, span.end, count)
        if type(span.version) is not str or any(type(edge) is not int for edge in edges) or sorted(edges) != [*edges]:
            raise InferenceError(f"the server sent {span} as the weight version of {count} tokens")
    return Completion(token_ids, logprobs, versions, choice["finish_reason"] == "length", [1] * count, stop, scores)
