"""The producer of batches, which starts groups within the staleness bound, saves them and delivers the chosen ones."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

from agentfactory.base.run_notices import notify
from agentfactory.rollout.chains.chain_runner import ChainRunner, RolloutStoppedError, begin
from agentfactory.rollout.chains.sampling import Sampling
from agentfactory.rollout.config import (
    CurriculumConfig,
    EqualRewards,
    Inflight,
    LateChains,
    OutcomePolicy,
    RolloutConfig,
)
from agentfactory.rollout.data import WHOLE, Place, Share, Task, TaskMix
from agentfactory.rollout.groups.curriculum import Curriculum, successes
from agentfactory.rollout.groups.group_files import Delivered, EncodedGroup, append_group, encode_group, keep_unfinished
from agentfactory.rollout.groups.group_filter import GroupFilter, Worth, counted, worth
from agentfactory.rollout.groups.resumed_positions import Pending, Resumed
from agentfactory.rollout.groups.staleness import Admission, BatchChoice, Candidate, Choice
from agentfactory.rollout.inference.weight_versions import Cancellations, Published, WeightVersions
from agentfactory.rollout.sources import Source
from agentfactory.rollout.trajectory import Group, Judged, Outcome, Trajectory, chain_id

logger = logging.getLogger(__name__)

LATE_SECONDS = 60.0
MIXING_GROUPS = 16
"""Number of groups over which a source's success rate is averaged."""
_PAGE = "docs/staleness.md (Asynchronous training), 'Late chains'"


class State(StrEnum):
    RUNNING = "running"
    COMPLETE = "complete"
    """All chains have ended and are saved; the group waits for a batch."""
    DELIVERED = "delivered"
    """The group is in a batch, with the chains that had ended."""
    CANCELLED = "cancelled"
    """The group became too old for any later batch."""
    DROPPED = "dropped"


_NEXT = {
    State.RUNNING: {State.COMPLETE, State.DELIVERED, State.CANCELLED},
    State.COMPLETE: {State.DELIVERED, State.CANCELLED, State.DROPPED},
}


class OpenGroup:
    """The chains of one task, and the group's state. `running` are the indices of the chains that have not ended."""

    def __init__(self, place: Place, task: Task, version: int, size: int, source: str = "") -> None:
        """Create a group of `size` chains. `version` is the current policy version; for `source` see Group."""
        self.place = place
        self.source = source
        self.task = task
        self.version = version
        self.chains = [begin(chain_id(place.group_id, index)) for index in range(size)]
        self.running = set(range(size))
        self.state = State.RUNNING
        self.oldest: int | None = None
        """Policy version when the first turn of any chain was requested; no token is older."""
        self.runs: asyncio.Task[None] | None = None
        self.saved: EncodedGroup | None = None
        """The group's bytes in its files, if this run saved it."""

    @classmethod
    def resumed(cls, pending: Pending) -> "OpenGroup":
        group = cls(pending.place, pending.group.task, pending.group.version, 0, pending.group.source)
        group.chains, group.oldest = pending.group.trajectories, pending.oldest
        group.move(State.COMPLETE)
        return group

    @property
    def id(self) -> str:
        return self.place.group_id

    @property
    def ended(self) -> list[Trajectory]:
        return [chain for index, chain in enumerate(self.chains) if index not in self.running]

    @property
    def left(self) -> list[Trajectory]:
        return [self.chains[index] for index in sorted(self.running)]

    def move(self, state: State) -> None:
        """Change the state. Raise ValueError if the transition is not allowed."""
        if state not in _NEXT.get(self.state, ()) or (state is State.COMPLETE and self.running):
            found = f"{self.state}, {len(self.running)} running chains"
            raise ValueError(f"group {self.id} ({found}) cannot become {state}")
        self.state = state

    def note_turn(self, version: int) -> None:
        """Record that a chain requests a turn while the policy has `version`."""
        if self.oldest is None:
            self.oldest = version

    def end(self, index: int) -> None:
        """Record that a chain has ended. Raise ValueError if the chain does not run."""
        if self.state is not State.RUNNING or index not in self.running:
            raise ValueError(f"chain {index} of group {self.id}, which is {self.state}, does not run")
        self.running.discard(index)

    def as_group(self) -> Group:
        return Group(self.id, self.task, self.chains, self.version, self.source)


