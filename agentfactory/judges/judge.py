"""A reward from a language model as judge, at an endpoint with OpenAI's chat completions API."""

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import field
from functools import partial
from pathlib import Path
from string import Formatter
from typing import Annotated, Any
from uuid import uuid4

import aiohttp
from pydantic import Field, field_validator, model_validator
from pydantic.dataclasses import dataclass

from agentfactory.base.http.clients import answer_within, open_session
from agentfactory.base.http.proxies import proxy_for, through
from agentfactory.base.http.server_keys import pinned
from agentfactory.base.messages import Content, Message, text_of
from agentfactory.base.processes.threads import run_in_thread
from agentfactory.rollout.images.parts import data_url, image_part, parts_of, text_part
from agentfactory.rollout.images.store import stored_digest
from agentfactory.rollout.inference.http_transport import authorization
from agentfactory.rollout.rewards.reward_spec import RewardError, reward
from agentfactory.rollout.rewards.scoring import prediction_of
from agentfactory.rollout.rewards.text import OPTIONS, Pattern, field_of, last_match
from agentfactory.rollout.trajectory import Trajectory

_HEALS = frozenset({408, 429, 500, 502, 503, 504})
_FIRST_PAUSE = 0.5
_ANSWER_BYTES = 1 << 22
_CHAIN = ("prediction", "conversation")
"""Prompt fields that are filled from the chain."""


