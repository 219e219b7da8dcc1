"""Credit assignment: an advantage and a weight per sampled token, from the rewards of a batch's chains."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

import msgspec
import numpy as np
import torch

from agentfactory.base.errors import SettingError
from agentfactory.base.run_notices import notify
from agentfactory.rollout.config import OutcomePolicy
from agentfactory.rollout.groups.group_filter import counted
from agentfactory.rollout.token_row import Row
from agentfactory.rollout.trajectory import Group, Trajectory
from agentfactory.tools.environments.environment import anchor_text
from agentfactory.trainers.batches.batch import TrainingRow, only_targets, training_row
from agentfactory.trainers.config import TrainRecipe
from agentfactory.trainers.loop.advantages import ChainRewards, Estimator, Groups, overlong_penalty, step_groups
from agentfactory.trainers.teachers.teacher import with_grades
from agentfactory.trainers.update.losses import kl, token_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Credited:
    """A batch's rows, ready for training."""

    rows: list[TrainingRow] = field(default_factory=list)
    normaliser: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class _Chain:
    """A chain that has a reward. One with a masked outcome is in baselines but not trained: it has no rows."""

    id: str
    reward: float
    limit: int
    turn_rewards: list[float]
    ends: list[int]
    """Number of sampled tokens up to the end of each turn; empty if no turn is credited separately."""
    malformed: list[int]
    rows: list[TrainingRow]
    places: list[int]
    """Indices of these rows in the trajectory; rows without sampled tokens are not trained."""
    sources: list[Row]
    """The trajectory's rows that `rows` were made from."""
    anchors: list[str | None]

    @property
    def tokens(self) -> int:
        return sum(len(row.targets) for row in self.rows)

    def stream(self, name: str) -> list[float]:
        """Return a stream over all sampled tokens of the chain's rows. Tool tokens are not steps."""
        return [value for row in self.rows for value in np.asarray(row.streams[name]).tolist()]


