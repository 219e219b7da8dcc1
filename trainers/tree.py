"""Lines of tokens: rows one by one, end to end, or merged into trees of which every shared token is computed once.

A line lists its tokens so that each stands before those that may see it, and those stand together: token j is seen by
the tokens j, j + 1, ..., ends[j] - 1 and by no other. For a tree this is its preorder, in which a subtree is a range;
for rows end to end, ends[j] is the end of j's row. So one number per token is the whole attention mask.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Int

Ids = Int[np.ndarray, "tokens"]

PAIRS_PER_TOKEN = 2048
"""So many (token, token) pairs of attention cost as much as the layers of one token do otherwise. It is nearer 1,000
for networks of a few million parameters and 10,000 for a billion; of this size, it keeps lines short enough for all."""
PASS_TOKENS = 256
"""A further micro-batch costs as much as so many tokens, beyond its own."""


@dataclass(frozen=True)
class Line:
    """One line of a block. Token i sees the tokens j <= i with i < ends[j]."""

    ids: Ids
    positions: Ids
    """Place of each token in its rows."""
    ends: Ids
    paths: dict[int, Ids]
    """Number of a row -> where its tokens stand in the line."""
    branching: bool
    """Whether some token does not see all before it."""


def cost(line: Line) -> float:
    """Estimate of the work, in tokens."""
    return float(_cost(len(line.ids), line.branching))


def _cost(length: int | Ids, branching: bool | np.ndarray) -> np.ndarray:
    # a causal kernel skips the pairs that are masked, one that is given a mask does not
    return length + np.square(length) * np.where(branching, 1.0, 0.5) / PAIRS_PER_TOKEN


def padded_lines(rows: list[Ids]) -> list[Line]:
    """Each row on a line of its own."""
    return [_grow([(number, row)]) for number, row in enumerate(rows)]


def packed_lines(rows: list[Ids], token_budget: int) -> list[Line]:
    """Rows end to end, in lines no longer than the longest row within `token_budget`: attention costs a line's length
    squared, whatever its mask says. Rows are placed longest first, each where it leaves the least room (best fit);
    those over the budget stay alone."""
    room = max((len(row) for row in rows if len(row) <= token_budget), default=0)
    members: list[list[int]] = []
    free: list[tuple[int, int]] = []
    for number in sorted(range(len(rows)), key=lambda number: len(rows[number]), reverse=True):
        length = len(rows[number])
        place = bisect_left(free, (length, 0))
        if place == len(free):
            free.append((max(room, length), len(members)))
            members.append([])
        left, line = free.pop(place)
        members[line].append(number)
        insort(free, (left - length, line))
    return [_join([_grow([(number, rows[number])]) for number in line]) for line in members]


def _join(lines: list[Line]) -> Line:
    starts = np.cumsum([0] + [len(line.ids) for line in lines])
    return Line(
        ids=np.concatenate([line.ids for line in lines]),
        positions=np.concatenate([line.positions for line in lines]),
        ends=np.concatenate([line.ends + start for line, start in zip(lines, starts, strict=False)]),
        paths={n: path + s for line, s in zip(lines, starts, strict=False) for n, path in line.paths.items()},
        branching=len(lines) > 1,
    )


def tree_lines(rows: list[Ids], token_budget: int, processes: int = 1) -> list[Line]:
    """Rows that begin alike merged into trees, one tree a line; a row that shares nothing worth it stays alone.

    In lexicographic order a row shares most with its neighbours, so trees are ranges of that order; they are cut so
    that the estimated cost of all is least and none has more than `token_budget` tokens (but for a longer row, alone).
    What the rows of two trees share is computed in both. With several `processes`, trees are cut smaller where that
    lets the busiest process end sooner.
    """
    order = sorted(range(len(rows)), key=lambda number: rows[number].astype(">i8").tobytes())
    lengths = np.array([len(rows[number]) for number in order])
    shared = np.array([0] + [common(rows[one], rows[other]) for one, other in pairwise(order)])
    forks = np.concatenate([[False], shared[1:] < lengths[:-1]]).cumsum()
    # tokens of the tree of rows start..i are nodes[i] - nodes[start] + lengths[start]
    nodes = (lengths - shared).cumsum()
    roots = np.append(np.flatnonzero(shared == 0), len(rows))

    def plan(limit: int) -> tuple[list[tuple[int, int]], list[float]]:
        def costs(start: int) -> np.ndarray:
            window = slice(start, roots[np.searchsorted(roots, start, side="right")])
            sizes = nodes[window] - nodes[start] + lengths[start]
            branching = forks[window] > forks[start]
            # without a branch it is as long as its longest row, which may exceed the limit
            allowed = np.count_nonzero((sizes <= limit) | ~branching)
            return _cost(sizes[:allowed], branching[:allowed])

        ranges = _partition(len(rows), costs)
        return ranges, [float(costs(start)[end - start - 1]) for start, end in ranges]

    def busiest(work: list[float]) -> float:
        return max(sum(work[tree] for tree in share) for share in deal(work, processes))

    ranges, work = plan(token_budget)
    even = sum(work) / processes
    if busiest(work) > 1.1 * even:
        largest = max(int(nodes[end - 1] - nodes[start] + lengths[start]) for start, end in ranges)
        limits = np.geomspace(min(largest, token_budget), min(lengths.max(), token_budget), 8).astype(int)
        ranges, work = min((plan(limit) for limit in limits), key=lambda planned: busiest(planned[1]))
    return [_grow((number, rows[number]) for number in order[start:end]) for start, end in ranges]


def deal(work: list[float], processes: int) -> list[list[int]]:
    """Which of the pieces of `work` each process does: the most expensive first, each to the process with the least
    so far (Graham, 1969, "Bounds on multiprocessing timing anomalies")."""
    shares: list[list[int]] = [[] for _ in range(processes)]
    loads = [(0.0, rank) for rank in range(processes)]
    for piece in sorted(range(len(work)), key=work.__getitem__, reverse=True):
        load, rank = heapq.heappop(loads)
        shares[rank].append(piece)
        heapq.heappush(loads, (load + work[piece], rank))
    return shares


def _grow(rows: Iterable[tuple[int, Ids]]) -> Line:
    """The tree of (number, row) pairs, which come in lexicographic order of the rows."""
    paths: dict[int, Ids] = {}
    ids, positions, closed = [], [], []
    path = last = np.empty(0, dtype=np.int64)
    count, branching = 0, False
    for number, row in rows:
        shared = common(last, row)
        # whatever of the last row is not shared has got all its descendants
        closed.append((path[shared:], count))
        branching |= shared < len(path)
        path = np.concatenate([path[:shared], np.arange(count, count + len(row) - shared)])
        ids.append(row[shared:])
        positions.append(np.arange(shared, len(row)))
        count += len(row) - shared
        paths[number], last = path, row
    ends = np.full(count, count)
    for nodes, end in closed:
        ends[nodes] = end
    return Line(np.concatenate(ids), np.concatenate(positions), ends, paths, branching)


def common(one: Ids, other: Ids) -> int:
    """Number of tokens with which both begin."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


