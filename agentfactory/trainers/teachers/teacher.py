"""A teacher in the trainer: it scores the policy's tokens, or compares whole distributions with it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from agentfactory.base.errors import SettingError
from agentfactory.rollout.inference.sequence_lengths import position_limit
from agentfactory.rollout.text.tokenizer import load_tokenizer, tokens_missing
from agentfactory.trainers.config import TeacherConfig, TrainRecipe
from agentfactory.trainers.networks.backbone import resolve_batching
from agentfactory.trainers.networks.frozen_policy import FrozenPolicy, freeze
from agentfactory.trainers.networks.lora import POLICY_ADAPTER
from agentfactory.trainers.networks.network import load_network
from agentfactory.trainers.networks.policy import Measure, Policy, check_head
from agentfactory.trainers.networks.token_rows import table_of
from agentfactory.trainers.networks.vision_tower import sees
from agentfactory.trainers.processes.sharding import decided_by_rank_0
from agentfactory.trainers.teachers.divergences import divergence, top_k, top_k_divergence


class Teacher:
    """A frozen policy that grades tokens. Every process calls its methods; `model` is the model that accelerate
    prepared, and the further inputs are those of `Policy.forward`."""

    def __init__(
        self, config: TeacherConfig, frozen: FrozenPolicy, rows: int, missing: dict[int, str] | None = None
    ) -> None:
        """`rows` is the size of the policy's vocabulary, and `missing` are its tokens that the teacher cannot read."""
        self._config = config
        self._frozen = frozen
        self.network = frozen.network
        """The separate network; None if the teacher uses the policy's."""
        self._rows = rows
        self._missing = missing or {}
        self._seconds = 0.0

    def logprobs(
        self, model: nn.Module, ids: Tensor, sources: Tensor, labels: Tensor, *rest: Any
    ) -> Float[Tensor, "targets"]:
        """Return the teacher's log-probability of each label. Raise SettingError if it cannot read a token."""
        self._check(ids, labels)
        with self._timed(ids.device):
            return self._frozen.logprobs(model, ids, sources, labels, *rest)

    def top(
        self, model: nn.Module, ids: Tensor, sources: Tensor, labels: Tensor, *rest: Any
    ) -> Float[Tensor, "targets 2 k"]:
        """Return the recipe's `top_k` most likely tokens at each target, among those of the policy's vocabulary, and
        their log-probabilities: see divergences.top_k. Raise SettingError if the teacher cannot read a token."""
        self._check(ids, labels)
        count = self._config.top_k
        assert count is not None
        with self._timed(ids.device):
            found = self._frozen.forward(
                model, ids, sources, labels, *rest, measure=lambda logits, chunk: top_k(logits[:, : self._rows], count)
            )
        return found[2]

    def measure(
        self, model: nn.Module, temperature: float, ids: Tensor, sources: Tensor, labels: Tensor, *places: Any
    ) -> Measure:
        """Return a function that computes the exact divergence of the policy's logits from the teacher's, for
        `Policy.forward`, with the teacher's logits by chunk. Raise SettingError if the teacher cannot read a token."""
        self._check(ids, labels)
        with self._timed(ids.device):
            hidden = self._frozen.states(model, ids, sources, *places)
        kind, beta = _measured(self._config)
        theirs = partial(self._frozen.logits, model, temperature=temperature)
        return lambda logits, chunk: divergence(kind, logits, theirs(hidden[chunk]), beta)

    def longest(self, policy: Policy) -> int | None:
        """Return the number of tokens that the teacher of `policy` can read; None if its configuration has none."""
        network = (self.network or policy).network
        limit = position_limit(network.config.to_dict())
        found: int | None = getattr(network.config.get_text_config(), "max_position_embeddings", None)
        return found if limit is None else limit.length

    def take_seconds(self) -> float:
        """Return the seconds of this process's forward passes with the teacher since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _check(self, *ids: Tensor) -> None:
        if not self._missing:
            return
        found = sorted({token for part in ids for token in part.unique().tolist()} & self._missing.keys())
        if found:
            named = ", ".join(f"{self._missing[number]!r} ({number})" for number in found[:5])
            problem = f"{self._config.model} has no token {named}, which the policy's chains contain"
            fix = "name a teacher with it, or set model.chat_template to one without it"
            raise SettingError("teacher.model", problem, fix)

    @contextmanager
    def _timed(self, device: torch.device) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if device.type == "cuda":
            # kernels run behind the calls that start them
            torch.cuda.synchronize(device)
        self._seconds += time.perf_counter() - started


def top_k_measure(config: TeacherConfig, top: Float[Tensor, "targets 2 k"]) -> Measure:
    """Return a function that computes the divergence of the policy's logits from a teacher's `top_k` tokens."""
    kind, beta = _measured(config)

    def measured(logits: Tensor, chunk: slice) -> Tensor:
        tokens, theirs = top[chunk].unbind(1)
        return top_k_divergence(kind, logits, tokens.long(), theirs, beta)

    return measured


def _measured(config: TeacherConfig) -> tuple[Any, float]:
    return config.divergence, getattr(config.options, "beta", 0.5)


def make_teacher(recipe: TrainRecipe, policy: Policy, accelerator: Accelerator) -> Teacher:
    """Load the teacher of a recipe in the model's dtype, or use the base of the policy's adapter, or the policy itself.
    Every process calls it. Raise SettingError if the teacher cannot grade this policy."""
    config = recipe.teacher
    assert config is not None
    if (config.top_k or 0) > (rows := _rows(policy.network)):
        problem = f"got {config.top_k}, and the policy's vocabulary has {rows} tokens"
        raise SettingError("teacher.top_k", problem, "lower it")
    if config.model is None:
        return Teacher(config, FrozenPolicy(accelerator, None, POLICY_ADAPTER), rows)
    if config.model == recipe.model.path and policy.is_lora:
        return Teacher(config, FrozenPolicy(accelerator, None), rows)
    missing: dict[int, str] = {}
    try:
        if config.model != recipe.model.path:
            missing = tokens_missing(load_tokenizer(recipe.model.path), load_tokenizer(config.model), config.model)
        own = recipe.model.model_copy(update={"path": config.model, "lora": None})
        recipe = recipe.model_copy(update={"model": own})
        network = load_network(recipe, accelerator.device, policy.dtype)
        # the checks compute with the weights, which only rank 0 has under fsdp2
        check = partial(_check_network, network, recipe, policy)
        decided_by_rank_0(check) if recipe.train.strategy == "fsdp2" else check()
    except SettingError as error:
        raise error.at("teacher.model" if error.field == "model.path" else error.field) from error.__cause__
    missing |= {number: "without text" for number in range(_rows(network), rows) if number not in missing}
    left_out = [token for number, token in missing.items() if number >= _rows(network) and token != "without text"]
    if config.is_exact and left_out:
        problem = f"got {config.divergence!r}, and {config.model} has no row for {left_out[0]!r} of the vocabulary"
        raise SettingError("teacher.divergence", problem, "use sampled, or a teacher with the whole vocabulary")
    return Teacher(config, freeze(network, recipe, policy, accelerator), rows, missing)


def _check_network(network: PreTrainedModel, recipe: TrainRecipe, policy: Policy) -> None:
    """Raise SettingError unless the policy's rows can be scored by this network in the policy's layout."""
    check_head(network)
    resolve_batching(network, recipe.train.model_copy(update={"batching": policy.batching}))
    own, other = policy.network.config, network.config
    if sees(own) and own.model_type != other.model_type:
        problem = f"{recipe.model.path} is of the family {other.model_type}, and the policy, which accepts images, of "
        raise SettingError("teacher.model", f"{problem}{own.model_type}", "name a teacher of the policy's family")


def _rows(network: Any) -> int:
    return table_of(network.get_output_embeddings()).shape[0]