class Credit:
    def __init__(
        self, groups: Sequence[Group], recipe: TrainRecipe, fresh: Callable[[Row], np.ndarray] | None = None
    ) -> None:
        """Chains without a reward, or with an outcome that is dropped, are left out completely. `fresh` returns, per
        token of a row, whether it may be trained: the others are context, and their chains' rewards count."""
        self._recipe = recipe
        own = {part.name: part.recipe.rollout.max_total_tokens for part in recipe.parts()}
        self._ids = [group.id for group in groups]
        self._groups: list[list[_Chain]] = []
        for group in groups:
            limit = own.get(group.source, recipe.rollout.max_total_tokens)
            chains = counted(group.trajectories, recipe.rollout)
            observed = self._estimator.compares_turns and not any(chain.anchors for chain in chains)
            self._groups.append([self._chain(chain, limit, fresh, observed) for chain in chains])

    @cached_property
    def _estimator(self) -> Estimator:
        # loaded only where there are groups: on rank 0
        return Estimator(self._recipe.train.advantage)

    def _chain(
        self, trajectory: Trajectory, limit: int, fresh: Callable[[Row], np.ndarray] | None, observed: bool
    ) -> _Chain:
        recipe, rows, reward = self._recipe, trajectory.rows, trajectory.reward
        trained = recipe.rollout.outcome_policy(trajectory.outcome) is OutcomePolicy.KEEP
        assert reward is not None
        if (overlong := recipe.train.overlong) is not None:
            # of several rows (a template that rewrites history, rollout.context), the last one fills the context
            length = len(rows[-1].token_ids) if rows else 0
            reward += overlong_penalty(length, limit, overlong.buffer, overlong.penalty)
        made = {place: row for place, row in enumerate(map(training_row, rows)) if row} if trained else {}
        if recipe.teacher is not None and recipe.teacher.url is not None:
            made = {place: with_grades(row, rows[place], recipe.teacher) for place, row in made.items()}
        counted = [np.asarray(row.mask, dtype=bool) for row in rows]
        if fresh is not None:
            may = [fresh(row) for row in rows]
            counted = [mask & kept for mask, kept in zip(counted, may, strict=True)]
            left = {place: only_targets(row, may[place][row.targets]) for place, row in made.items()}
            made = {place: row for place, row in left.items() if row}
        malformed = trajectory.malformed_turns if recipe.train.advantage.malformed_turns == "blamed" else []
        anchors = observations(trajectory) if observed else trajectory.anchors
        ends: list[int] = []
        if trajectory.turn_rewards is not None or malformed or anchors or self._estimator.compares_turns:
            # without context to predict it from, the first token of a row is not trained: see training_row
            spans = trajectory.turn_spans()
            lengths = [int(np.count_nonzero(counted[row][max(start, 1) : end])) for row, start, end in spans]
            ends = list(accumulate(lengths))
        credited = [*made.values()], [*made], [rows[place] for place in made]
        turn_rewards = trajectory.turn_rewards or []
        return _Chain(trajectory.id, reward, limit, turn_rewards, ends, malformed, *credited, anchors)

    @property
    def rows(self) -> list[TrainingRow]:
        """The rows to train, which may be scored before their advantages are known."""
        return [row for chain in self._chains() for row in chain.rows]

    @property
    def sources(self) -> list[Row]:
        return [source for chain in self._chains() for source in chain.sources]

    @property
    def rewards(self) -> dict[str, float]:
        """The reward of each chain that counts, after the penalty of `train.overlong`, by chain."""
        return {chain.id: chain.reward for chain in self._chains()}

    def assign(self, rows: Sequence[TrainingRow]) -> Credited:
        """Add advantages and weights (by `train.loss.normaliser`) to `rows`: the property's, with the streams of
        `needed_scores`. Advantages are bounded in malformed turns, and 0 for tokens whose entropy is below the batch's
        quantile (`train.loss.top_entropy`). The bounds become streams, `least` and `most`, for a sampled teacher."""
        remaining = iter(rows)
        chains = self._chains()
        for chain in chains:
            chain.rows = [next(remaining) for _ in chain.rows]
        advantages, values, metrics = self._advantages()
        arrays = [np.asarray(chain, dtype=np.float64) for chain in advantages]
        most = [np.full(len(chain), np.inf) for chain in arrays]
        told = iter(zip(arrays, most, strict=True))
        for group in self._groups:
            pairs = [next(told) for _ in group]
            _blame_malformed_turns(group, [values for values, _ in pairs], [bounds for _, bounds in pairs])
        trained = [index for index, chain in enumerate(chains) if chain.rows]
        lengths = [chains[index].tokens for index in trained]
        loss = self._recipe.train.loss
        limits = [chains[index].limit for index in trained]
        weights, normaliser = token_weights(lengths, loss.normaliser, limits)
        least = [np.full(len(chain), -np.inf) for chain in arrays]
        if loss.top_entropy < 1.0:
            for index, keeps in enumerate(_uncertain(chains, loss.top_entropy)):
                least[index][~keeps] = most[index][~keeps] = 0.0
        teacher = self._recipe.teacher
        is_bounded = teacher is not None and teacher.is_sampled and any(np.isfinite(bounds).any() for bounds in most)
        done: list[TrainingRow] = []
        for index, weight in zip(trained, weights, strict=True):
            chain = chains[index]
            bounds = {"least": least[index], "most": most[index]}
            streams = {"advantage": arrays[index].clip(*bounds.values()), "weight": np.full(chain.tokens, weight)}
            if is_bounded:
                streams |= bounds
            if values:
                streams["return"] = np.asarray(values[index])
            ends = np.cumsum([len(row.targets) for row in chain.rows])[:-1]
            parts = {name: np.split(stream, ends) for name, stream in streams.items()}
            for number, row in enumerate(chain.rows):
                own = {name: part[number] for name, part in parts.items()}
                done.append(replace(row, streams=row.streams | own))
        return Credited(done, normaliser, metrics)

    def lines(self, step: int, rows: Sequence[TrainingRow], before: Sequence[dict[str, np.ndarray]] = ()) -> list[str]:
        """Return JSON per group: the credit of each trained token of its chains, from the rows of `assign`, and, if the
        policy was trained, their streams of PolicyUpdate.before. Numbers have 6 decimals."""
        none: list[dict[str, np.ndarray]] = [{}] * len(rows)
        remaining = iter(zip(rows, before or none, strict=True))
        lines = []
        for group, chains in zip(self._ids, self._groups, strict=True):
            credited = {chain.id: [_noted(place, *next(remaining)) for place in chain.places] for chain in chains}
            trained = {name: entries for name, entries in credited.items() if entries}
            lines.append(msgspec.json.encode({"group": group, "step": step, "chains": trained}).decode())
        return lines

    def _chains(self) -> list[_Chain]:
        return [chain for group in self._groups for chain in group]

    def _advantages(self) -> tuple[list[list[float]], list[list[float]], dict[str, float]]:
        """Return, per chain and token, the advantages and the critic's target returns (or nothing), and metrics."""
        chains = self._chains()
        costs, metrics = self._costs(chains)
        has_critic = self._recipe.train.has_critic
        made = (
            ChainRewards(c.reward, c.turn_rewards, c.ends, cost, c.stream("value") if has_critic else [], c.anchors)
            for c, cost in zip(chains, costs, strict=True)
        )
        groups = [[next(made) for _ in group] for group in self._groups]
        advantages, targets = self._estimator(groups)
        if not all(np.all(np.abs(np.asarray(chain, dtype=np.float64)) < _LARGEST) for chain in advantages):
            problem = f"{Path(self._recipe.train.advantage.estimator).name} returned an advantage that is not a finite "
            raise SettingError("train.advantage.estimator", f"{problem}float32", "look for a division by 0")
        if self._estimator.compares_turns:
            metrics |= _step_metrics(groups)
        if targets:
            pairs = [(t, c.stream("value")) for c, t in zip(chains, targets, strict=True)]
            errors = [r - v for target, values in pairs for r, v in zip(target, values, strict=True)]
            variance = pvariance([value for target in targets for value in target] or [0.0])
            if variance > 0:
                metrics["critic/explained_variance"] = 1.0 - pvariance(errors) / variance
        return advantages, targets, metrics

    def _costs(self, chains: Sequence[_Chain]) -> tuple[list[list[float]], dict[str, float]]:
        """Return rewards per sampled token: the chain's at its last token and its turns' at their last tokens, minus
        the KL cost if it is part of the reward. Also return metrics."""
        distance = self._recipe.train.loss.kl
        costs: list[list[float]] = []
        paid: list[float] = []
        for chain in chains:
            cost = [0.0] * chain.tokens
            if cost:
                cost[-1] += chain.reward
                for end, reward in zip(chain.ends, chain.turn_rewards, strict=True) if chain.turn_rewards else ():
                    if end:
                        cost[end - 1] += reward
                if distance.coefficient and distance.place == "reward":
                    proximal, reference = (torch.tensor(chain.stream(name)) for name in ("proximal", "reference"))
                    gaps = kl(distance.estimator, proximal, reference).tolist()
                    paid += gaps
                    cost = [reward - distance.coefficient * gap for reward, gap in zip(cost, gaps, strict=True)]
            costs.append(cost)
        return costs, {"kl": fmean(paid)} if paid else {}


