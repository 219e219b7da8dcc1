"""Policies that are not trained: the reference, to which KL terms keep the policy close, and the teacher, which scores
the policy's tokens, or compares whole distributions with it; and training rows with a teacher's grades."""

import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from agentfactory.base.errors import SettingError
from agentfactory.base.run_notices import notify
from agentfactory.rollout.inference.sequence_lengths import position_limit
from agentfactory.rollout.text.tokenizer import load_tokenizer, tokens_missing
from agentfactory.rollout.token_row import Row
from agentfactory.rollout.trajectory import Group
from agentfactory.trainers.batches.batch import TrainingRow
from agentfactory.trainers.config import TeacherConfig, TrainRecipe
from agentfactory.trainers.networks.critic import ActorCritic, Role
from agentfactory.trainers.networks.fp8 import gather_in_fp8
from agentfactory.trainers.networks.lora import POLICY_ADAPTER, REFERENCE_ADAPTER, adapters_off, has_adapter, table_of
from agentfactory.trainers.networks.network import apply_options, decoder_layers, load_network, resolve_batching
from agentfactory.trainers.networks.policy import Measure, Policy, check_head
from agentfactory.trainers.networks.vision_tower import sees
from agentfactory.trainers.processes.accelerator import decided_by_rank_0, mesh_of, weights_of_rank_0

logger = logging.getLogger(__name__)

Kind = Literal["reverse_kl", "forward_kl", "jensen_shannon"]
Logits = Float[Tensor, "tokens vocabulary"]


class FrozenPolicy:
    """A scorer of tokens whose weights do not change, by the policy's own code: with equal weights the two are equal.

    Every process calls its methods, which leave the adapters and trainable weights of `model` unchanged. `model` is the
    model that accelerate prepared; the further inputs are those of `Policy.forward`."""

    def __init__(self, accelerator: Accelerator, frozen: Policy | None, adapter: str | None = None) -> None:
        """`frozen` is None if the weights are the base of the policy's adapter, alone or with `adapter`: a frozen one,
        or POLICY_ADAPTER for the policy as it is now."""
        self._accelerator = accelerator
        self.network = frozen
        """The separate network; None if the policy's base is used."""
        self._adapter = adapter

    @torch.no_grad()
    def forward(self, model: nn.Module, *inputs: Any, **named: Any) -> tuple[Tensor, ...]:
        if self.network is not None:
            return self.network(*inputs, **named)  # type: ignore[no-any-return]
        role = (Role.POLICY,) if isinstance(self._accelerator.unwrap_model(model), ActorCritic) else ()
        with self._in_use(model):
            return model(*role, *inputs, **named)  # type: ignore[no-any-return]

    def logprobs(self, model: nn.Module, *inputs: Any, **named: Any) -> Float[Tensor, "targets"]:
        return self.forward(model, *inputs, **named)[0]

    @torch.no_grad()
    def states(
        self, model: nn.Module, ids: Int[Tensor, "batch length"], sources: Int[Tensor, "targets"], *places: Any
    ) -> Float[Tensor, "targets width"]:
        """Return the hidden state that predicts each target, for `logits`. Not for a frozen adapter, nor for fsdp2."""
        with self._in_use(model) as policy:
            return policy.hidden(ids, *places).flatten(0, 1)[sources]

    @torch.no_grad()
    def logits(
        self, model: nn.Module, hidden: Float[Tensor, "chunk width"], temperature: float = 1.0
    ) -> Float[Tensor, "chunk vocabulary"]:
        with self._in_use(model) as policy:
            return policy.logits(hidden, temperature)

    @contextmanager
    def _in_use(self, model: nn.Module) -> Iterator[Policy]:
        if self.network is not None:
            yield self.network
            return
        policy: Any = self._accelerator.unwrap_model(model)
        policy = policy.policy if isinstance(policy, ActorCritic) else policy
        with policy.scoring_with(self._adapter) if self._adapter is not None else adapters_off(policy.model):
            yield policy


