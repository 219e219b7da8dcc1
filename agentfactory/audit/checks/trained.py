"""Trained chains and tokens, compared with the sampled ones."""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from agentfactory.audit.check import Check, Parts
from agentfactory.audit.finding import Evidence, Finding, Places
from agentfactory.audit.record import TOKENS, TRAINED, Record, Seen
from agentfactory.rollout.config import LateChains, OutcomePolicy
from agentfactory.rollout.groups.group_filter import counted
from agentfactory.rollout.trajectory import Trajectory


class TrainedCheck(Check):
    """Of each chain that counts, all sampled tokens must be trained and no others; each group that a step trained must
    be saved."""

    topic = "trained tokens"
    needs = (TOKENS, TRAINED)
    _FIX = "compare the targets of the batch with the masks of its rows"

    def __init__(self, record: Record, parts: Parts) -> None:
        super().__init__(record, parts)
        self._chains = self._tokens = 0
        self._others, self._missing, self._left_out = Places(), Places(), Places()
        self._groups: Counter[int] = Counter()

    async def note(self, seen: Seen) -> None:
        """See Check."""
        if seen.held_out or seen.step is None:
            return
        self._groups[seen.step] += 1
        for chain in seen.group.trajectories:
            if chain.id in seen.credit:
                self._compare(seen, chain)
            elif seen.credit and self._counts(chain) and any(row.graded().size for row in chain.rows):
                text = f"it ended as {chain.outcome} with the reward {chain.reward}, and is not trained"
                self._left_out.add(Evidence(text, seen.group.id, chain.id, file=seen.file))

    def _counts(self, chain: Trajectory) -> bool:
        recipe = self.record.recipe
        if recipe is None:
            return False
        rollout = recipe.rollout
        if recipe.train.from_trajectories is not None or rollout.late_chains is LateChains.BASELINE:
            return False
        return bool(counted([chain], rollout)) and rollout.outcome_policy(chain.outcome) is OutcomePolicy.KEEP

    def _compare(self, seen: Seen, chain: Trajectory) -> None:
        self._chains += 1
        recipe = self.record.recipe
        # tokens that are too old are context then
        some = recipe is not None and recipe.rollout.late_chains is LateChains.BASELINE
        noted = {int(row["row"]): np.asarray(row["targets"], dtype=int) for row in seen.credit[chain.id]}
        for number, row in enumerate(chain.rows):
            expected, targets = row.graded(), noted.get(number, np.empty(0, dtype=int))
            self._tokens += targets.size
            others, missing = np.setdiff1d(targets, expected), np.setdiff1d(expected, targets)
            if others.size:
                text = f"{others.size} tokens were trained that were not sampled"
                self._others.add(Evidence(text, seen.group.id, chain.id, number, int(others[0]), seen.file))
            if missing.size and not some:
                text = f"{missing.size} of {expected.size} sampled tokens were not trained"
                self._missing.add(Evidence(text, seen.group.id, chain.id, number, int(missing[0]), seen.file))

    def findings(self) -> Iterator[Finding]:
        """See Check."""
        if places := self._others:
            text = f"in {places.total} rows tokens were trained that the policy did not sample"
            yield self.wrong(text, self._FIX, places.kept)
        if places := self._missing:
            text = f"in {places.total} rows sampled tokens were not trained"
            yield self.wrong(text, self._FIX, places.kept)
        if places := self._left_out:
            text = f"{places.total} chains that count were not trained, though others of their groups were"
            yield self.wrong(text, "look at what chooses the chains of a batch", places.kept)
        lost = {step: count - self._groups[step] for step, count in self.record.trained.items()}
        last = max(self.record.trained, default=0)
        # a running run saves the last ones a moment later
        done = self.record.summary.get("status") == "completed"
        lost = {step: count for step, count in lost.items() if count > 0 and (done or step < last)}
        if lost:
            text = f"{sum(lost.values())} groups that {len(lost)} steps trained are not among the trajectories"
            yield self.wrong(text, "copy the run folder again, with trajectories/*.jsonl and *.arrays")

    @property
    def looked_at(self) -> str:
        """See Check."""
        return f"{self._chains:,} chains, {self._tokens:,} trained tokens" if self._chains else ""