_SAME_ENTROPY = 1e-3
"""Tolerance in nats within which entropies count as equal: for equal tokens after equal contexts they differ by
rounding, which depends on how the rows were batched."""
_LARGEST = float(np.finfo(np.float32).max)


def needed_scores(recipe: TrainRecipe) -> list[str]:
    """Return the streams that credit and loss need from the weights before the update; see Learner.score."""
    loss = recipe.train.loss
    names = []
    if recipe.train.has_reference:
        names.append("reference")
        if loss.kl.place == "reward":
            names.append("proximal")
    # the grades of a teacher behind a server come with the rows
    if recipe.teacher is not None and recipe.teacher.url is None and recipe.teacher.stream is not None:
        names.append(recipe.teacher.stream)
    if loss.top_entropy < 1.0:
        names.append("entropy")
    if recipe.train.has_critic:
        names.append("value")
    return names


def _blame_malformed_turns(
    chains: Sequence[_Chain], advantages: Sequence[np.ndarray], most: Sequence[np.ndarray]
) -> None:
    """Bound the advantages of tokens in malformed turns (their `most`) by minus the root mean square of the group's
    advantages. A malformed turn never helps a chain to succeed; rewarding it would make the format drift. A bound of 0
    is not enough: if chains with such a turn do well, chains without one are below average."""
    if not any(chain.malformed for chain in chains):
        return
    bound = -math.sqrt(fmean([value**2 for chain in advantages for value in chain.tolist()] or [0.0]))
    for chain, bounds in zip(chains, most, strict=True):
        for turn in chain.malformed if len(bounds) else []:
            start, end = [0, *chain.ends][turn : turn + 2]
            bounds[start:end] = bound