def make_reference(recipe: TrainRecipe, policy: Policy, accelerator: Accelerator) -> FrozenPolicy:
    """Create the reference: the base of the policy's adapter, with a copy of a continued one, or `model.path`."""
    if has_adapter(policy.model):
        continued = REFERENCE_ADAPTER in policy.model.peft_config
        return FrozenPolicy(accelerator, None, REFERENCE_ADAPTER if continued else None)
    return freeze(load_network(recipe, accelerator.device, policy.dtype), recipe, policy, accelerator)


def freeze(network: PreTrainedModel, recipe: TrainRecipe, policy: Policy, accelerator: Accelerator) -> FrozenPolicy:
    """Create a frozen policy from a network that `load_network` loaded in the dtype of `policy`, sharded like that."""
    apply_options(network, recipe.train, accelerator.device, policy.batching)
    network.requires_grad_(False)
    frozen = Policy(network, policy.dtype, banned=policy.banned).eval()
    if recipe.train.is_sharded:
        with weights_of_rank_0(frozen):
            # reshard after the forward pass, unlike a root: there is no backward pass that would free it
            for unit in (*decoder_layers(network), frozen):
                fully_shard(unit, mesh=mesh_of(accelerator), reshard_after_forward=True)
        if recipe.train.precision != "auto":
            gather_in_fp8(frozen)
    return FrozenPolicy(accelerator, frozen)


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
        self._rows = rows
        self._missing = missing or {}
        self._seconds = 0.0

    def logprobs(
        self, model: nn.Module, ids: Tensor, sources: Tensor, labels: Tensor, *rest: Any
    ) -> Float[Tensor, "targets"]:
        """Return the teacher's log-probability of each label. Raise SettingError if it cannot read a token."""
        with self._grading(ids, labels):
            return self._frozen.logprobs(model, ids, sources, labels, *rest)

    def top(
        self, model: nn.Module, ids: Tensor, sources: Tensor, labels: Tensor, *rest: Any
    ) -> Float[Tensor, "targets 2 k"]:
        """Return the recipe's `top_k` most likely tokens at each target, among those of the policy's vocabulary, and
        their log-probabilities: see top_k. Raise SettingError if the teacher cannot read a token."""
        count = self._config.top_k
        assert count is not None
        with self._grading(ids, labels):
            found = self._frozen.forward(
                model, ids, sources, labels, *rest, measure=lambda logits, chunk: top_k(logits[:, : self._rows], count)
            )
        return found[2]

    def measure(
        self, model: nn.Module, temperature: float, ids: Tensor, sources: Tensor, labels: Tensor, *places: Any
    ) -> Measure:
        """Return a function that computes the exact divergence of the policy's logits from the teacher's, for
        `Policy.forward`, with the teacher's logits by chunk. Raise SettingError if the teacher cannot read a token."""
        with self._grading(ids, labels):
            hidden = self._frozen.states(model, ids, sources, *places)
        kind: Any = self._config.divergence
        theirs = partial(self._frozen.logits, model, temperature=temperature)
        return lambda logits, chunk: divergence(kind, logits, theirs(hidden[chunk]))

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

    @contextmanager
    def _grading(self, ids: Tensor, labels: Tensor) -> Iterator[None]:
        read = (ids, labels) if self._missing else ()
        found = sorted({token for part in read for token in part.unique().tolist()} & self._missing.keys())
        if found:
            named = ", ".join(f"{self._missing[number]!r} ({number})" for number in found[:5])
            problem = f"{self._config.model} has no token {named}, which the policy's chains contain"
            fix = "name a teacher with it, or set model.chat_template to one without it"
            raise SettingError("teacher.model", problem, fix)
        started = time.perf_counter()
        yield
        if ids.is_cuda:
            # kernels run behind the calls that start them
            torch.cuda.synchronize(ids.device)
        self._seconds += time.perf_counter() - started


def top_k_measure(config: TeacherConfig, top: Float[Tensor, "targets 2 k"]) -> Measure:
    """Return a function that computes the divergence of the policy's logits from a teacher's `top_k` tokens."""
    kind: Any = config.divergence

    def measured(logits: Tensor, chunk: slice) -> Tensor:
        tokens, theirs = top[chunk].unbind(1)
        return top_k_divergence(kind, logits, tokens.long(), theirs)

    return measured


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
        decided_by_rank_0(check) if recipe.train.is_sharded else check()
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


