"""The staleness bound on starting and training groups, as pure state machines that tests can drive."""

from dataclasses import dataclass, field

from agentfactory.rollout.config import LateChains


@dataclass
class Admission:
    """A bound on how far generation runs ahead of training, and the version of the servers' weights. A group may start
    while `started < (max_staleness + 1 + version) * batch_size`, so groups trained in the order of their starts stay
    within `max_staleness` updates; BatchChoice handles others. At most `total` groups are started."""

    batch_size: int
    max_staleness: int
    total: int
    version: int = 0
    started: int = 0

    def may_start(self) -> bool:
        return self.started < min(self.total, (self.max_staleness + 1 + self.version) * self.batch_size)

    def start(self) -> None:
        if not self.may_start():
            raise ValueError(f"group {self.started} cannot start at version {self.version}")
        self.started += 1

    def dropped(self) -> None:
        """Record that a started group will not be delivered, so that another can replace it."""
        self.started -= 1

    def resume(self, groups: int) -> None:
        """Count groups that an earlier run started and that still wait to be trained."""
        self.started += groups

    def publish(self, version: int) -> None:
        """Record that the servers have new weights. Raise ValueError unless the version increases."""
        if version <= self.version:
            raise ValueError(f"version {version} follows {self.version}: versions must increase")
        self.version = version


@dataclass(frozen=True)
class Candidate:
    """A started group: the version of its oldest token (None: none yet), whether all its chains have ended, how many
    ended ones count, whether these give a signal, and the version of the newest trainable token (baseline only)."""

    id: str
    oldest: int | None
    complete: bool
    chains: int
    teaches: bool
    newest: int | None = None


@dataclass(frozen=True)
class Choice:
    """The groups of a batch (none: no batch is due), and those to cancel because they are too old for later ones."""

    train: list[str]
    cancel: list[str]


@dataclass
class BatchChoice:
    """The choice of each batch's groups, such that no token older than `max_staleness` updates is trained.

    Batch n is trained at version n, and is chosen once the servers have these weights, so tokens do not age between
    choice and training. A group that is not chosen can be trained at version + 1 at the earliest. If its oldest token
    is too old then, the current batch is its last chance. `late` decides on groups with running chains:

    - wait: no batch is chosen before. Of the complete groups, those that began first are taken, and the batch waits as
      long as the groups that it leaves would not all find a place in time. Since at most `max_staleness + 1` batches of
      groups are open, groups are then trained in the order of their versions, and none is cancelled.
    - drop: complete groups come first, then running groups with their ended chains (most first), if these give a
      training signal. Expiring groups that do not fit are cancelled. No running group is closed before enough groups
      are complete.
    - baseline: they stay open; a group is trained once it is complete, without the tokens that are too old by then. It
      is cancelled if all its tokens are.

    At staleness 0, every group is needed whole, so all three are the same."""

    admission: Admission
    late: LateChains
    chosen: int = field(init=False)
    """Number of batches chosen so far, which is also the version of the next batch."""
    empty: int = 0
    """Number of places in the next batch that stay empty."""

    def __post_init__(self) -> None:
        self.chosen = self.admission.version

    def leave_empty(self) -> bool:
        """Leave a place of the next batch empty, for a group without a signal. Return False if it is the last place."""
        if self.empty == self.admission.batch_size - 1:
            return False
        self.empty += 1
        return True

    def is_due(self, complete: int) -> bool:
        """Return whether a batch can be chosen for the current version when `complete` groups are complete."""
        return self.chosen <= self.admission.version and complete >= self.admission.batch_size - self.empty

    def choose(self, candidates: list[Candidate]) -> Choice | None:
        """Return the batch for the current version; None if it is not due. `candidates` are ordered by their starts."""
        # oldest first: younger groups can wait longer
        complete = sorted((group for group in candidates if group.complete), key=self._begun)
        if not self.is_due(len(complete)):
            return None
        match self.late:
            case LateChains.WAIT:
                return self._whole(candidates, complete)
            case LateChains.DROP:
                return self._with_cut(candidates, complete)
            case LateChains.BASELINE:
                return self._without_stale(complete)

    def _whole(self, candidates: list[Candidate], complete: list[Candidate]) -> Choice | None:
        # how many groups this batch must take, for those with so many batches left to fit into them
        needed = [
            sum(self._batches_left(group) <= batches for group in candidates) - batches * self.admission.batch_size
            for batches in range(self.admission.max_staleness + 1)
        ]
        # places that were to stay empty may be needed; a later batch has them empty instead
        places = max(self.admission.batch_size - self.empty, min(self.admission.batch_size, max(needed)))
        train = complete[:places]
        if len(train) < places:
            return None
        for batches, least in enumerate(needed):
            taken = sum(self._batches_left(group) <= batches for group in train)
            if taken < min(least, places):
                return None
        return self._chosen(train, [group for group in complete[places:] if self._expires(group)])

    def _with_cut(self, candidates: list[Candidate], complete: list[Candidate]) -> Choice:
        last_chance = [group for group in candidates if self._expires(group)]
        whole = [group for group in last_chance if group.complete]
        cut = [group for group in last_chance if not group.complete and group.teaches]
        cut.sort(key=lambda group: group.chains, reverse=True)
        others = [group for group in complete if not self._expires(group)]
        train = [*whole, *cut, *others][: self.admission.batch_size - self.empty]
        return self._chosen(train, [group for group in last_chance if group not in train])

    def _without_stale(self, complete: list[Candidate]) -> Choice | None:
        # without a token that is young enough for the current batch
        most = self.admission.max_staleness
        stale = [group for group in complete if group.newest is not None and self._age(group.newest) > most]
        fresh = [group for group in complete if group not in stale]
        if not self.is_due(len(fresh)):
            return Choice([], [group.id for group in stale]) if stale else None
        return self._chosen(fresh[: self.admission.batch_size - self.empty], stale)

    def _chosen(self, train: list[Candidate], cancel: list[Candidate]) -> Choice:
        self.chosen = self.admission.version + 1
        self.empty = max(0, self.empty - (self.admission.batch_size - len(train)))
        return Choice([group.id for group in train], [group.id for group in cancel])

    def _expires(self, group: Candidate) -> bool:
        """Return whether the group would be too old for the next version's batch."""
        return self._batches_left(group) == 0

    def _batches_left(self, group: Candidate) -> int:
        """Return how many batches after the current one can still take the group."""
        return max(0, self.admission.max_staleness - self._age(self._begun(group)))

    def _age(self, version: int) -> int:
        return self.admission.version - version

    def _begun(self, group: Candidate) -> int:
        return self.admission.version if group.oldest is None else group.oldest
