"""Sampling of a turn: the choice of weights, temperature and seed, the token limits, and the request."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentfactory.rollout.config import RolloutRecipe
from agentfactory.rollout.images.image_intake import Images, RequestImages, ShownImages, TextOnly
from agentfactory.rollout.images.image_tokens import BANNED_BIAS
from agentfactory.rollout.inference.http_transport import ContextOverflowError, InferenceError
from agentfactory.rollout.inference.inference_client import Completion, EncodedIds, InferenceClient
from agentfactory.rollout.text.tokenizer import vocabulary_of
from agentfactory.rollout.token_row import ImageSpan, Span


@dataclass(frozen=True)
class Sampling:
    """The sampling settings of a chain. `model` is the server's name of the weights, or a function that returns it for
    each turn. `seed` is any text, which with the recipe's seed makes the chain reproducible. `cache_salt` is the
    version of the weights whose KV cache may be used if the server keeps old caches (`rollout.inflight: keep`). Servers
    begin turns with a lower `priority` first."""

    model: str | Callable[[], str]
    temperature: float
    seed: str
    cache_salt: str | None = None
    priority: int = 0


@dataclass(frozen=True)
class TurnBudget:
    """Token limits: `turn` for the sampled tokens of a turn, `row` for the whole sequence, prompt included."""

    turn: int
    row: int

    def left(self, length: int, sampled: int = 0) -> int:
        """Return how many tokens a turn of `sampled` may still add to `length`. Raise ContextOverflowError if none."""
        if (left := min(self.turn - sampled, self.row - length)) < 1:
            raise ContextOverflowError(f"no token is left after {length}; the row limit is {self.row}")
        return left


def turn_seed(recipe_seed: int, chain_seed: str, turn: int, sample: int = 0) -> int:
    """Return a 31-bit seed for one sample of one turn, independent of the order in which chains run."""
    place = f"{turn}.{sample}" if sample else f"{turn}"
    digest = hashlib.blake2b(f"{recipe_seed}/{chain_seed}/{place}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1


class Sampler:
    """Requests turns, which end at one of `stop_token_ids`, from the servers. Image tokens of `images` are banned."""

    def __init__(
        self, recipe: RolloutRecipe, client: InferenceClient, stop_token_ids: list[int], images: Images | None = None
    ) -> None:
        self.recipe = recipe
        self.client = client
        self.stop_token_ids = stop_token_ids
        self.images = images or TextOnly()
        self._banned = frozenset(() if self.images.vision is None else self.images.vision.banned_token_ids)
        self._bias = {str(token): BANNED_BIAS for token in self._banned}
        self._vocabulary = vocabulary_of(recipe.model.path)

    async def sample(
        self,
        ids: Sequence[int],
        sampling: Sampling,
        turn: int,
        max_tokens: int,
        sample: int = 0,
        images: Sequence[ImageSpan] = (),
        encoded: EncodedIds | None = None,
        stops: Sequence[str] = (),
    ) -> Completion:
        """Sample a turn after `ids`, which contain `images`, up to the token that completes one of `stops`. `sample`
        numbers attempts; `encoded` caches the ids. Raise InferenceError if an image token is sampled."""
        parameters: dict[str, Any] = {
            "temperature": sampling.temperature,
            "max_tokens": max_tokens,
            "stop_token_ids": self.stop_token_ids,
        }
        if stops:
            parameters["stop"] = list(stops)
        server = self.recipe.server
        # a vLLM that was started elsewhere refuses priorities, unless its scheduling policy is priority
        orders = server.engine == "embedded" or (server.engine == "vllm" and server.url is None)
        # vLLM's CPU engine crashes with per-request seeds, so only our own engine gets them
        if server.engine == "embedded":
            parameters["seed"] = turn_seed(self.recipe.seed, sampling.seed, turn, sample)
        model = sampling.model if isinstance(sampling.model, str) else sampling.model()
        shown = None
        if isinstance(self.images, ShownImages):
            parameters["logit_bias"] = self._bias
            if images:
                shown = RequestImages(ids, images, self.images)
        priority = sampling.priority if orders else 0
        completion = await self.client.generate(
            ids, model, parameters, sampling.cache_salt, sampling.seed, shown, encoded, priority
        )
        if (count := len(completion.token_ids)) > max_tokens:
            raise InferenceError(f"the server sampled {count} tokens, and max_tokens was {max_tokens}")
        if (largest := max(completion.token_ids, default=0)) >= self._vocabulary:
            raise InferenceError(f"the server sampled the token {largest}, and the model has {self._vocabulary} tokens")
        if not self._banned.isdisjoint(completion.token_ids):
            token = next(token for token in completion.token_ids if token in self._banned)
            raise InferenceError(f"the server sampled the image token {token}, so it ignores logit_bias")
        if self.recipe.model.lora is not None:
            # vLLM reports the version of the base weights; the version of a turn is its adapter, which never changes
            count = len(completion.token_ids)
            return replace(completion, versions=[Span(model, 0, count)] if count else [])
        if sampling.cache_salt is not None:
            mixed = [replace(span, mixed=span.version != sampling.cache_salt) for span in completion.versions]
            return replace(completion, versions=mixed)
        return completion
