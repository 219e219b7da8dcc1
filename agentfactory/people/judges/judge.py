"""A reward from a language model as judge, at an endpoint with OpenAI's chat completions API."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from math import inf
from pathlib import Path
from string import Formatter
from typing import Any
from uuid import uuid4

from pydantic import field_validator, model_validator
from pydantic.dataclasses import dataclass

from agentfactory.base.messages import Content, Message, text_of
from agentfactory.base.processes.threads import run_in_thread
from agentfactory.people.judges.client import Asking, VerdictError
from agentfactory.rollout.images.parts import data_url, image_part, parts_of, text_part
from agentfactory.rollout.images.store import stored_digest
from agentfactory.rollout.rewards.reward_spec import reward
from agentfactory.rollout.rewards.scoring import prediction_of
from agentfactory.rollout.rewards.text import OPTIONS, Pattern, field_of, last_match
from agentfactory.rollout.trajectory import Trajectory

_CHAIN = ("prediction", "conversation")
"""Prompt fields that are filled from the chain."""


@reward
@dataclass(config=OPTIONS, kw_only=True)
class Judge(Asking):
    """The score in a model's answer to a prompt about the chain, scaled so that `worst` is 0 and `best` is 1. Every
    failure raises RewardError; it never counts as 0."""

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

    @field_validator("prompt")
    @classmethod
    def _can_be_filled(cls, prompt: str) -> str:
        for name in _fields(prompt):
            if not name.isidentifier():
                raise ValueError(f"{{{name}}} is not the name of a field; double literal braces")
        return prompt

    @model_validator(mode="after")
    def _can_score(self) -> "Judge":
        if not 0 < abs(self.best - self.worst) < inf:
            raise ValueError(f"best and worst are {self.best:g} and {self.worst:g}; write two numbers that differ")
        if self.images and "conversation" not in _fields(self.prompt):
            raise ValueError("images are sent in {conversation}, which the prompt lacks; add it")
        return self

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
        return (await self.ask(messages, self._read))[0]

    def _read(self, answer: str, nonce: str) -> float:
        found = last_match(self.pattern, answer)
        try:
            score = float(found or "")
        except ValueError:
            problem = f"no number that matches {self.pattern!r} in the judge's answer {answer[-200:]!r}"
            raise VerdictError(problem) from None
        if not min(self.worst, self.best) <= score <= max(self.worst, self.best):
            raise VerdictError(f"the judge gave {score:g}, which is not between {self.worst:g} and {self.best:g}")
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
            told.append("\n".join(lines_of(message, place)))
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


def _fields(prompt: str) -> list[str]:
    """Return the names in braces. Raise ValueError if braces do not match."""
    return [name for _, name, _, _ in Formatter().parse(prompt) if name is not None]


def lines_of(message: Message, image: str | None) -> Iterator[str]:
    """Yield the lines of a message in the judge's prompt; `image` replaces the usual marker of each image."""
    content: Content = message.get("content") or ""
    if image is not None and isinstance(content, list):
        content = [part if part["type"] == "text" else text_part(image) for part in content]
    yield f"{message['role']}: {text_of(content)}"
    for call in message.get("tool_calls") or ():
        yield f"[calls {call['function']['name']} with {json.dumps(call['function']['arguments'], ensure_ascii=False)}]"