class GroupProducer:
    """A producer of batches, until the total of `admission` is delivered. `order` mixes the tasks of `sources`;
    `mixing` is the curriculum over these. `deliver` receives the groups of each batch, and the counts since the last
    one. Every group is first appended to `trajectories`, which had `resumed` and its labels of `versions`; `note`
    receives each complete one. Only positions of `share` run."""

    def __init__(
        self,
        config: RolloutConfig,
        sources: Sequence[Source[ChainRunner]],
        order: TaskMix,
        admission: Admission,
        published: Published,
        trajectories: Path,
        deliver: Callable[[list[Delivered], dict[str, float]], Awaitable[None]],
        resumed: Resumed | None = None,
        share: Share = WHOLE,
        note: Callable[[Group], None] = lambda group: None,
        versions: Mapping[str, int] | None = None,
        mixing: CurriculumConfig | None = None,
    ):
        self.config = config
        self.sources = sources
        self.order = order
        self.admission = admission
        self.batches = BatchChoice(admission, config.late_chains)
        self.cancellations = Cancellations()
        self.filter = GroupFilter(config, at_once=admission.batch_size * (admission.max_staleness + 1))
        self.curriculum = None if config.curriculum is None else Curriculum(config.curriculum, order.seed)
        # a group says little about its whole source
        self.mixing = None if mixing is None else Curriculum(mixing, order.seed, "sources", 1 / MIXING_GROUPS)
        self.published = published
        self.versions = WeightVersions(dict(versions or {}))
        self.versions.note(published)
        self.trajectories = trajectories
        self.deliver = deliver
        self.note = note
        self._wake = asyncio.Event()
        self._share = share
        self._next_position = share.number
        self._begun: frozenset[int] = frozenset()
        """Positions that an earlier run started, whose state is known, or passed over."""
        self._judged = 0
        """The position up to which an earlier run's curriculum had judged."""
        self._passed: list[int] = []
        """Positions passed over since the last saved group."""
        self._again: deque[Place] = deque()
        self._open: dict[str, OpenGroup] = {}
        self._late: asyncio.TimerHandle | None = None
        if resumed is not None:
            pending = {pending.place.position for pending in resumed.pending}
            self._begun = resumed.done | resumed.passed | pending | set(resumed.again)
            self._judged = resumed.judged
            self._again += (Place(position, attempt=1) for position in resumed.again)
            self._open = {pending.group.id: OpenGroup.resumed(pending) for pending in resumed.pending}
            self.admission.resume(len(resumed.pending))
            for position, seen in resumed.observed:
                self._observe(position, seen)

    def publish(self, published: Published) -> None:
        """Switch to new weights on the servers: later turns use them, and more groups may start."""
        self.published = published
        self.versions.note(published)
        self.admission.publish(published.version)
        self._wake.set()

    async def run(self) -> None:
        """Start groups within the staleness bound, and deliver batches, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._produce(tasks)
        finally:
            for group in self._open.values():
                if group.state is State.RUNNING:
                    keep_unfinished(self.trajectories, group.as_group())

    async def _produce(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            while self.admission.may_start():
                self.admission.start()
                place = self._take_place()
                number, row = self.order.place(place.position)
                source = self.sources[number]
                task, size = source.tasks[row], source.config.group_size
                group = OpenGroup(place, task, self.published.version, size, source.name)
                self._open[group.id] = group
                group.runs = tasks.create_task(self._run_group(group))
                # starting thousands of chains in one iteration of the event loop would block it for seconds
                await asyncio.sleep(0)
            choice = self._choose()
            if choice is None:
                await self._wake.wait()
                self._wake.clear()
                continue
            if self._late is not None:
                self._late.cancel()
                self._late = None
            batch = [self._take(self._open.pop(group_id)) for group_id in choice.train]
            for group_id in choice.cancel:
                self._cancel(self._open.pop(group_id))
            if batch:
                await self.deliver(batch, await self._take_figures())

    def _choose(self) -> Choice | None:
        # evaluating hundreds of groups each time that one ends would block the event loop
        if not self.batches.is_due(sum(group.state is State.COMPLETE for group in self._open.values())):
            return None
        choice = self.batches.choose([self._candidate(group) for group in self._open.values()])
        if choice is None and self._late is None:
            self._late = asyncio.get_running_loop().call_later(LATE_SECONDS, self._tell_late)
        return choice

    def _tell_late(self) -> None:
        """Tell the user for which group the next batch waits: the oldest one that still runs."""
        running = [group for group in self._open.values() if group.state is State.RUNNING and group.oldest is not None]
        if not running:
            return
        group = min(running, key=lambda group: group.oldest or 0)
        chains, (_, row) = f"{len(group.left)} of {len(group.chains)} chains", self.order.place(group.place.position)
        text = f"a batch has waited {LATE_SECONDS:g} s for late chains: {chains} of group {group.id} (row {row + 1} of "
        text += f"{self._source(group).part.called}) still run; fix: lower rollout.timeout_seconds, or set "
        text += "rollout.late_chains"
        notify(logger, "batches that wait for late chains", text, see=_PAGE)

    def _candidate(self, group: OpenGroup) -> Candidate:
        # group rewards exist only once the group is complete
        source = self._source(group)
        ended = [] if self._lacks_group_rewards(group) else group.ended
        found = worth(ended, source.config)
        if source.runner.setup.recipe.needs_rewards:
            teaches = found is Worth.TEACHES
        else:
            # a teacher alone grades chains of any rewards, but reads texts only in whole groups
            teaches = found is not Worth.LOST and source.context is None
        newest = None
        if self.config.late_chains is LateChains.BASELINE:
            # the version of the newest token that can be trained
            trained = [c for c in group.ended if self.config.outcome_policy(c.outcome) is OutcomePolicy.KEEP]
            spans = (span for chain in trained for row in chain.rows for span in row.versions)
            newest = max((self.versions.number(span.version) for span in spans), default=None)
        chains = len(counted(ended, self.config))
        return Candidate(group.id, group.oldest, group.state is State.COMPLETE, chains, teaches, newest)

    def _lacks_group_rewards(self, group: OpenGroup) -> bool:
        return self._source(group).runner.rewards.has_group_rewards and group.state is State.RUNNING

    def _source(self, group: OpenGroup) -> Source[ChainRunner]:
        return self.sources[self.order.source(group.place.position)]

    async def _take_figures(self) -> dict[str, float]:
        figures = {**self.cancellations.take_figures(), **self.filter.take_figures()}
        for curriculum in filter(None, (self.curriculum, self.mixing)):
            figures |= curriculum.take_figures()
        for source in self.sources:
            prefix = f"source/{source.name}/" if source.name else ""
            figures |= {f"{prefix}{name}": value for name, value in (await source.runner.toolset.gauges()).items()}
        return figures

    def _take_place(self) -> Place:
        if self._again:
            return self._again.popleft()
        while self._passes_over(self._next_position):
            self._next_position += self._share.of
        position = self._next_position
        self._next_position += self._share.of
        return Place(position)

    def _passes_over(self, position: int) -> bool:
        if position in self._begun or position < self._judged:
            return position in self._begun
        passes = (self.mixing is not None and self.mixing.passes_over(position, self.order.source(position))) or (
            self.curriculum is not None and self.curriculum.passes_over(position, self.order.number(position))
        )
        if passes:
            self._passed.append(position)
        return passes

    def _observe(self, position: int, seen: list[float]) -> None:
        if self.curriculum is not None:
            self.curriculum.observe(self.order.number(position), seen)
        if self.mixing is not None:
            self.mixing.observe(self.order.source(position), seen)

    async def _run_group(self, group: OpenGroup) -> None:
        source = self._source(group)
        group.task = await source.take(self.order.place(group.place.position)[1])
        async with asyncio.TaskGroup() as chains:
            for index in range(len(group.chains)):
                chains.create_task(self._run_chain(group, index))
        if source.runner.rewards.has_group_rewards or source.context is not None:
            await self._score_group(group)
        self._save(group)
        group.move(State.COMPLETE)
        self.note(group.as_group())
        found = self.filter.judge(group.chains, source.config)
        if reason := self.filter.no_hope():
            raise RolloutStoppedError(f"{reason}; see outcomes, rewards and errors in {self.trajectories}")
        if found is not Worth.TEACHES:
            group.move(State.DROPPED)
            del self._open[group.id]
        if found is Worth.LOST:
            logger.warning("group %s is dropped: too few of its chains count for training", group.id)
            self._replace(group.place)
        refills = self.config.equal_rewards is EqualRewards.REFILL
        if found is Worth.EQUAL and (refills or not self.batches.leave_empty()):
            self.admission.dropped()
        self._wake.set()

    async def _score_group(self, group: OpenGroup) -> None:
        """Add the group rewards and the teacher's prompts; all chains must have ended."""
        before = [chain.outcome for chain in group.chains]
        source = self._source(group)
        await source.runner.score_group(group.chains, group.task)
        if source.context is not None:
            await source.context.add_to(counted(group.chains, self.config), group.task)
        for chain, outcome in zip(group.chains, before, strict=True):
            if chain.outcome is not outcome:
                logger.warning("chain %s failed: %s: %s", chain.id, chain.outcome, chain.error)
                self.filter.ended(chain)

    async def _run_chain(self, group: OpenGroup, index: int) -> None:
        await self._play(group, index)
        if group.state is not State.RUNNING:
            return
        chain = group.chains[index]
        if chain.outcome.failed:
            logger.warning("chain %s failed: %s: %s", chain.id, chain.outcome, chain.error)
        self.filter.ended(chain)
        if self.config.outcome_policy(chain.outcome) is OutcomePolicy.RETRY:
            group.chains[index] = begin(chain_id(group.id, index, retry=True))
            await self._play(group, index)
            if group.state is not State.RUNNING:
                return
            self.filter.ended(group.chains[index])
        group.end(index)

    async def _play(self, group: OpenGroup, index: int) -> None:
        def newest_model() -> str:
            group.note_turn(self.published.version)
            return self.published.model

        chain = group.chains[index]
        sampling = Sampling(newest_model, self.config.temperature, chain.id, self.cache_salt())
        await self._source(group).runner.play(chain, group.task, sampling, self.config.scored)

    def cache_salt(self) -> str | None:
        """Return the cache salt for a chain that starts now: with `inflight: keep`, it must not hit older KV caches."""
        keeps = self.config.inflight is Inflight.KEEP and self.sources[0].runner.setup.recipe.model.lora is None
        return self.published.label if keeps else None

    def _save(self, group: OpenGroup) -> None:
        saved = group.as_group()
        if self.curriculum is not None or self.mixing is not None:
            saved.judged, self._passed = Judged(self._next_position, self._passed), []
        group.saved = append_group(self.trajectories, saved)
        if saved.judged is not None:
            setting = "rollout.curriculum" if self.mixing is None else "data.curriculum"
            counting = counted(group.chains, self.config)
            self._observe(group.place.position, successes(counting, setting, f"set {setting}=null"))

    def _take(self, group: OpenGroup) -> Delivered:
        """Return `group` for a batch, with the ended chains that count, and cancel its running chains."""
        self.cancellations.trained(self.order.number(group.place.position))
        taken = counted(group.ended, self.config)
        self._end_running(group)
        group.move(State.DELIVERED)
        return Delivered(group.saved or encode_group(group.as_group()), [chain.id for chain in taken])

    def _cancel(self, group: OpenGroup) -> None:
        """Cancel and replace a group that is too old for any later batch and is not in this one."""
        row = self.order.number(group.place.position)
        self.cancellations.lost(row, group.ended)
        self._end_running(group)
        group.move(State.CANCELLED)
        if self.cancellations.cancelled(row):
            text = "task %d was cancelled each time, with chains of %s tokens: they take longer than "
            text += "rollout.max_staleness=%d updates; raise it, or make the task shorter"
            logger.warning(text, row, self.cancellations.lengths[row], self.admission.max_staleness)
        self._replace(group.place)

    def _end_running(self, group: OpenGroup) -> None:
        if group.state is State.COMPLETE:
            return
        chains, row = group.left, self.order.number(group.place.position)
        text = "group %s (task %d) is too old to wait for %d running chains, of %s tokens"
        logger.info(text, group.id, row, len(chains), self.cancellations.lost(row, chains))
        for chain in chains:
            chain.outcome = Outcome.CANCELLED
            chain.error = f"its group reached rollout.max_staleness={self.admission.max_staleness}"
        if self._lacks_group_rewards(group):
            for chain in group.chains:
                # without group rewards, the rewards are incomplete
                chain.reward = chain.turn_rewards = None
        self._save(group)
        assert group.runs is not None
        group.runs.cancel()

    def _replace(self, place: Place) -> None:
        """Start a group in place of one that was not delivered; the first replacement runs the same task."""
        self.admission.dropped()
        if place.attempt == 0:
            self._again.append(Place(place.position, attempt=1))