def cut_lines(lines: list[Line], token_budget: int) -> list[list[Line]]:
    """Lines cut into blocks of at most `token_budget` tokens with their padding, at the least estimated cost. A line
    longer than that goes alone. Those that need a mask and those that do not never come together."""
    blocks = []
    for branching in (True, False):
        chosen = sorted(
            (line for line in lines if line.branching == branching), key=lambda line: len(line.ids), reverse=True
        )
        each = [(len(line.ids), float(_cost(len(line.ids), branching))) for line in chosen]

        def costs(start: int, each: list[tuple[int, float]] = each) -> np.ndarray:
            # the first line of a block is its longest
            length, work = each[start]
            most = min(max(1, token_budget // length), len(each) - start)
            return PASS_TOKENS + work * np.arange(1, most + 1)

        blocks += [chosen[start:end] for start, end in _partition(len(chosen), costs)]
    return blocks


def _partition(count: int, costs: Callable[[int], np.ndarray]) -> list[tuple[int, int]]:
    """Cuts 0..count into ranges [start, end) so that the sum of their costs is least, where `costs(start)` are those of
    the ranges [start, start + 1), [start, start + 2), ..., as far as they are allowed."""
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    starts = np.zeros(count + 1, dtype=np.int64)
    for start in range(count):
        reached = best[start] + costs(start)
        window = slice(start + 1, start + 1 + len(reached))
        better = reached < best[window]
        best[window][better] = reached[better]
        starts[window][better] = start
    ranges = []
    while count:
        ranges.append((int(starts[count]), count))
        count = int(starts[count])
    return ranges[::-1]
