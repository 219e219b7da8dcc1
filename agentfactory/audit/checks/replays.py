"""Chains played again in their environments: the same states, results and rewards."""

import asyncio
import time
from collections.abc import Iterator

from agentfactory.audit.check import Check, differ
from agentfactory.audit.checks.rewards import MODELS
from agentfactory.audit.record import MESSAGES, RECIPE, TOKENS, Places, Seen
from agentfactory.audit.reports import Unchecked
from agentfactory.base.findings import Evidence, Finding
from agentfactory.base.messages import ToolInfrastructureError
from agentfactory.rollout.trajectory import Outcome, Trajectory

MOST_CHAINS, MOST_SECONDS = 200, 60.0
"""Chains that are played again, evenly over the run, and the time in all after which no more are."""
CHAIN_SECONDS = 60.0
"""Time limit of a chain; after the first that exceeds it, no more are played."""
MOST = 0.5
"""Share of them that do something else beyond which there is a warning."""


class ReplayCheck(Check):
    """The saved turns of a chain, made again, must lead to the saved results and the saved reward."""

    topic = "chains played again"
    needs = (TOKENS, MESSAGES, RECIPE)

    def begin(self) -> None:
        self._played = self._same = 0
        self._spent = 0.0
        self._rewards, self._diverged, self._failed, self._changing = Places(), Places(), Places(), Places()
        self._slow = False
        self._late = 0
        self._why_not: str | None = None

    async def note(self, seen: Seen) -> None:
        opened = self.part_of(seen)
        runner = opened.runner
        if self._slow or not runner.toolset.environments or opened.recipe.rollout.agent is not None:
            return
        if any(config.reward in MODELS for config in opened.recipe.rewards):
            self._why_not = "a judge would be asked again, for money"
            return
        if opened.recipe.rollout.user is not None:
            self._why_not = "a simulated user would speak again"
            return
        for chain in self.some_of(seen, MOST_CHAINS):
            if chain.reward is None:
                continue
            if self._spent < MOST_SECONDS:
                begun = time.monotonic()
                await self._replay(seen, chain)
                self._spent += time.monotonic() - begun
            else:
                self._late += 1

    async def _replay(self, seen: Seen, chain: Trajectory) -> None:
        opened = self.part_of(seen)
        place = (seen.group.id, chain.id, None, None, seen.file)
        self._played += 1
        try:
            async with asyncio.timeout(CHAIN_SECONDS):
                again = await opened.runner.replay(chain, seen.group.task)
        except TimeoutError:
            self._slow = True
            self.unchecked.append(Unchecked(self.topic, f"{chain.id} took more than {CHAIN_SECONDS:g} s"))
            return
        except (ToolInfrastructureError, OSError, ValueError) as error:
            self._failed.add(Evidence(str(error), *place))
            return
        if again.chain.outcome is Outcome.REWARD_ERROR:
            self._failed.add(Evidence(again.chain.error or "", *place))
            return
        if again.diverged is not None:
            self._diverged.add(Evidence(again.diverged, *place))
            return
        self._same += 1
        found = again.chain.reward
        if opened.rewards.has_group_rewards or found is None or chain.reward is None:
            return
        if differ(found, chain.reward):
            try:
                async with asyncio.timeout(CHAIN_SECONDS):
                    second = (await opened.runner.replay(chain, seen.group.task)).chain.reward
            except TimeoutError:
                second = None
            if second != found:
                self._changing.add(Evidence(f"{found:g}, then {second}; saved is {chain.reward:g}", *place))
                return
            text = f"saved is the reward {chain.reward:g}, and the same turns and results give {found:g}"
            self._rewards.add(Evidence(text, *place))

    def findings(self) -> Iterator[Finding]:
        if places := self._rewards:
            text = f"{places.total} of {self._same} chains have another reward when they are played again"
            fix = "compare the environment's code with that of the run; if a reward draws, seed it by the task"
            # an environment that draws may also draw its reward
            yield (self.warning if self._diverged or self._changing else self.wrong)(text, fix, places.kept)
        if places := self._changing:
            text = f"{places.total} of {self._same} rewards change from one time to the next"
            yield self.warning(text, "make the reward deterministic: seed what it draws by the task", places.kept)
        if places := self._diverged:
            text = f"{places.total} of {self._played} chains do something else when they are played again"
            fix = "the environment depends on more than its task and the calls: seed what it draws"
            if places.total > MOST * self._played:
                yield self.warning(text, fix, places.kept)
            else:
                yield self.remark(text, fix, places.kept)
        if places := self._failed:
            text = f"{places.total} of {self._played} chains could not be played again"
            yield self.remark(text, "try the environment with `agentfactory tools check RECIPE`", places.kept)
        if self._late:
            text = f"{self._late} of {self._late + self._played} chains: {MOST_SECONDS:g} s had passed"
            self.unchecked.append(Unchecked(self.topic, text))
        if self._why_not is not None:
            self.unchecked.append(Unchecked(self.topic, self._why_not))

    def looked_at(self) -> str:
        return f"{self._same} of {self._played} chains, with the same results" if self._played else ""
