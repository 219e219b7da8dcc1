"""Other rewards for the saved chains of a run, compared with those that it was trained with."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from agentfactory.audit.record import REWARDS, Record, Seen
from agentfactory.base.errors import SettingError
from agentfactory.people.judges.exploits import PartialCorrelation, ranks
from agentfactory.rollout.images.parts import image_urls
from agentfactory.rollout.images.store import ImageStore, stored_digest
from agentfactory.rollout.rewards import RewardError, Rewards
from agentfactory.rollout.trajectory import Trajectory

SHOWN = 5
"""Groups and chains that are listed."""
DISAGREE = 0.25
"""Share of the pairs that both rewards order, in opposite ways, above which they disagree."""


@dataclass(frozen=True)
class Rescored:
    """A chain with its old and its new reward."""

    group: str
    chain: str
    file: str
    old: float
    new: float


@dataclass
class Comparison:
    """The chains of a run with both rewards, by group."""

    groups: list[list[Rescored]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    failed: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the correlations, the groups whose order flips, and the chains that differ most."""
        chains = [one for group in self.groups for one in group]
        overall, within = PartialCorrelation(), PartialCorrelation()
        overall.add([one.old for one in chains], [one.new for one in chains])
        for group in self.groups:
            within.add([one.old for one in group], [one.new for one in group])
        flips = [(_flipped(group), group[0].group) for group in self.groups if len(group) > 1]
        turned = sorted(flips, key=lambda flip: flip[0][0] / max(flip[0][1], 1), reverse=True)
        flipped, both, ordered = (sum(counts[place] for counts, _ in flips) for place in range(3))
        return {
            "chains": len(chains),
            "failed": self.failed,
            "correlation": overall.value if overall.freedom else None,
            "within_groups": within.value if within.freedom else None,
            "groups": len(flips),
            "flipped": sum(counts[0] > 0 for counts, _ in flips),
            "pairs": both,
            "flipped_pairs": flipped,
            "ordered_pairs": ordered,
            "most_flipped": [{"group": name, "pairs": n, "of": of} for (n, of, _), name in turned[:SHOWN] if n],
            "differ_most": [vars(one) | {"ranks": rank} for rank, one in _farthest(chains) if overall.freedom],
            "errors": self.errors,
        }


def disagree(found: dict[str, Any]) -> bool:
    """Return whether the rewards order many pairs of chains in opposite ways, or only one of them orders any."""
    return bool(found["flipped_pairs"] > DISAGREE * found["pairs"] or (found["pairs"] == 0 and found["ordered_pairs"]))


def _flipped(group: Sequence[Rescored]) -> tuple[int, int, int]:
    """Return the pairs of chains that the rewards order in opposite ways, that both order, and that one orders."""
    gaps = [(a.old - b.old, a.new - b.new) for a, b in combinations(group, 2)]
    both = [old * new for old, new in gaps if old and new]
    return sum(sign < 0 for sign in both), len(both), sum(bool(old or new) for old, new in gaps)


def _farthest(chains: Sequence[Rescored]) -> Iterator[tuple[float, Rescored]]:
    """Yield the chains whose rank differs most, with the difference as a share of all ranks."""
    if chains:
        differences = (ranks([one.new for one in chains]) - ranks([one.old for one in chains])) / len(chains)
        order = sorted(zip(differences.tolist(), chains, strict=True), key=lambda pair: abs(pair[0]), reverse=True)
        yield from ((rank, one) for rank, one in order[:SHOWN] if rank)


async def rescore(record: Record, rewards: Rewards, most: int) -> Comparison:
    """Score the saved chains of training, groups evenly over the run until they have about `most` chains. Raise
    SettingError if a reward needs what saved chains lack."""
    if rewards.is_empty:
        raise SettingError("--rewards", "an environment gave this run's rewards", "name rewards that score its chains")
    if gone := next((name for name in ("environment", "model_view", "workspace") if rewards.takes(name)), None):
        raise SettingError("--rewards", f"a reward takes the chain's {gone}, which is gone", "name other rewards")
    found = Comparison()
    images = ImageStore(record.folder / "images") if rewards.takes("seen_images") else None
    for number, seen in enumerate((seen for seen in record.groups() if not seen.held_out), 1):
        share = min(1.0, most / (record.size * len(seen.group.trajectories) or 1))
        if int(number * share) > int((number - 1) * share):
            rewards.check(seen.group.task)
            await _rescore_group(found, seen, rewards, images)
    if not found.groups and not found.failed:
        found.errors = [record.lacks.get(REWARDS, "no saved chain of training has a reward")]
    return found


async def _rescore_group(found: Comparison, seen: Seen, rewards: Rewards, images: ImageStore | None) -> None:
    async def score(chain: Trajectory) -> Trajectory:
        digests = filter(None, map(stored_digest, image_urls(chain.messages))) if images is not None else ()
        files = [str(images.path(digest).absolute()) for digest in digests] if images is not None else []
        again = replace(chain, metrics={}, reward=None, turn_rewards=None)
        try:
            verdict = await rewards.score(again, seen.group.task, None, files)
        except (RewardError, TypeError, ValueError) as error:
            again.error = str(error)
            return again
        again.reward, again.turn_rewards = verdict.reward, verdict.turn_rewards
        return again

    chains = [chain for chain in seen.group.trajectories if chain.reward is not None]
    scored = await asyncio.gather(*map(score, chains))
    await rewards.score_group(scored, seen.group.task)
    group = []
    for chain, again in zip(chains, scored, strict=True):
        if again.reward is None:
            found.failed += 1
            found.errors = [*found.errors, f"chain {chain.id}: {again.error}"][:SHOWN]
        else:
            group.append(Rescored(seen.group.id, chain.id, seen.file, _whole(chain), _whole(again)))
    if group:
        found.groups.append(group)


def _whole(chain: Trajectory) -> float:
    """Return a chain's reward with those of its turns."""
    return (chain.reward or 0.0) + sum(chain.turn_rewards or ())
