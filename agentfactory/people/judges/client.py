"""Requests to judges: models at endpoints with OpenAI's chat completions API, with a cache and a budget."""

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar
from weakref import WeakValueDictionary

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from agentfactory.base.http.proxies import proxy_for, through
from agentfactory.base.http.retries import seconds_asked
from agentfactory.base.http.server_keys import pinned
from agentfactory.base.messages import Message
from agentfactory.base.processes.threads import run_in_thread
from agentfactory.base.run_notices import notify
from agentfactory.people.endpoints import Address, KeyVariable
from agentfactory.people.judges.store import Store
from agentfactory.rollout.inference.http_transport import Connection, LostError
from agentfactory.rollout.rewards.reward_spec import RewardError
from agentfactory.rollout.rewards.text import OPTIONS

logger = logging.getLogger(__name__)

_HEALS = frozenset({408, 429, 500, 502, 503, 504})
_NO_CREDIT = "insufficient_quota"
"""Error code of OpenAI's status 429 for an account without credit, which retrying cannot fix."""
_FIRST_PAUSE, _LONGEST_PAUSE, _LONGEST_ASKED = 0.5, 30.0, 600.0
_ANSWER_BYTES = 1 << 22
Verdict = TypeVar("Verdict")


class VerdictError(RewardError):
    """An answer of a judge in which there is no valid verdict."""


class _Flight(asyncio.Lock):
    """A request that is under way, for others that are equal."""

    failure: RewardError | None = None


