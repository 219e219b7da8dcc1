"""Lengths: of the chains that were started and of those that were trained, and what rewards pay for."""

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from agentfactory.audit.check import Check
from agentfactory.audit.record import MESSAGES, Seen
from agentfactory.base.findings import Evidence, Finding
from agentfactory.base.messages import text_of
from agentfactory.rollout.trajectory import Trajectory

ENOUGH_CHAINS = 128
SHORTER, SIGNIFICANT = 0.85, 4.0
"""Ratio of trained to started lengths, and distance in standard errors, beyond which there is a warning."""
RELATED, GROWN = 0.5, 1.5
"""Correlation of rewards with lengths within groups, and growth of the length over the run, above which we warn."""
LOOPS, LONG, MANY = 0.2, 400, 0.1
"""Compressed share of a text of at least LONG characters that loops; share of such chains above which we warn."""


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
    """Trained chains should be as long as started ones; rewards should not pay for length or repetition alone."""

    topic = "lengths"
    needs = (MESSAGES,)

    def begin(self) -> None:
        self._started, self._trained, self._lost = _Moments(), _Moments(), _Moments()
        self._within: list[tuple[float, float]] = []
        """(length, reward) of each chain, less the means of its group."""
        self._over: list[tuple[float, float, float]] = []
        """(length, reward, success) of each group, in order."""
        self._looping: list[tuple[float, Evidence]] = []
        self._others: list[float] = []

    async def note(self, seen: Seen) -> None:
        if seen.held_out:
            return
        known: list[tuple[float, float]] = []
        for chain in seen.group.trajectories:
            length = _length(chain)
            self._started.values.append(length)
            if seen.credit:
                (self._trained if chain.id in seen.credit else self._lost).values.append(length)
            if chain.reward is None:
                continue
            known.append((length, chain.reward))
            if _repeats(chain):
                place = Evidence(f"reward {chain.reward:g}", seen.group.id, chain.id, file=seen.file)
                self._looping.append((chain.reward, place))
            else:
                self._others.append(chain.reward)
        if len(known) > 1:
            length, reward = (fmean(column) for column in zip(*known, strict=True))
            self._within += [(one - length, other - reward) for one, other in known]
            successes = [chain.metrics["success"] for chain in seen.group.trajectories if "success" in chain.metrics]
            self._over.append((length, reward, fmean(successes) if successes else reward))

    def findings(self) -> Iterator[Finding]:
        started, trained, lost = self._started, self._trained, self._lost
        if len(trained.values) >= ENOUGH_CHAINS and lost.values:
            short = trained.mean < SHORTER * started.mean
            if short and lost.mean - trained.mean > SIGNIFICANT * (trained.error + lost.error):
                text = f"trained chains have {trained.mean:.0f} sampled tokens, those not trained {lost.mean:.0f}"
                fix = "raise the limits of time, length or staleness that long chains reach: the policy learns to be "
                fix += "short"
                yield self.warning(text, fix)
        yield from self._pays()
        chains = len(self._looping) + len(self._others)
        if chains >= ENOUGH_CHAINS and len(self._looping) > MANY * chains:
            rewards = fmean(reward for reward, _ in self._looping)
            others = fmean(self._others) if self._others else rewards
            text = f"{len(self._looping):,} of {chains:,} chains repeat themselves"
            text += f"; their mean reward is {rewards:.3g}, that of others {others:.3g}"
            paid = rewards > others
            fix = "look at what the reward pays for" if paid else "penalise repetition, or stop such chains earlier"
            yield self.warning(text, fix, [place for _, place in self._looping[:5]])

    def _pays(self) -> Iterator[Finding]:
        if len(self._within) < ENOUGH_CHAINS:
            return
        lengths, rewards = (np.asarray(column) for column in zip(*self._within, strict=True))
        if lengths.std() == 0 or rewards.std() == 0:
            return
        related = float(np.corrcoef(lengths, rewards)[0, 1])
        size = len(self._over) // 4
        if size == 0:
            return
        first, last = self._over[:size], self._over[-size:]
        grown = fmean(one[0] for one in last) / max(1e-9, fmean(one[0] for one in first))
        success = fmean(one[2] for one in last) - fmean(one[2] for one in first)
        reward = fmean(one[1] for one in last) - fmean(one[1] for one in first)
        if related > RELATED and grown > GROWN and reward > 0 and success < reward / 4:
            text = f"rewards follow the length of chains (correlation {related:.2f} within groups), which grew "
            text += f"{grown:.1f} times while success did not rise as they did"
            yield self.warning(text, "look at what the reward pays for: length, and not the task")

    def looked_at(self) -> str:
        return f"{len(self._started.values):,} chains" if self._started.values else ""


def _length(chain: Trajectory) -> float:
    """Return the number of sampled tokens; for a chain without rows, of characters that the model wrote."""
    if chain.rows:
        return float(sum(int(np.count_nonzero(row.mask)) for row in chain.rows))
    return float(len(_written(chain)))


def _written(chain: Trajectory) -> str:
    said = [message for message in chain.messages if message["role"] == "assistant"]
    return "\n".join(text_of(message.get("content") or "") for message in said[-chain.turns or len(said) :])


def _repeats(chain: Trajectory) -> bool:
    """Return whether the last turn repeats itself, as a sampler that loops does."""
    said = [message for message in chain.messages if message["role"] == "assistant"]
    text = text_of(said[-1].get("content") or "").encode("utf-8", "replace") if said else b""
    return len(text) >= LONG and len(zlib.compress(text)) < LOOPS * len(text)