# ---- divergences between policy and teacher


def divergence(kind: Kind, policy: Logits, teacher: Logits) -> Float[Tensor, "tokens"]:
    """Return the divergence of each token's distributions in nats, over the rows of the vocabulary that both have. With
    p the policy's and q the teacher's distribution, both from logits that are divided by the sampling temperature:

    reverse_kl: KL(p || q) (Gu et al., 2024, MiniLLM, arXiv:2306.08543).
    forward_kl: KL(q || p) (Hinton et al., 2015, arXiv:1503.02531).
    jensen_shannon: (KL(q || m) + KL(p || m)) / 2, with m = (q + p) / 2 (Agarwal et al., 2024, GKD, arXiv:2306.13649,
    equation 1). TRL's GKDTrainer has the three as beta = 1, 0 and 0.5."""
    shared = min(policy.shape[-1], teacher.shape[-1])
    return _between(kind, policy[:, :shared].log_softmax(-1), teacher[:, :shared].log_softmax(-1))


def top_k_divergence(
    kind: Kind, policy: Logits, tokens: Int[Tensor, "tokens k"], teacher: Float[Tensor, "tokens k"]
) -> Float[Tensor, "tokens"]:
    """Return the divergence of each token's distributions, in nats, over the given tokens and the rest, which counts as
    one more token: a lower bound of the divergence over the vocabulary.

    `teacher` are the teacher's log-probabilities of `tokens`. A token outside the policy's vocabulary, such as -1,
    belongs to the rest; the divergence of a line without others is 0. The teacher's rest is at least the rounding of
    its dtype."""
    width = policy.shape[-1]
    known = (tokens >= 0) & (tokens < width)
    # one of the line's tokens more than once changes nothing
    places = torch.where(known, tokens, torch.where(known, tokens, 0).amax(-1, keepdim=True))
    total = policy.logsumexp(-1, keepdim=True)
    finite = torch.finfo(policy.dtype).min / 4
    rest = policy.scatter(-1, places, finite).logsumexp(-1, keepdim=True) - total
    teacher = teacher.to(policy.dtype)
    mass = torch.where(known, teacher.exp(), 0.0).sum(-1, keepdim=True)
    others = (1.0 - mass).clamp(min=torch.finfo(torch.float32).eps).log()
    some = known.any(-1, keepdim=True)
    used = torch.cat([known, some & (known.sum(-1, keepdim=True) < width)], -1)
    # two equal probabilities of nearly 0 add nothing
    none = torch.full_like(used, -1e3, dtype=policy.dtype)
    p = torch.where(used, torch.cat([policy.gather(-1, places) - total, rest], -1), none)
    q = torch.where(used, torch.cat([teacher, others], -1), none)
    return _between(kind, p, q)


def top_k(logits: Logits, k: int) -> Float[Tensor, "tokens 2 k"]:
    """Return each line's k most likely tokens, as floats, and their log-probabilities; -1 and 0 if there are fewer."""
    found = logits.topk(min(k, logits.shape[-1]))
    pair = torch.stack([found.indices.to(logits.dtype), found.values - logits.logsumexp(-1, keepdim=True)], -2)
    missing = k - pair.shape[-1]
    filled: Tensor = torch.cat([pair, pair.new_tensor([[-1.0], [0.0]]).expand(len(pair), 2, missing)], -1)
    return filled


def _between(kind: Kind, p: Tensor, q: Tensor) -> Float[Tensor, "tokens"]:
    match kind:
        case "reverse_kl":
            return _kl(p, q)
        case "forward_kl":
            return _kl(q, p)
        case "jensen_shannon":
            mixture = torch.logaddexp(p, q) - math.log(2)
            return (_kl(q, mixture) + _kl(p, mixture)) / 2


def _kl(first: Logits, second: Logits) -> Float[Tensor, "tokens"]:
    """KL(first || second) of log-probabilities."""
    return (first.exp() * (first - second)).sum(-1)