def _noted(place: int, row: TrainingRow, before: dict[str, np.ndarray]) -> dict[str, Any]:
    streams = {"advantage": row.streams["advantage"]} | before
    kept = {name: values for name, values in streams.items() if not np.isnan(values).all()}
    noted = {name: values.astype(np.float64).round(6).tolist() for name, values in kept.items()}
    return {"row": place, "targets": row.targets.tolist()} | noted


def _uncertain(chains: Sequence[_Chain], share: float) -> list[np.ndarray]:
    """Return, per token of each chain, whether it is among the `share` of tokens with the highest entropy (Wang et al.,
    2025, arXiv:2506.01939, equation 4), over the whole batch. Of equal entropies at the quantile, the first are."""
    lengths = [chain.tokens for chain in chains]
    flat = np.concatenate([np.asarray(chain.stream("entropy")) for chain in chains])
    threshold = np.quantile(flat, 1.0 - share)
    count = len(flat) - math.ceil((1.0 - share) * (len(flat) - 1) - 1e-9)
    kept = flat > threshold + _SAME_ENTROPY
    near = np.flatnonzero(np.abs(flat - threshold) <= _SAME_ENTROPY)
    kept[near[: count - int(kept.sum())]] = True
    return np.split(kept, np.cumsum(lengths)[:-1])


def observations(trajectory: Trajectory) -> list[str | None]:
    """Return a digest of the messages before each turn since the turn before it, None if there are none, as after a
    summary: the turns' anchors in a group whose environment gives none. A malformed turn changes nothing: the turn
    after it keeps its digest, and the error message is ignored."""
    if not trajectory.turns:
        return []
    messages = trajectory.messages
    said = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    anchors: list[str | None] = []
    before = 0
    # the task itself may begin with assistant messages
    for turn, place in enumerate(said[-trajectory.turns :]):
        if turn - 1 in trajectory.malformed_turns:
            anchors.append(anchors[-1])
        else:
            seen = [[m["role"], m.get("name"), m.get("content")] for m in messages[before:place]]
            anchors.append(anchor_text(seen) if seen else None)
        before = place + 1
    return anchors


def _step_metrics(groups: Groups) -> dict[str, float]:
    """Return the share of a batch's turns that are compared with others, and the mean size of their step groups. If no
    turn has an anchor, warn that `gigpo` is then the same as `grpo`."""
    chains = [chain for group in groups for chain in group]
    turns = sum(len(chain.turn_ends) for chain in chains)
    if turns and all(anchor is None for chain in chains for anchor in chain.anchors):
        problem = "train.advantage.estimator=gigpo: no turn of a batch has an anchor, so it trains as grpo does"
        fix = "fix: let the environment give anchors"
        notify(logger, "no anchors", f"{problem}; {fix}", see="docs/algorithms.md")
    found = [members for group in groups for members in step_groups([chain.anchors for chain in group])]
    sizes = [len(members) for members in found if len(members) > 1]
    shared = {"step_groups/turns": sum(sizes) / turns} if turns else {}
    return shared | ({"step_groups/size": fmean(sizes)} if sizes else {})
