"""Produces groups: starts them as admission allows, keeps what can be trained, saves all of it before delivery."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from rollout.chain import ChainRunner, Sampling
from rollout.config import OutcomePolicy, RolloutConfig
from rollout.data import TaskOrder
from rollout.scheduler import Admission
from rollout.trajectory import Group, Trajectory

logger = logging.getLogger(__name__)

MAX_LOST_IN_A_ROW = 64
"""Groups lost one after another before the run stops: by then it is not chance."""


class RolloutStoppedError(Exception):
    """Rollouts cannot go on; the message says why."""


@dataclass(frozen=True)
class Published:
    """The newest weights that are live: their number and the server's name for them."""

    version: int
    model: str


@dataclass(frozen=True)
class _Place:
    """A place in the order of tasks, and which attempt at it this is."""

    position: int
    attempt: int = 0


class GroupProducer:
    """Runs groups until admission's total is delivered.

    `deliver` gets each group that can be trained. Every group, with its failed chains, is appended to
    `trajectories` first.
    """

    def __init__(
        self,
        config: RolloutConfig,
        runner: ChainRunner,
        order: TaskOrder,
        admission: Admission,
        published: Published,
        trajectories: Path,
        deliver: Callable[[Group], Awaitable[None]],
    ):
        self.config = config
        self.runner = runner
        self.order = order
        self.admission = admission
        self.published = published
        self.trajectories = trajectories
        self.deliver = deliver
        self._wake = asyncio.Event()
        self._next_position = admission.started
        self._again: deque[_Place] = deque()
        self._lost_in_a_row = 0
        self._keep = frozenset(o for o, policy in self.config.on_failure.items() if policy is OutcomePolicy.KEEP)

    def publish(self, published: Published) -> None:
        """New weights are live: chains that start from now on use them, and more groups may start."""
        self.published = published
        self.admission.publish(published.version)
        self._wake.set()

    async def run(self) -> None:
        """Start groups as long as the trainer may want one. Runs until cancelled."""
        async with asyncio.TaskGroup() as groups:
            while True:
                while self.admission.may_start():
                    self.admission.start()
                    groups.create_task(self._run_group(self._take_place()))
                await self._wake.wait()
                self._wake.clear()

    def _take_place(self) -> _Place:
        if self._again:
            return self._again.popleft()
        self._next_position += 1
        return _Place(self._next_position - 1)

    async def _run_group(self, place: _Place) -> None:
        task = self.order[place.position]
        published = self.published
        group_id = f"g{place.position:06d}" + (f"-{place.attempt}" if place.attempt else "")
        chains = (self._run_chain(f"{group_id}.{i}", task, published) for i in range(self.config.group_size))
        group = Group(group_id, task, list(await asyncio.gather(*chains)), published.version)
        with self.trajectories.open("a", encoding="utf-8") as file:
            file.write(group.to_json() + "\n")
        group.trajectories = [t for t in group.trajectories if t.reward is not None]
        if len(group.trajectories) >= min(2, self.config.group_size):
            self._lost_in_a_row = 0
            await self.deliver(group)
        else:
            self._lose(place, group_id)

    async def _run_chain(self, chain_id: str, task: dict, published: Published) -> Trajectory:
        sampling = Sampling(published.model, self.config.temperature, seed=chain_id)
        trajectory = await self.runner.run(chain_id, task, sampling, self._keep)
        if trajectory.outcome.failed:
            logger.warning("chain %s failed: %s: %s", chain_id, trajectory.outcome, trajectory.error)
            if self.config.on_failure.get(trajectory.outcome) is OutcomePolicy.RETRY:
                retry_id = f"{chain_id}.retry"
                sampling = Sampling(published.model, self.config.temperature, seed=retry_id)
                return await self.runner.run(retry_id, task, sampling, self._keep)
        return trajectory

    def _lose(self, place: _Place, group_id: str) -> None:
        """Too few chains are left to compare: another group takes the place, the same task once more at first."""
        logger.warning("group %s is dropped: fewer than two of its chains can be trained", group_id)
        self._lost_in_a_row += 1
        if self._lost_in_a_row >= MAX_LOST_IN_A_ROW:
            raise RolloutStoppedError(
                f"{MAX_LOST_IN_A_ROW} groups in a row had fewer than two chains that can be trained; "
                f"see the outcomes and errors in {self.trajectories}"
            )
        self.admission.dropped()
        if place.attempt == 0:
            self._again.append(_Place(place.position, attempt=1))
        self._wake.set()
