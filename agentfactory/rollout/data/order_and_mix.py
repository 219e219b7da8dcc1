"""The order of tasks, the mixture of several sources, and positions in them."""

import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count

from agentfactory.rollout.data.load import Task


@dataclass(frozen=True, order=True)
class Place:
    """A position in the task order, and the number of the attempt at it."""

    position: int
    attempt: int = 0

    @property
    def group_id(self) -> str:
        return f"g{self.position:06d}" + (f"-{self.attempt}" if self.attempt else "")

    @classmethod
    def of(cls, group_id: str) -> "Place":
        """Return the place of a group. Raise ValueError if `group_id` is not a group's id."""
        found = re.fullmatch(r"g(\d{6,})(?:-(\d+))?", group_id)
        if found is None:
            raise ValueError(f"{group_id!r} is not the id of a group, such as g000012 or g000012-1")
        return cls(int(found[1]), int(found[2] or 0))


@dataclass(frozen=True)
class Share:
    """The positions in the task order that one of several workers runs: every `of`-th, starting at `number`."""

    number: int
    of: int

    def __contains__(self, position: int) -> bool:
        return position % self.of == self.number

    def part(self, count: int) -> int:
        """Return this worker's part of `count`, which all workers share; at least 1."""
        return max(1, count // self.of + (self.number < count % self.of))


WHOLE = Share(0, 1)


class TaskOrder:
    """An endless order of tasks, reshuffled each epoch. The n-th task depends only on (seed, n), as resuming needs."""

    def __init__(self, tasks: list[Task], seed: int, shuffle: bool):
        self.tasks = tasks
        self.seed = seed
        self.shuffle = shuffle
        self._epoch = -1
        self._order = list(range(len(tasks)))

    def __getitem__(self, position: int) -> Task:
        return self.tasks[self.row(position)]

    def row(self, position: int) -> int:
        """Return the index of the row at `position`; both count from 0."""
        epoch, index = divmod(position, len(self.tasks))
        if self.shuffle and epoch != self._epoch:
            self._order = list(range(len(self.tasks)))
            random.Random(f"tasks/{self.seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._order[index]


class TaskMix:
    """A mixture of the tasks of several sources, in proportion to their weights, each in its own order. The source at a
    position depends only on (seed, weights, position), so a resumed run needs only the position."""

    _BLOCK = 1024

    def __init__(self, orders: Sequence[TaskOrder], weights: Sequence[float], seed: int):
        self.orders = orders
        self.weights = weights
        self.seed = seed
        self._blocks: list[tuple[list[int], list[int]]] = []
        """Per block, the source at each position, and the position in this source's own order."""
        self._drawn: dict[int, Iterator[int]] = defaultdict(count)
        self._starts = [0, *accumulate(len(order.tasks) for order in orders)]

    def source(self, position: int) -> int:
        """Return the source at `position`, counted from 0. Unlike `place`, it never shuffles an epoch."""
        return self._drawn_at(position)[0]

    def place(self, position: int) -> tuple[int, int]:
        """Return the source at `position`, and the row of its tasks; both count from 0."""
        source, own = self._drawn_at(position)
        return source, self.orders[source].row(own)

    def number(self, position: int) -> int:
        """Return the row at `position`, counted over the tasks of all sources."""
        source, row = self.place(position)
        return self._starts[source] + row

    def _drawn_at(self, position: int) -> tuple[int, int]:
        if len(self.orders) == 1:
            return 0, position
        block, index = divmod(position, self._BLOCK)
        while len(self._blocks) <= block:
            draws = random.Random(f"sources/{self.seed}/{len(self._blocks)}")
            drawn = draws.choices(range(len(self.orders)), self.weights, k=self._BLOCK)
            self._blocks.append((drawn, [next(self._drawn[source]) for source in drawn]))
        sources, positions = self._blocks[block]
        return sources[index], positions[index]