@dataclass(config=OPTIONS, kw_only=True)
class Endpoint:
    """A judge's address, model and prices."""

    url: Address
    model: str
    api_key_env: KeyVariable | None = None
    parameters: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    price_in: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    price_out: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Prices of a million tokens of prompts and of answers, in the unit of `max_cost`."""


@dataclass(config=OPTIONS, kw_only=True)
class Asking(Endpoint):
    """Options of all judges, and their requests."""

    concurrency: Annotated[int, Field(gt=0)] = 16
    """Maximum number of concurrent requests; further rewards wait, which counts towards their time limit."""
    retries: Annotated[int, Field(ge=0)] = 6
    """Retries after recoverable failures: half a minute in all, unless the server asks for longer pauses."""
    cache: Path | None = None
    """File of a database that keeps answers, found again by their requests. Its folder must exist."""
    max_calls: Annotated[int, Field(gt=0)] | None = None
    max_cost: Annotated[float, Field(gt=0)] | None = None
    """Budget in requests, and in money, of all processes that share `cache`; without it, of each process."""

    @model_validator(mode="after")
    def _has_prices(self) -> "Asking":
        if self.max_cost is not None and not self.price_in and not self.price_out:
            raise ValueError("max_cost needs the prices of a million tokens; set price_in and price_out")
        return self

    def __post_init__(self) -> None:
        proxy_for(self.url)  # its errors are told before the run
        self._loop: asyncio.AbstractEventLoop | None = None
        self._store: Store | None = None
        self.sent = self.found = 0
        """Requests that were sent, and answers that the cache had."""

    async def ask(
        self,
        messages: Sequence[Message],
        read: Callable[[str, str], Verdict],
        nonce: str = "",
        endpoint: Endpoint | None = None,
    ) -> tuple[Verdict, bool]:
        """Return what `read` finds in the judge's answer and its nonce, and whether the cache had the answer. Only
        answers that `read` takes are kept. `nonce` is a random part of the messages, under which no answer is looked
        for. Raise RewardError for every failure."""
        await self._open()
        assert self._store is not None
        store, judge = self._store, endpoint or self
        body = {**judge.parameters, "model": judge.model, "messages": [*messages]}
        content = json.dumps([judge.url, body], sort_keys=True, ensure_ascii=True)
        key = hashlib.sha256((content.replace(nonce, "nonce") if nonce else content).encode()).hexdigest()
        # equal requests wait for the first one, and share its answer or its failure
        flight = self._flights.setdefault(key, _Flight()) if self.cache is not None else _Flight()
        waits = flight.locked()
        async with flight:
            if waits and flight.failure is not None:
                raise flight.failure
            if (kept := await run_in_thread(partial(store.find, key))) is not None:
                with suppress(VerdictError):  # it was read by other rules
                    verdict = await run_in_thread(partial(read, kept[1], kept[0]))
                    self.found += 1
                    return verdict, True
            try:
                answer = await self._complete(judge, body)
                verdict = await run_in_thread(partial(read, answer, nonce))
            except RewardError as error:
                flight.failure = error
                raise
            await run_in_thread(partial(store.keep, key, nonce, answer))
            return verdict, False

    async def _open(self) -> None:
        if self._store is None:
            path = self.cache
            if path is not None and not path.parent.is_dir():
                text = f"the folder of the judges' cache {path} does not exist: no answers are kept"
                notify(logger, f"cache {path}", f"{text}; fix: create it, or write ${{output}}/judges.sqlite")
                path = None
            self._store = Store(path)
        # notebooks run several event loops in succession
        if self._loop is not asyncio.get_running_loop():
            self._loop = asyncio.get_running_loop()
            self._places = asyncio.Semaphore(self.concurrency)
            self._flights: WeakValueDictionary[str, _Flight] = WeakValueDictionary()
            self._connections: dict[str, Connection] = {}

    async def _connection(self, judge: Endpoint) -> Connection:
        place = f"{judge.api_key_env} {judge.url}"
        if place not in self._connections:
            self._connections[place] = Connection(judge.api_key_env, proxy_for(judge.url), "options")
            await self._connections[place].__aenter__()
        return self._connections[place]

    async def _complete(self, judge: Endpoint, body: dict[str, Any]) -> str:
        address = pinned(f"{judge.url}/chat/completions")
        content = json.dumps(body).encode()
        connection, store = await self._connection(judge), self._store
        assert store is not None
        problem, asked = "", 0.0
        for attempt in range(self.retries + 1):
            if attempt:
                notify(logger, f"judge {address}", f"requests to the judge {address} are sent again: {problem}")
                await asyncio.sleep(asked + min(_FIRST_PAUSE * 2 ** (attempt - 1), _LONGEST_PAUSE))
            try:
                async with self._places:
                    await run_in_thread(partial(store.begin_call, self._payer, self.max_calls, self.max_cost))
                    self.sent += 1
                    # timeout_seconds of the reward limits the time
                    status, text, headers = await connection.request("POST", address, content, most=_ANSWER_BYTES)
                if status == 200:
                    answer = json.loads(text)
                    if (cost := self._cost(judge, answer)) > 0:
                        await run_in_thread(partial(store.pay, self._payer, cost))
                    return _content(answer)
                asked = seconds_asked(headers.get("Retry-After", ""))
                wait = f", asks for {asked:.3g} s" if asked else ""
                problem = f"status {status}{wait}: {text[:300]}{through(proxy_for(judge.url))}"
                if status == 401:
                    problem += f"; {connection.lacking_key(judge.url)}"
                if status not in _HEALS or _NO_CREDIT in text or asked > _LONGEST_ASKED:
                    break
            except (LostError, ValueError, OverflowError, RecursionError) as error:
                problem, asked = str(error), 0.0
        raise RewardError(f"no verdict from {address}: {problem}")

    @property
    def _payer(self) -> str:
        return f"{type(self).__name__} {self.url} {self.model}"

    def _cost(self, judge: Endpoint, answer: Any) -> float:
        """Return the cost of an answer. Raise RewardError if it is not reported, and `max_cost` limits it."""
        if not judge.price_in and not judge.price_out:
            return 0.0
        usage = answer.get("usage") if isinstance(answer, dict) else None
        usage = usage if isinstance(usage, dict) else {}
        prompt, sampled = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if type(prompt) is int and type(sampled) is int and min(prompt, sampled) >= 0:
            return (prompt * judge.price_in + sampled * judge.price_out) / 1e6
        if self.max_cost is None:
            return 0.0
        raise RewardError(f"{judge.url} reports no usage, so that max_cost cannot be kept; set max_calls instead")

    async def close(self) -> None:
        """Close the connections and the cache; the next request opens new ones."""
        if self._loop is asyncio.get_running_loop():
            for connection in self._connections.values():
                await connection.__aexit__()
        if self._store is not None:
            self._store.close()
        self._loop, self._store = None, None


def _content(answer: Any) -> str:
    with suppress(LookupError, TypeError):
        if isinstance(content := answer["choices"][0]["message"]["content"], str):
            return content
    raise ValueError(f"not a chat completion with a text: {str(answer)[:300]}")
