"""Lengths of the chains that were started and of those that were trained, and repetition."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from agentfactory.audit.check import Check
from agentfactory.audit.record import MESSAGES, Seen
from agentfactory.base.findings import Evidence, Finding
from agentfactory.people.judges.exploits import length, repeats

ENOUGH_CHAINS = 128
SHORTER, SIGNIFICANT = 0.85, 4.0
"""Ratio of trained to started lengths, and distance in standard errors, beyond which there is a warning."""
MANY = 0.1
"""Share of chains that repeat themselves above which there is a warning."""


@dataclass
class _Moments:
    values: list[float] = field(default_factory=list)

    @property
    def mean(self) -> float:
        return fmean(self.values) if self.values else 0.0

    @property
    def error(self) -> float:
        return float(np.std(self.values)) / math.sqrt(len(self.values)) if self.values else 0.0


class LengthCheck(Check):
    """Trained chains should be as long as started ones, and chains should not repeat themselves."""

    topic = "lengths"
    needs = (MESSAGES,)

    def begin(self) -> None:
        self._started, self._trained, self._lost = _Moments(), _Moments(), _Moments()
        self._looping: list[tuple[float, Evidence]] = []
        self._others: list[float] = []

    async def note(self, seen: Seen) -> None:
        if seen.held_out:
            return
        for chain in seen.group.trajectories:
            sampled = length(chain)
            self._started.values.append(sampled)
            if seen.credit:
                (self._trained if chain.id in seen.credit else self._lost).values.append(sampled)
            if chain.reward is None:
                continue
            if repeats(chain):
                place = Evidence(f"reward {chain.reward:g}", seen.group.id, chain.id, file=seen.file)
                self._looping.append((chain.reward, place))
            else:
                self._others.append(chain.reward)

    def findings(self) -> Iterator[Finding]:
        started, trained, lost = self._started, self._trained, self._lost
        if len(trained.values) >= ENOUGH_CHAINS and lost.values:
            short = trained.mean < SHORTER * started.mean
            if short and lost.mean - trained.mean > SIGNIFICANT * (trained.error + lost.error):
                text = f"trained chains have {trained.mean:.0f} sampled tokens, those not trained {lost.mean:.0f}"
                fix = "raise the limits of time, length or staleness that long chains reach: the policy learns to be "
                fix += "short"
                yield self.warning(text, fix)
        chains = len(self._looping) + len(self._others)
        if chains >= ENOUGH_CHAINS and len(self._looping) > MANY * chains:
            rewards = fmean(reward for reward, _ in self._looping)
            others = fmean(self._others) if self._others else rewards
            text = f"{len(self._looping):,} of {chains:,} chains repeat themselves"
            text += f"; their mean reward is {rewards:.3g}, that of others {others:.3g}"
            paid = rewards > others
            fix = "look at what the reward pays for" if paid else "penalise repetition, or stop such chains earlier"
            yield self.warning(text, fix, [place for _, place in self._looping[:5]])

    def looked_at(self) -> str:
        return f"{len(self._started.values):,} chains" if self._started.values else ""
