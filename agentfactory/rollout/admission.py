"""Which groups may start and which are trained: pure state machines, so that the bound on staleness can be tested."""

from dataclasses import dataclass


@dataclass
class Admission:
    """Bounds how far generation runs ahead of training.

    A group may start while `started < (max_staleness + 1 + version) * batch_size`: the groups beyond what version
    `version` has consumed are at most `max_staleness + 1` batches, so that groups which are trained in the order of
    their start keep within `max_staleness` updates; BatchChoice sees to those that are overtaken. `total` ends the
    run: no more groups than will be trained are started.
    """

    batch_size: int
    max_staleness: int
    total: int
    version: int = 0
    started: int = 0

    def may_start(self) -> bool:
        """Whether one more group may start now."""
        return self.started < min(self.total, (self.max_staleness + 1 + self.version) * self.batch_size)

    def start(self) -> None:
        """Count a group in."""
        if not self.may_start():
            raise ValueError(f"group {self.started} may not start at version {self.version}")
        self.started += 1

    def dropped(self) -> None:
        """A started group will not be delivered: another takes its place."""
        self.started -= 1

    def resume(self, groups: int) -> None:
        """Count in groups that an earlier run started, and that wait to be trained."""
        self.started += groups

    def publish(self, version: int) -> None:
        """New weights are live."""
        if version <= self.version:
            raise ValueError(f"version {version} follows {self.version}: versions must rise")
        self.version = version


@dataclass(frozen=True)
class Candidate:
    """A started group, as the choice of a batch sees it.

    `oldest` is the version of its oldest token (None: nothing is sampled yet), `complete` says that none of its chains
    runs any more. Of the chains that have ended, `chains` count, and `teaches` says whether these are worth training
    without the others.
    """

    id: str
    oldest: int | None
    complete: bool
    chains: int
    teaches: bool


@dataclass(frozen=True)
class Choice:
    """The groups of one batch, and those that no later batch may take."""

    train: list[str]
    cancel: list[str]


@dataclass
class BatchChoice:
    """Chooses each batch's groups, so that no token older than `max_staleness` updates is trained.

    Batch n is trained by the weights of version n, and is chosen once these are live: whoever takes it trains it at
    that version, so nothing grows older on the way. A group that is not chosen could be trained at version + 1 at the
    earliest. If its oldest token would be too old by then, this is its last chance: complete groups come first, then
    groups that run still, with the chains that have ended (most first) if these teach something; what finds no place
    is cancelled. Nothing is closed before enough groups are complete: at staleness 0 that means never, since every
    group is needed whole.
    """

    batch_size: int
    max_staleness: int
    version: int = 0
    chosen: int = 0
    """Batches chosen so far; the next one is for this version."""
    empty: int = 0
    """Places of the next batch that stay empty."""

    def publish(self, version: int) -> None:
        """New weights are live."""
        if version <= self.version:
            raise ValueError(f"version {version} follows {self.version}: versions must rise")
        self.version = version

    def leave_empty(self) -> bool:
        """Leave a place of the next batch empty, for a group that teaches nothing. False where it is the last one: a
        batch has one group at least."""
        if self.empty == self.batch_size - 1:
            return False
        self.empty += 1
        return True

    def choose(self, candidates: list[Candidate]) -> Choice | None:
        """The batch for the present version, or None while it is chosen already or too few groups are complete.

        `candidates` stand in the order in which their groups were started.
        """
        complete = [group for group in candidates if group.complete]
        places = self.batch_size - self.empty
        if self.chosen > self.version or len(complete) < places:
            return None
        last_chance = [group for group in candidates if self._expires(group)]
        whole = [group for group in last_chance if group.complete]
        cut = [group for group in last_chance if not group.complete and group.teaches]
        cut.sort(key=lambda group: group.chains, reverse=True)
        # oldest first: the younger ones have more time
        others = sorted((group for group in complete if not self._expires(group)), key=self._begun)
        train = [group.id for group in [*whole, *cut, *others][:places]]
        self.chosen, self.empty = self.version + 1, 0
        return Choice(train, [group.id for group in last_chance if group.id not in train])

    def _expires(self, group: Candidate) -> bool:
        """Whether it would be too old for the next version's batch."""
        return group.oldest is not None and self.version + 1 - group.oldest > self.max_staleness

    def _begun(self, group: Candidate) -> int:
        return self.version if group.oldest is None else group.oldest
