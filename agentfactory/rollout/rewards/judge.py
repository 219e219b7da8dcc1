"""A language model as the judge, behind an endpoint that speaks OpenAI's chat completions."""

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import field
from functools import partial
from string import Formatter
from typing import Annotated, Any

import aiohttp
from pydantic import Field, field_validator, model_validator
from pydantic.dataclasses import dataclass

from agentfactory.rollout.rewards.decorator import reward
from agentfactory.rollout.rewards.reward_spec import RewardError
from agentfactory.rollout.rewards.scoring import prediction_of
from agentfactory.rollout.rewards.text import OPTIONS, Pattern, field_of, last_match
from agentfactory.rollout.trajectory import Trajectory
from agentfactory.tools.messages import Message, text_of
from agentfactory.tools.threads import run_in_thread

_HEALS = frozenset({408, 429, 500, 502, 503, 504})
_FIRST_PAUSE = 0.5
_CHAIN = ("prediction", "conversation")
"""What a prompt gets from the chain."""


@reward
@dataclass(config=OPTIONS)
class Judge:
    """The number in a model's answer to a prompt about the chain, scaled so that `worst` is 0 and `best` 1.

    Whatever goes wrong is an error of the reward, never a 0.
    """

    url: str
    """Base address, such as http://127.0.0.1:8000/v1."""
    model: str
    """The endpoint's name of the model."""
    prompt: str
    """What the judge is asked, with `{prediction}`, `{conversation}` (all messages and calls) and any field of the row;
    braces that are to stand there are doubled."""
    system: str | None = None
    """System message for the judge."""
    pattern: Pattern = r"[Ss]core[\s:=*]*(-?\d+(?:\.\d+)?)"
    """Where the judge's answer has its score: the first group of the last match."""
    worst: float = 0.0
    """Score that is a reward of 0."""
    best: float = 1.0
    """Score that is a reward of 1; one that is not between the two is an error."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the API key."""
    concurrency: Annotated[int, Field(gt=0)] = 16
    """Requests at a time; further verdicts wait, and their time limit runs."""
    retries: Annotated[int, Field(ge=0)] = 3
    """How often is tried again what can heal: no connection, 408, 429, 5xx, an answer that is no completion."""
    parameters: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    """Further fields of the request, such as max_tokens."""

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError("not an address; write http:// or https:// before it")
        return url.rstrip("/")

    @field_validator("prompt")
    @classmethod
    def _can_be_filled(cls, prompt: str) -> str:
        for name in _fields(prompt):
            if not name.isidentifier():
                raise ValueError(f"{{{name}}} is not the name of a field; braces that are to stand there are doubled")
        return prompt

    @field_validator("api_key_env")
    @classmethod
    def _is_set(cls, name: str | None) -> str | None:
        if name is not None and not os.environ.get(name):
            raise ValueError("this environment variable is not set; export it")
        return name

    @model_validator(mode="after")
    def _scores_differ(self) -> "Judge":
        if self.best == self.worst:
            raise ValueError(f"best and worst are both {self.best:g}")
        return self

    def __post_init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def check(self, row: dict[str, Any]) -> None:
        """Raises ValueError where the row lacks a field of the prompt, or has what the chain gives."""
        for name in _fields(self.prompt):
            if name not in _CHAIN:
                field_of(row, name)
            elif name in row:
                raise ValueError(f"fills {{{name}}} from the chain, and the data has a field {name!r} too")

    async def __call__(self, trajectory: Trajectory, **row: Any) -> float:
        chain = {"prediction": prediction_of(trajectory), "conversation": _told(trajectory)}
        messages = [{"role": "system", "content": self.system}] if self.system is not None else []
        messages.append({"role": "user", "content": self.prompt.format(**{**row, **chain})})
        answer = await self._ask({**self.parameters, "model": self.model, "messages": messages})
        found = await run_in_thread(partial(last_match, self.pattern, answer))
        try:
            score = float(found or "")
        except ValueError:
            raise RewardError(
                f"no number that matches {self.pattern!r} in the judge's answer {answer[-200:]!r}"
            ) from None
        if not min(self.worst, self.best) <= score <= max(self.worst, self.best):
            raise RewardError(f"the judge gave {score:g}, which is not from {self.worst:g} to {self.best:g}")
        return (score - self.worst) / (self.best - self.worst)

    async def _ask(self, request: dict[str, Any]) -> str:
        """The judge's answer. Raises RewardError where there is none."""
        self._open()
        address = f"{self.url}/chat/completions"
        for attempt in range(self.retries + 1):
            if attempt:
                await asyncio.sleep(_FIRST_PAUSE * 2 ** (attempt - 1))
            try:
                async with self._places, self._session.post(address, json=request) as response:
                    if response.status == 200:
                        return _content(await response.json())
                    problem = f"status {response.status}: {(await response.text())[:300]}"
                    if response.status not in _HEALS:
                        break
            except (aiohttp.ClientError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
        raise RewardError(f"no verdict from {address}: {problem}")

    def _open(self) -> None:
        # a notebook runs one event loop after another
        if self._loop is not asyncio.get_running_loop():
            self._loop = asyncio.get_running_loop()
            headers = {} if self.api_key_env is None else {"Authorization": f"Bearer {os.environ[self.api_key_env]}"}
            self._places = asyncio.Semaphore(self.concurrency)
            # proxies of the environment, because judges are often far away; the time limit is the entry's
            self._session = aiohttp.ClientSession(
                headers=headers, trust_env=True, timeout=aiohttp.ClientTimeout(total=None, sock_connect=30)
            )

    async def close(self) -> None:
        """Close the connections; the next verdict opens new ones."""
        if self._loop is not None:
            await self._session.close()
            self._loop = None


def _fields(prompt: str) -> list[str]:
    """Names in braces. Raises ValueError where braces do not match."""
    return [name for _, name, _, _ in Formatter().parse(prompt) if name is not None]


def _content(answer: Any) -> str:
    """Raises ValueError where the answer is no chat completion with a text."""
    try:
        content = answer["choices"][0]["message"]["content"]
    except (LookupError, TypeError):
        content = None
    if not isinstance(content, str):
        raise ValueError(f"not a chat completion with a text: {str(answer)[:300]}")
    return content


def _told(trajectory: Trajectory) -> str:
    return "\n\n".join("\n".join(_lines(message)) for message in trajectory.messages)


def _lines(message: Message) -> Iterator[str]:
    yield f"{message['role']}: {text_of(message.get('content') or '')}"
    for call in message.get("tool_calls") or ():
        yield f"[calls {call['function']['name']} with {json.dumps(call['function']['arguments'], ensure_ascii=False)}]"