# ---- rows with grades: the streams `teacher` or `teacher_top`, from a server, or with more in the teacher's context
# than the policy has (teacher.context, see Row.teacher_prompt). Tokens of rows without grades have an infinite
# `teacher`, or a `teacher_top` of -1; their divergence and its gradient are 0. NaN is no such mark: it must reach the
# gradient, where the learner refuses it.


def without_long(rows: Iterable[TrainingRow], longest: int) -> list[TrainingRow]:
    """Return `rows`, of which none is graded if the teacher's has more than `longest` tokens; warn about these."""
    found, left_out = [], 0
    for row in rows:
        if row.in_context is not None and len(row.in_context.token_ids) > longest:
            row, left_out = replace(row, in_context=None), left_out + 1
        found.append(row)
    if found and not any(row.in_context is not None for row in found):
        text = "the teacher graded no row of a step: no chain had a text for its context (see teacher.context)"
        notify(logger, "nothing graded", text)
    if left_out:
        text = f"{left_out} of {len(found)} rows of a step have more than {longest:,} tokens with teacher.context, "
        text += "and are not graded; raise train.token_budget if the model can take longer rows"
        notify(logger, "rows too long for the teacher", text)
    return found


def check_saved_prompts(groups: Iterable[Group], path: Path) -> None:
    """Raise SettingError if no row of saved groups has a prompt for the teacher: none could be graded."""
    rows = (row for group in groups for chain in group.trajectories for row in chain.rows)
    if all(row.teacher_prompt is None for row in rows):
        problem = f"set, but {path} has no text for a teacher, which a run with teacher.context saves"
        raise SettingError("teacher.context", problem, "name the trajectories/ of such a run, or use teacher.model")


def teachers_rows(rows: Sequence[TrainingRow]) -> list[TrainingRow]:
    """Return the teacher's rows of `rows`; if none is graded, a row whose scores nothing uses: only rank 0 has the
    rows, and all processes must make the same passes."""
    found = [row.in_context for row in rows if row.in_context is not None]
    return found or [replace(row, streams={"weight": np.ones(len(row.targets))}) for row in rows[:1]]


def with_scores(
    rows: Sequence[TrainingRow], scored: Sequence[TrainingRow], stream: str, top_k: int | None
) -> list[TrainingRow]:
    """Return `rows` with the `stream` of the teacher's rows, `scored`."""
    remaining = iter(scored)
    found = []
    for row in rows:
        if row.in_context is not None:
            values = next(remaining).streams[stream]
        elif top_k is None:
            values = np.full(len(row.targets), np.inf)
        else:
            values = np.tile([[[-1.0], [0.0]]], (len(row.targets), 1, top_k))
        found.append(replace(row, streams=row.streams | {stream: values}))
    return found


def is_graded(streams: dict[str, Tensor]) -> Bool[Tensor, "targets"]:
    if (top := streams.get("teacher_top")) is not None:
        return (top[:, 0] >= 0).any(-1)
    if (scores := streams.get("teacher")) is not None:
        return scores != torch.inf
    # an exact divergence covers all
    return torch.ones_like(streams["weight"], dtype=torch.bool)


def with_grades(training: TrainingRow, row: Row, config: TeacherConfig) -> TrainingRow:
    """Add the grades of `row`, which the rollout worker got from the teacher's server, to its training row, as the
    stream `config.stream`. Raise SettingError if it has none, or others."""
    name, count = config.stream, len(training.targets)
    assert name is not None
    grades = row.teacher_logprobs
    lacks = grades is None or len(grades) != count * (config.top_k or 1)
    if lacks or (row.teacher_tokens is None) != config.is_sampled:
        problem = f"a row of {count} sampled tokens has no grades of the server at {config.url}, or others"
        raise SettingError("teacher.url", problem, "begin another run with output=OTHER")
    values = np.asarray(grades, dtype=np.float64)
    if row.teacher_tokens is not None:
        values = np.stack([np.asarray(row.teacher_tokens, np.float64), values]).reshape(2, count, -1).transpose(1, 0, 2)
    return replace(training, streams=training.streams | {name: values})
