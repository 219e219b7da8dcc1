"""Groups: their training signal, their samples and their advantages."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from agentfactory.audit.check import Check
from agentfactory.audit.record import Places, Seen
from agentfactory.base.findings import Evidence, Finding
from agentfactory.recipe.schema import Recipe
from agentfactory.rollout.config import LateChains
from agentfactory.rollout.evaluation.rules import DRAW, ENOUGH_GROUPS, are_equal, could_differ, equal_rewards
from agentfactory.rollout.groups.group_filter import counted
from agentfactory.rollout.trajectory import Group, Trajectory
from agentfactory.trainers.config import ScaleOptions

if TYPE_CHECKING:
    from agentfactory.trainers.loop.token_advantages import Credit

_ORDERED = ("grpo", "rloo", "raft", "reinforce_pp_baseline")
"""Estimators whose advantages have the order of the rewards within a group."""
NEAR = 2e-6
FLAT = 1e-3
"""Gap of rewards, as a share of the spread of all rewards, whose advantages over a batch must differ."""


class GroupCheck(Check):
    """Chains of a group, and their rewards, must differ; a higher reward must not have a lower advantage."""

    topic = "groups"

    def begin(self) -> None:
        self._groups = self._equal = self._compared = self._several = 0
        self._same, self._disordered, self._flat, self._formula = Places(), Places(), Places(), Places()
        self._uneven = Places()
        self._rewards: Counter[float] = Counter()

    async def note(self, seen: Seen) -> None:
        if seen.held_out:
            return
        chains = [chain for chain in seen.group.trajectories if chain.reward is not None]
        if len(chains) < 2:
            return
        self._groups += 1
        rewards = {chain.reward for chain in chains}
        self._rewards.update(chain.reward for chain in chains if chain.reward is not None)
        if len(rewards) == 1 and not any(chain.turn_rewards for chain in chains):
            self._equal += 1
        self._compare_samples(seen, chains)
        self._compare_advantages(seen, chains)

    def _compare_samples(self, seen: Seen, chains: list[Trajectory]) -> None:
        if not could_differ(chains):
            return
        self._several += 1
        if are_equal(chains):
            text = f"all {len(chains)} chains have the same sampled tokens"
            self._same.add(Evidence(text, seen.group.id, chains[0].id, file=seen.file))

    def _compare_advantages(self, seen: Seen, chains: list[Trajectory]) -> None:
        recipe = self.record.recipe
        if recipe is None or not seen.credit or recipe.train.advantage.estimator not in _ORDERED:
            return
        if recipe.teacher is not None or recipe.train.loss.kl.place == "reward":
            return
        if any(chain.turn_rewards for chain in chains):
            return
        blamed = recipe.train.advantage.malformed_turns == "blamed" and any(chain.malformed_turns for chain in chains)
        if blamed and recipe.rollout.late_chains is LateChains.BASELINE:
            return  # the bound depends on which tokens were too old
        options = recipe.train.advantage.options
        whole_batch = recipe.train.advantage.estimator == "reinforce_pp_baseline" or (
            isinstance(options, ScaleOptions) and options.scale == "batch"
        )
        credit = _credit(seen.group, recipe)
        expected = None if whole_batch else _advantages(credit)
        self._compared += len(seen.credit)
        differing = None
        if expected is not None:
            may_be_0 = recipe.train.loss.top_entropy < 1.0
            pairs = ((name, _difference(rows, expected.get(name, []), may_be_0)) for name, rows in seen.credit.items())
            differing = next(((name, text) for name, text in pairs if text is not None), None)
            if differing is None:
                return
        found = self._chain_advantages(seen, chains, credit.rewards)
        ranked = sorted(found)
        for low, high in pairwise(ranked):
            if low[0] < high[0] and low[1] > high[1] + NEAR:
                text = f"reward {high[0]:g} has the advantage {high[1]:g}, and reward {low[0]:g} has {low[1]:g}"
                self._disordered.add(Evidence(text, seen.group.id, high[2], file=seen.file))
                break
        if differing is not None:
            name, text = differing
            self._formula.add(Evidence(text, seen.group.id, name, file=seen.file))
        elif len(ranked) > 1 and abs(ranked[0][1] - ranked[-1][1]) < NEAR:
            gap, spread = ranked[-1][0] - ranked[0][0], max(self._rewards) - min(self._rewards)
            if gap > FLAT * spread:
                text = f"rewards {ranked[0][0]:g} and {ranked[-1][0]:g} have the advantage {ranked[0][1]:g}"
                self._flat.add(Evidence(text, seen.group.id, ranked[-1][2], file=seen.file))

    def _chain_advantages(
        self, seen: Seen, chains: list[Trajectory], rewards: Mapping[str, float]
    ) -> list[tuple[float, float, str]]:
        """Return (reward, mean advantage, id) of the chains without malformed turns."""
        recipe = self.record.recipe
        assert recipe is not None
        found: list[tuple[float, float, str]] = []
        for chain in counted(chains, recipe.rollout):
            values = [value for row in seen.credit.get(chain.id, ()) for value in row.get("advantage", ())]
            if recipe.train.loss.top_entropy < 1.0:
                values = [value for value in values if value]
            if chain.malformed_turns or not values:
                continue
            if np.ptp(values) > NEAR:
                text = f"its tokens have advantages from {min(values):.4g} to {max(values):.4g}"
                self._uneven.add(Evidence(text, seen.group.id, chain.id, file=seen.file))
            found.append((rewards[chain.id], float(np.mean(values)), chain.id))
        return found

    def findings(self) -> Iterator[Finding]:
        if self._same.total * 2 > self._several:
            text = f"in {self._same.total} of {self._several} groups all chains are the same, token by token"
            yield self.wrong(text, DRAW, self._same.kept)
        if places := self._disordered:
            text = f"in {places.total} groups a chain with a higher reward has a lower advantage"
            yield self.wrong(
                text, "compare the sign and the order of the advantages with those of the rewards", places.kept
            )
        if (places := self._formula) and not self._disordered:
            text = f"in {places.total} groups advantages are not those of the group's rewards"
            fix = "compare the chains of the group with those whose rewards make its baseline"
            yield self.wrong(text, fix, places.kept)
        if places := self._uneven:
            text = f"{places.total} chains have different advantages from token to token, and the estimator gives one"
            yield self.wrong(text, "give all tokens of a chain its advantage", places.kept)
        if places := self._flat:
            text = f"in {places.total} groups chains of different rewards have equal advantages"
            yield self.wrong(text, "look at what computes advantages: the rewards do not reach them", places.kept)
        alike = self._equal == self._groups and len(self._rewards) == 1
        found = equal_rewards(self._rewards, alike, self._groups, self._equal)
        if found is not None and self._groups >= ENOUGH_GROUPS:
            yield self.warning(found.text, found.fix)

    def looked_at(self) -> str:
        advantages = f", advantages of {self._compared:,} chains" if self._compared else ""
        return f"{self._groups:,} groups of several chains{advantages}" if self._groups else ""


def _credit(group: Group, recipe: Recipe) -> "Credit":
    """Return the trainer's credit of a group if it trains all tokens."""
    from agentfactory.trainers.loop.token_advantages import Credit

    loss = recipe.train.loss.model_copy(update={"top_entropy": 1.0})
    train = recipe.train.model_copy(update={"loss": loss})
    return Credit([group], recipe.model_copy(update={"train": train}))


def _advantages(credit: "Credit") -> dict[str, list[dict[str, Any]]]:
    """Return, by chain, what the trainer would note."""
    (line,) = credit.lines(0, credit.assign(credit.rows).rows) if credit.rows else ['{"chains": {}}']
    found: dict[str, list[dict[str, Any]]] = msgspec.json.decode(line)["chains"]
    return found


def _difference(noted: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], may_be_0: bool) -> str | None:
    """Return the first difference of noted advantages from those of `rows`, which may have more tokens."""
    expected = {
        (row["row"], target): advantage
        for row in rows
        for target, advantage in zip(row["targets"], row["advantage"], strict=True)
    }
    for row in noted:
        for target, advantage in zip(row["targets"], row.get("advantage", ()), strict=False):
            right = expected.get((row["row"], target))
            # tokens that must not be trained are another check's
            if right is None or (may_be_0 and advantage == 0.0):
                continue
            if abs(advantage - right) > NEAR * max(1.0, abs(right)):
                return f"a token has the advantage {advantage:.4g}; the rewards of its group give {right:.4g}"
    return None
