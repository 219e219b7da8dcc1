"""A started group until it leaves the producer, as a state machine."""

import asyncio
from enum import StrEnum

from agentfactory.rollout.chains.chain_runner import begin
from agentfactory.rollout.data import Place, Task
from agentfactory.rollout.groups.group_files import EncodedGroup
from agentfactory.rollout.groups.resumed_positions import Pending
from agentfactory.rollout.trajectory import Group, Trajectory, chain_id


class State(StrEnum):
    """Progress of a group."""

    RUNNING = "running"
    COMPLETE = "complete"
    """All chains have ended and are saved; it waits for a batch."""
    DELIVERED = "delivered"
    """A batch has taken it, with the chains that had ended."""
    CANCELLED = "cancelled"
    """It grew too old for any later batch."""
    DROPPED = "dropped"
    """Its chains teach nothing."""


_NEXT = {
    State.RUNNING: {State.COMPLETE, State.DELIVERED, State.CANCELLED},
    State.COMPLETE: {State.DELIVERED, State.CANCELLED, State.DROPPED},
}


class OpenGroup:
    """The chains of one task, and the group's state. `running` are the indices of the chains that have not ended."""

    def __init__(self, place: Place, task: Task, version: int, size: int) -> None:
        """Start `size` chains. `version` is that of the newest weights."""
        self.place = place
        self.task = task
        self.version = version
        self.chains = [begin(chain_id(place.group_id, index)) for index in range(size)]
        self.running = set(range(size))
        self.state = State.RUNNING
        self.oldest: int | None = None
        """Version of the newest weights when the first turn of any chain was requested: no token is older."""
        self.runs: asyncio.Task[None] | None = None
        self.saved: EncodedGroup | None = None
        """Its bytes in the files, if this run has saved it."""

    @classmethod
    def resumed(cls, pending: Pending) -> "OpenGroup":
        """Return the complete group that an earlier run saved."""
        group = cls(pending.place, pending.group.task, pending.group.version, size=0)
        group.chains, group.oldest = pending.group.trajectories, pending.oldest
        group.move(State.COMPLETE)
        return group

    @property
    def id(self) -> str:
        """The group's id."""
        return self.place.group_id

    @property
    def ended(self) -> list[Trajectory]:
        """The chains that have ended."""
        return [chain for index, chain in enumerate(self.chains) if index not in self.running]

    @property
    def left(self) -> list[Trajectory]:
        """The chains that still run."""
        return [self.chains[index] for index in sorted(self.running)]

    def move(self, state: State) -> None:
        """Change the state. Raises ValueError if that cannot follow the present one."""
        if state not in _NEXT.get(self.state, ()) or (state is State.COMPLETE and self.running):
            raise ValueError(f"group {self.id} is {self.state}, {len(self.running)} chains run: it cannot be {state}")
        self.state = state

    def note_turn(self, version: int) -> None:
        """Note that a chain requests a turn while the newest weights are those of `version`."""
        if self.oldest is None:
            self.oldest = version

    def retry(self, index: int) -> None:
        """Put a second attempt in place of a chain that failed."""
        self.chains[index] = begin(chain_id(self.id, index, retry=True))

    def end(self, index: int) -> None:
        """Note that a chain has ended. Raises ValueError if the group no longer waits for it."""
        if self.state is not State.RUNNING or index not in self.running:
            raise ValueError(f"chain {index} of group {self.id}, which is {self.state}, does not run")
        self.running.discard(index)

    def as_group(self) -> Group:
        """Return the group with all chains as they are."""
        return Group(self.id, self.task, self.chains, self.version)
