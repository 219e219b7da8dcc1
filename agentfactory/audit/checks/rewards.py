"""Rewards, computed again from the saved chains."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

from agentfactory.audit.check import Check, Opened, differ
from agentfactory.audit.record import RECIPE, REWARDS, Places, Seen
from agentfactory.audit.reports import Unchecked
from agentfactory.base.findings import Evidence, Finding
from agentfactory.rollout.trajectory import Trajectory

MOST_CHAINS = 600
"""Chains whose rewards are computed again, evenly over the run."""
SCORE_SECONDS = 20.0
"""Time limit to compute a reward again; after the first that exceeds it, no more are."""
MODELS = {"judge", "rubric", "pairwise"}


class RewardCheck(Check):
    """The recipe's rewards must give each chain the reward that was saved; a chain that failed must have none."""

    topic = "rewards"
    needs = (REWARDS,)
    _FIX = "compare the reward's code and the rows of data with those of the run; both may have changed since"

    def begin(self) -> None:
        self._compared = self._all = 0
        self._differ, self._changing, self._of_failed, self._raising = Places(), Places(), Places(), Places()
        self._slow: set[str] = set()
        self._why_not: dict[str, str] = {}
        """Source -> why its rewards are not computed again."""
        if RECIPE in self.record.lacks or not self.parts:
            self.unchecked.append(
                Unchecked("rewards computed again", self.record.lacks.get(RECIPE, "no recipe of ours"))
            )

    async def note(self, seen: Seen) -> None:
        opened = self.part_of(seen) if self.parts else None
        why_not = None if opened is None else _why_not(opened)
        if opened is not None and seen.group.source in self._slow:
            opened = None
        if why_not is not None:
            self._why_not[seen.group.source] = why_not
        for chain in seen.group.trajectories:
            self._all += 1
            if chain.outcome.failed and chain.reward is not None:
                text = f"it ended as {chain.outcome}, and has the reward {chain.reward:g}"
                self._of_failed.add(Evidence(text, seen.group.id, chain.id, file=seen.file))
        for chain in self.some_of(seen, MOST_CHAINS):
            if opened is not None and why_not is None and chain.reward is not None:
                await self._compare(seen, chain, opened)

    async def _compare(self, seen: Seen, chain: Trajectory, opened: Opened) -> None:
        assert chain.reward is not None
        self._compared += 1
        place = (seen.group.id, chain.id, None, None, seen.file)
        try:
            async with asyncio.timeout(SCORE_SECONDS):
                first = await _score(chain, seen, opened)
            if not differ(first, chain.reward):
                return
            async with asyncio.timeout(SCORE_SECONDS):
                second = await _score(chain, seen, opened)
        except TimeoutError:
            self._why_not[seen.group.source] = f"a reward took more than {SCORE_SECONDS:g} s for {chain.id}"
            self._slow.add(seen.group.source)
            return
        except Exception as error:  # boundary: user code
            self._raising.add(Evidence(f"{type(error).__name__}: {error}", *place))
            return
        if first != second:
            self._changing.add(Evidence(f"{first:g}, then {second:g}; saved is {chain.reward:g}", *place))
        else:
            self._differ.add(Evidence(f"saved is {chain.reward:g}, computed again {first:g}", *place))

    def findings(self) -> Iterator[Finding]:
        if places := self._of_failed:
            text = f"{places.total} chains that failed have a reward, so failures count as behaviour of the policy"
            yield self.wrong(text, "give failed chains no reward: they say nothing about the policy", places.kept)
        if places := self._differ:
            text = f"{places.total} of {self._compared} rewards are not what the recipe's rewards give"
            yield self.wrong(text, self._FIX, places.kept)
        if places := self._raising:
            text = f"the rewards raise for {places.total} of {self._compared} chains, and did not in the run"
            yield self.wrong(text, self._FIX, places.kept)
        if places := self._changing:
            text = f"{places.total} of {self._compared} rewards change from call to call"
            yield self.warning(text, "make the reward deterministic: seed what it draws", places.kept)
        for source, why in self._why_not.items():
            of = f" of source {source}" if source else ""
            self.unchecked.append(Unchecked(f"rewards{of} computed again", why))

    def looked_at(self) -> str:
        again = f", {self._compared:,} computed again" if self._compared else ""
        return f"{self._all:,} chains{again}" if self._all else ""


def _why_not(opened: Opened) -> str | None:
    rewards, recipe = opened.rewards, opened.recipe
    if rewards.is_empty:
        return "an environment gave them: see the chains played again"
    if rewards.has_group_rewards:
        return "a reward compares the chains of a group, with the state of a judge"
    if asked := [config.reward for config in recipe.rewards if config.reward in MODELS]:
        return f"{asked[0]} asks a model"
    gone = next((name for name in ("environment", "workspace") if rewards.takes(name)), None)
    return None if gone is None else f"a reward takes the chain's {gone}, which is gone"


async def _score(chain: Trajectory, seen: Seen, opened: Opened) -> float:
    images = opened.renderer.images.files_of(chain.messages)
    verdict = await opened.rewards.score(replace(chain), seen.group.task, None, images, opened.images.view)
    return verdict.reward - chain.metrics.get("penalty", 0.0)
