"""Groups: their training signal, their samples and their advantages."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from agentfactory.audit.check import Check, Parts
from agentfactory.audit.finding import Evidence, Finding, Places
from agentfactory.audit.record import Record, Seen
from agentfactory.rollout.evaluation.equal_samples import are_equal, could_differ
from agentfactory.rollout.groups.group_filter import counted
from agentfactory.rollout.trajectory import Trajectory
from agentfactory.trainers.config import GrpoOptions

MOST_EQUAL = 0.8
"""Share of groups with equal rewards beyond which there is a warning."""
ENOUGH_GROUPS = 32
_ORDERED = ("grpo", "rloo", "raft", "reinforce_pp_baseline")
"""Estimators whose advantages have the order of the rewards within a group."""
NEAR, FORMULA = 1e-5, 1e-3
"""Differences of advantages that rounding gives: absolute, and relative to the formula's."""


class GroupCheck(Check):
    """Chains of a group must differ, as their rewards must for a signal; a higher reward must not have a lower
    advantage."""

    topic = "groups"

    def __init__(self, record: Record, parts: Parts) -> None:
        super().__init__(record, parts)
        self._groups = self._equal = self._compared = self._several = 0
        self._same, self._disordered, self._flat, self._formula = Places(), Places(), Places(), Places()
        self._uneven = Places()
        self._rewards: Counter[float] = Counter()

    async def note(self, seen: Seen) -> None:
        """See Check."""
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
        if recipe.train.overlong is not None:
            return  # its penalty is part of the rewards there
        found: list[tuple[float, float, str]] = []
        for chain in counted(chains, recipe.rollout):
            values = [value for row in seen.credit.get(chain.id, ()) for value in row.get("advantage", ())]
            if chain.malformed_turns or not values:
                continue
            assert chain.reward is not None
            if np.ptp(values) > NEAR:
                text = f"its tokens have advantages from {min(values):.4g} to {max(values):.4g}"
                self._uneven.add(Evidence(text, seen.group.id, chain.id, file=seen.file))
            found.append((chain.reward, float(np.mean(values)), chain.id))
        self._compared += len(found)
        self._compare_with_formula(seen, found)
        ranked = sorted(found)
        for low, high in pairwise(ranked):
            if low[0] < high[0] and low[1] > high[1] + NEAR:
                text = f"reward {high[0]:g} has the advantage {high[1]:g}, and reward {low[0]:g} has {low[1]:g}"
                self._disordered.add(Evidence(text, seen.group.id, high[2], file=seen.file))
                break
        if len(ranked) > 1 and ranked[0][0] < ranked[-1][0] and abs(ranked[0][1] - ranked[-1][1]) < NEAR:
            text = f"rewards {ranked[0][0]:g} and {ranked[-1][0]:g} have the advantage {ranked[0][1]:g}"
            self._flat.add(Evidence(text, seen.group.id, ranked[-1][2], file=seen.file))

    def _compare_with_formula(self, seen: Seen, found: list[tuple[float, float, str]]) -> None:
        """Compare with (r - mean) / (std + 1e-4) of DeepSeekMath (arXiv:2402.03300), or without the division."""
        recipe = self.record.recipe
        assert recipe is not None
        config = recipe.train.advantage
        scale = config.options.scale if isinstance(config.options, GrpoOptions) else "batch"
        counting = counted(seen.group.trajectories, recipe.rollout)
        if scale == "batch" or len(counting) < 2:
            return
        rewards = np.array([chain.reward for chain in counting], dtype=np.float64)
        divisor = rewards.std(ddof=1) + 1e-4 if scale == "group" else 1.0
        for reward, advantage, chain in found:
            expected = (reward - rewards.mean()) / divisor
            if abs(advantage - expected) > FORMULA * max(1.0, abs(expected)):
                text = f"reward {reward:g} has the advantage {advantage:.4g}; its group gives {expected:.4g}"
                self._formula.add(Evidence(text, seen.group.id, chain, file=seen.file))
                return

    def findings(self) -> Iterator[Finding]:
        """See Check."""
        if self._same.total * 2 > self._several:
            text = f"in {self._same.total} of {self._several} groups all chains are the same, token by token"
            fix = "let the sampler draw: each chain needs a seed of its own, and a temperature above 0"
            yield self.wrong(text, fix, self._same.kept)
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
        if self._groups >= ENOUGH_GROUPS and self._equal > MOST_EQUAL * self._groups:
            most, count = self._rewards.most_common(1)[0]
            text = f"{self._equal:,} of {self._groups:,} groups have equal rewards, and teach nothing"
            text += f"; {count / self._rewards.total():.0%} of all rewards are {most:g}"
            fix = "use tasks that the model solves sometimes, a finer reward, or larger groups"
            yield self.warning(text, fix)

    @property
    def looked_at(self) -> str:
        """See Check."""
        advantages = f", advantages of {self._compared:,} chains" if self._compared else ""
        return f"{self._groups:,} groups of several chains{advantages}" if self._groups else ""
