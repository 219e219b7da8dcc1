"""A state machine for a group, from its start until it leaves the producer."""

import asyncio
from enum import StrEnum

from agentfactory.rollout.chains.chain_runner import begin
from agentfactory.rollout.data import Place, Task
from agentfactory.rollout.groups.group_files import EncodedGroup
from agentfactory.rollout.groups.resumed_positions import Pending
from agentfactory.rollout.trajectory import Group, Trajectory, chain_id


class State(StrEnum):
    """The state of a group."""

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
            raise ValueError(
                f"group {self.id} ({self.state}, {len(self.running)} running chains) cannot become {state}"
            )
        self.state = state

    def note_turn(self, version: int) -> None:
        """Record that a chain requests a turn while the policy has `version`."""
        if self.oldest is None:
            self.oldest = version

    def retry(self, index: int) -> None:
        self.chains[index] = begin(chain_id(self.id, index, retry=True))

    def end(self, index: int) -> None:
        """Record that a chain has ended. Raise ValueError if the chain does not run."""
        if self.state is not State.RUNNING or index not in self.running:
            raise ValueError(f"chain {index} of group {self.id}, which is {self.state}, does not run")
        self.running.discard(index)

    def as_group(self) -> Group:
        return Group(self.id, self.task, self.chains, self.version, self.source)