@reward
@dataclass(config=OPTIONS)
class Judge:
    """The score in a model's answer to a prompt about the chain, scaled so that `worst` is 0 and `best` is 1. Every
    failure raises RewardError; it never counts as 0."""

    url: str
    model: str
    prompt: str
    """The judge's prompt, with `{prediction}`, `{conversation}` (all messages and calls) and any field of the row;
    literal braces must be doubled."""
    images: bool = False
    """Send the images of the conversation to a multimodal judge, at their places in `{conversation}` and in the size
    that the policy got. Otherwise each becomes the text `[image]`."""
    system: str | None = None
    pattern: Pattern = r"[Ss]core[\s:=*]*(-?\d+(?:\.\d+)?)"
    """Pattern that finds the score in the judge's answer: the first group of the last match."""
    worst: float = 0.0
    best: float = 1.0
    """Scores of the rewards 0 and 1. A score outside this range is an error."""
    api_key_env: str | None = None
    concurrency: Annotated[int, Field(gt=0)] = 16
    """Maximum number of concurrent requests; further rewards wait, which counts towards their time limit."""
    retries: Annotated[int, Field(ge=0)] = 3
    """Retries after recoverable failures: no connection, 408, 429, 5xx, a response that is not a completion."""
    parameters: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError("not an address; start it with http:// or https://")
        return url.rstrip("/")

    @field_validator("prompt")
    @classmethod
    def _can_be_filled(cls, prompt: str) -> str:
        for name in _fields(prompt):
            if not name.isidentifier():
                raise ValueError(f"{{{name}}} is not the name of a field; double literal braces")
        return prompt

    @field_validator("api_key_env")
    @classmethod
    def _is_set(cls, name: str | None) -> str | None:
        if name is not None and not os.environ.get(name):
            raise ValueError("this environment variable is not set; export it")
        return name

    @model_validator(mode="after")
    def _can_score(self) -> "Judge":
        if self.best == self.worst:
            raise ValueError(f"best and worst are both {self.best:g}; they must differ")
        if self.images and "conversation" not in _fields(self.prompt):
            raise ValueError("images are sent in {conversation}, which the prompt lacks; add it")
        return self

    def __post_init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._proxy = proxy_for(self.url)

    def check(self, row: dict[str, Any]) -> None:
        """Raise ValueError if the row lacks a field of the prompt, or has a field that is filled from the chain."""
        for name in _fields(self.prompt):
            if name not in _CHAIN:
                field_of(row, name)
            elif name in row:
                raise ValueError(f"fills {{{name}}} from the chain, but the data has a field {name!r} too")

    async def __call__(self, trajectory: Trajectory, seen_images: Sequence[str] = (), **row: Any) -> float:
        content = await run_in_thread(partial(self._question, trajectory, seen_images, row))
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages = [*system, {"role": "user", "content": content}]
        answer = await self._ask({**self.parameters, "model": self.model, "messages": messages})
        found = await run_in_thread(partial(last_match, self.pattern, answer))
        try:
            score = float(found or "")
        except ValueError:
            problem = f"no number that matches {self.pattern!r} in the judge's answer {answer[-200:]!r}"
            raise RewardError(problem) from None
        if not min(self.worst, self.best) <= score <= max(self.worst, self.best):
            raise RewardError(f"the judge gave {score:g}, which is not between {self.worst:g} and {self.best:g}")
        return (score - self.worst) / (self.best - self.worst)

    def _question(self, trajectory: Trajectory, seen_images: Sequence[str], row: dict[str, Any]) -> Content:
        # a random marker, so that no model output can be mistaken for an image's place
        place = f"<image {uuid4().hex}>" if self.images else None
        told, shown = [], []
        files = iter(seen_images)
        for message in trajectory.messages:
            for part in parts_of(message) if self.images else ():
                if part["type"] == "image_url":
                    url = part["image_url"]["url"]
                    shown.append(data_url(Path(next(files)).read_bytes()) if stored_digest(url) else url)
            told.append("\n".join(_lines(message, place)))
        chain = {"prediction": prediction_of(trajectory), "conversation": "\n\n".join(told)}
        text = self.prompt.format(**{**row, **chain})
        if not shown:
            return text
        first, *rest = text.split(str(place))
        # the prompt may contain the conversation more than once
        parts = [text_part(first)]
        for number, after in enumerate(rest):
            parts += [image_part(shown[number % len(shown)]), text_part(after)]
        return [part for part in parts if part != text_part("")]

    async def _ask(self, request: dict[str, Any]) -> str:
        # notebooks run several event loops in succession
        if self._loop is not asyncio.get_running_loop():
            self._loop = asyncio.get_running_loop()
            self._places = asyncio.Semaphore(self.concurrency)
            # timeout_seconds of the reward limits the time
            self._session = open_session(self._proxy, timeout=aiohttp.ClientTimeout(total=None, sock_connect=30))
        address = pinned(f"{self.url}/chat/completions")
        for attempt in range(self.retries + 1):
            if attempt:
                await asyncio.sleep(_FIRST_PAUSE * 2 ** (attempt - 1))
            try:
                key = authorization(address, self.api_key_env)
                async with (
                    self._places,
                    self._session.post(address, json=request, headers=key, allow_redirects=False) as response,
                ):
                    answer = await answer_within(response, _ANSWER_BYTES)
                if response.status == 200:
                    return _content(json.loads(answer))
                problem = f"status {response.status}: {answer[:300].decode(errors='replace')}"
                if response.status not in _HEALS:
                    break
            except (aiohttp.ClientError, ValueError, RecursionError) as error:
                problem = f"{type(error).__name__}: {error}"
        raise RewardError(f"no verdict from {address}: {problem}{through(self._proxy)}")

    async def close(self) -> None:
        """Close the connections; the next request opens new ones."""
        if self._loop is not None:
            await self._session.close()
            self._loop = None


def _fields(prompt: str) -> list[str]:
    """Return the names in braces. Raise ValueError if braces do not match."""
    return [name for _, name, _, _ in Formatter().parse(prompt) if name is not None]


def _content(answer: Any) -> str:
    try:
        content = answer["choices"][0]["message"]["content"]
    except (LookupError, TypeError):
        content = None
    if not isinstance(content, str):
        raise ValueError(f"not a chat completion with a text: {str(answer)[:300]}")
    return content


def _lines(message: Message, image: str | None) -> Iterator[str]:
    """Yield the lines of a message in the judge's prompt; `image` replaces the usual marker of each image."""
    content: Content = message.get("content") or ""
    if image is not None and isinstance(content, list):
        content = [part if part["type"] == "text" else text_part(image) for part in content]
    yield f"{message['role']}: {text_of(content)}"
    for call in message.get("tool_calls") or ():
        yield f"[calls {call['function']['name']} with {json.dumps(call['function']['arguments'], ensure_ascii=False)}]"
