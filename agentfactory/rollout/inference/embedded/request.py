"""What the engine is asked to continue, and what it has sampled."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from agentfactory.rollout.inference.embedded.adapters import Adapter
from agentfactory.rollout.text.stop_strings import StopWatch

if TYPE_CHECKING:
    from agentfactory.rollout.inference.embedded.request_images import PromptImages


class UnsupportedModel(ValueError):
    """The engine does not support something that the model needs; the message says what."""


@dataclass(eq=False, slots=True)
class Request:
    """One sequence to continue: the request, and what has been sampled so far.

    `stop` are tokens that end the sequence, and `watch` knows strings that do; `stop_string` is the one that did.
    `temperature` 0 is greedy. `logprobs` are the natural log-probabilities of the sampled tokens after temperature (at
    temperature 0, those of the unscaled distribution). `candidate_logprobs` contains, for each sampled token, the
    log-probabilities of `candidates` at its position. `logit_bias` is added to the logits of its tokens, before the
    temperature. `images` are those of the prompt, in which each of their tokens has an id of its own. `fresh`
    recomputes the prompt even if it is cached; with a `cache_salt`, a request reuses only the cache of requests with
    the same salt. `versions` lists (label, index of its first token). `on_finish` is called once, when `finish_reason`
    ("stop", "length", "abort" or "error") is set.
    """

    prompt: np.ndarray
    max_tokens: int
    on_finish: Callable[["Request"], None]
    temperature: float = 1.0
    stop: frozenset[int] = frozenset()
    watch: StopWatch | None = None
    generator: random.Random = field(default_factory=random.Random)
    adapter: Adapter | None = None
    candidates: list[int] = field(default_factory=list)
    logit_bias: dict[int, float] = field(default_factory=dict)
    images: "PromptImages | None" = None
    fresh: bool = False
    cache_salt: str | None = None
    slot: int = -1
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    candidate_logprobs: list[list[float]] = field(default_factory=list)
    versions: list[tuple[str, int]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_string: str | None = None

    @property
    def token_ids(self) -> list[int]:
        """The prompt as the model gets it: with the same token in all places of images."""
        return (self.images.token_ids(self.prompt) if self.images else self.prompt).tolist()
