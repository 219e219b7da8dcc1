"""Requests of the embedded engine, and token sampling."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from agentfactory.rollout.inference.embedded.adapters import Adapter
from agentfactory.rollout.text.stop_strings import StopWatch
from agentfactory.rollout.token_row import ImageSpan

if TYPE_CHECKING:
    from PIL import Image

    from agentfactory.rollout.images.image_tokens import Grid


class UnsupportedModel(ValueError):
    """A model that needs something that the engine does not support; the message names it."""


@dataclass(frozen=True, eq=False, slots=True)
class HeldImage:
    """A received image. `first_id` and the ids below it stand for its tokens in the engine's cache. They are negative
    and unique to the image, so prompts with equal token ids but different images share no cache."""

    uuid: str
    image: "Image.Image"
    grid: "Grid"
    tokens: int
    first_id: int


class PromptImages(NamedTuple):
    """The images of a prompt and their positions. `rotary` contains the rotary positions in time, height and width; for
    a token after the prompt, all three are its index plus `shift`."""

    held: Sequence[HeldImage]
    spans: Sequence[ImageSpan]
    rotary: Int[np.ndarray, "3 prompt"]
    image_token_id: int

    @property
    def shift(self) -> int:
        return int(self.rotary.max()) + 1 - self.rotary.shape[1]


class PromptScore(NamedTuple):
    """The distribution before a prompt token: its own log-probability and rank (from 1), at temperature 1, and the most
    likely tokens with theirs."""

    logprob: float
    rank: int
    likely: list[int]
    logprobs: list[float]


@dataclass(eq=False, slots=True)
class Request:
    """One sequence to continue, and the tokens sampled so far. `stop` are the tokens that end it, `watch` its stop
    strings, `stop_string` the matched one. `temperature` 0 is greedy. Only the `top_k` (0: all) likeliest tokens can be
    sampled, and of these the likeliest with the share `top_p`. `logprobs` are those of the sampled tokens after bias,
    temperature (at 0, unscaled) and these limits, `candidate_logprobs` those of `candidates` at each sampled token.
    Each image token of the prompt has its own id. `fresh` recomputes a cached prompt; only requests with the same
    `cache_salt` share a cache. With `prompt_logprobs`, a number of most likely tokens, `prompt_scores` has the score of
    each prompt token but the first, by position. `versions` lists (label, index of its first token). `on_finish` is
    called once, when `finish_reason` ("stop", "length", "abort" or "error") is set. Those with a lower `priority` begin
    first."""

    prompt: np.ndarray
    max_tokens: int
    on_finish: Callable[["Request"], None]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop: frozenset[int] = frozenset()
    watch: StopWatch | None = None
    generator: random.Random = field(default_factory=random.Random)
    adapter: Adapter | None = None
    candidates: list[int] = field(default_factory=list)
    logit_bias: dict[int, float] = field(default_factory=dict)
    images: PromptImages | None = None
    fresh: bool = False
    cache_salt: str | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    prompt_scores: dict[int, PromptScore] = field(default_factory=dict)
    slot: int = -1
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    candidate_logprobs: list[list[float]] = field(default_factory=list)
    versions: list[tuple[str, int]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_string: str | None = None

    @property
    def token_ids(self) -> list[int]:
        """The prompt as model input, with the image token at all image positions."""
        images = self.images
        return (np.where(self.prompt < 0, images.image_token_id, self.prompt) if images else self.prompt).tolist()


def score_prompt(request: Request, start: int, logits: Float[Tensor, "n vocabulary"]) -> None:
    """Note the scores of the prompt tokens that follow positions `start`, `start` + 1, ... with these logits."""
    labels = request.token_ids[start + 1 : start + 1 + len(logits)]
    if not labels:
        return
    logprobs = torch.log_softmax(logits[: len(labels)].float(), -1)
    own = logprobs.gather(1, torch.tensor(labels, device=logprobs.device)[:, None])
    top = logprobs.topk(min(request.prompt_logprobs or 0, logprobs.shape[-1]))
    ranks = (logprobs >= own).sum(-1).tolist()
    rows = zip(own[:, 0].tolist(), ranks, top.indices.tolist(), top.values.tolist(), strict=True)
    request.prompt_scores |= {start + 1 + place: PromptScore(*row) for place, row in enumerate(rows)}


def sample(
    logits: Float[Tensor, "n vocabulary"], requests: Sequence[Request]
) -> tuple[list[int], Float[Tensor, "n vocabulary"]]:
    """Return one token per row, and all log-probabilities, after bias and temperature. `logits` may be overwritten. A
    uniform number from the request's own generator decides, so the result does not depend on the rest of the batch."""
    temperature = [r.temperature for r in requests]
    scaled = logits.float()
    biases = [(row, *bias) for row, request in enumerate(requests) for bias in request.logit_bias.items()]
    if biases:
        rows, biased, added = zip(*biases, strict=True)
        values = torch.tensor(added, dtype=scaled.dtype, device=logits.device)
        scaled[torch.tensor(rows, device=logits.device), torch.tensor(biased, device=logits.device)] += values
    if any(t not in (0.0, 1.0) for t in temperature):
        scaled = scaled / torch.tensor([t or 1.0 for t in temperature], device=logits.device)[:, None]
    for row, request in enumerate(requests):
        if request.temperature and (request.top_k > 0 or request.top_p < 1.0):
            values, order = scaled[row].sort(descending=True)
            values[request.top_k or len(values) :] = -torch.inf
            shares = values.softmax(-1)
            # the share of those before: Holtzman et al., 2020, arXiv:1904.09751, section 3.1
            before = shares.cumsum(-1) - shares
            # the likeliest is always left
            scaled[row, order] = values.masked_fill((before >= request.top_p) & (before > 0), -torch.inf)
    logprobs = torch.log_softmax(scaled, -1)
    if any(temperature):
        numbers = [[r.generator.random() if r.temperature else 0.0] for r in requests]
        # a CPU's caches hold few rows of a large vocabulary; a GPU takes all at once
        at_once = max(1, 2**19 // logits.shape[-1]) if logits.device.type == "cpu" else len(requests)
        found = []
        for start, part in zip(range(0, len(requests), at_once), logprobs.split(at_once), strict=True):
            cumulative = part.exp().double().cumsum_(-1)
            drawn = torch.tensor(numbers[start : start + at_once], dtype=torch.float64).to(logits.device)
            found.append(torch.searchsorted(cumulative, drawn * cumulative[:, -1:], right=True))
        tokens = torch.cat(found).clamp_(max=logits.shape[-1] - 1)
        if not all(temperature):
            greedy = torch.tensor([t == 0.0 for t in temperature], device=logits.device)[:, None]
            tokens = torch.where(greedy, scaled.argmax(-1, keepdim=True), tokens)
    else:
        tokens = scaled.argmax(-1, keepdim=True)
    return tokens[:, 0].tolist(), logprobs
