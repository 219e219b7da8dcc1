"""Packing: rows with common prefixes become trees; trees are assigned to processes and fill lines of a token budget.

A tree lists its tokens in preorder, so a token's descendants are contiguous, and token i attends to token j (an
ancestor of i, or i itself) if j <= i < ends[j]: one number per token defines the attention mask, also of trees placed
end to end in one line. A single row is a tree, too."""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

Ids = Int[np.ndarray, "tokens"]

PAIRS_PER_TOKEN = 2048
"""Number of attended token pairs that cost as much as all other work of a network for one token: about 1,000 were
measured at hidden size 256, and more are expected for larger sizes."""
PASS_TOKENS = 256
"""Additional cost of a further micro-batch, in tokens."""
BRANCH_TOKENS = 16
"""Additional cost of a branch, in tokens: its attention is computed separately."""
RUN_LENGTH = 256
"""Maximum number of a branch's tokens per attention call: half of the pairs among them are computed but masked."""


@dataclass(frozen=True)
class Tree:
    """Rows merged along common prefixes."""

    ids: Ids
    positions: Ids
    """Depth: the token's position in each of its rows."""
    ends: Ids
    """Index in the tree of the token's last descendant, plus one."""
    paths: dict[int, Ids]
    """Number of a row -> indices of its tokens in the tree."""

    @property
    def plain(self) -> bool:
        return int(self.positions[-1]) == len(self.ids) - 1


class TreePlan(NamedTuple):
    """A tree before it is grown: numbers of its rows in lexicographic order, and what it will be."""

    rows: tuple[int, ...]
    tokens: int
    cost: float
    plain: bool = True


def grow(rows: Iterable[tuple[int, Ids]]) -> Tree:
    """Return the tree of (number, row) pairs, which must be in lexicographic order of the rows."""
    paths: dict[int, Ids] = {}
    ids, positions, closed = [], [], []
    path = last = np.empty(0, dtype=np.int64)
    count = 0
    for number, row in rows:
        shared = _shared(last, row)
        # all descendants of the last row's remaining tokens are now known
        closed.append((path[shared:], count))
        path = np.concatenate([path[:shared], np.arange(count, count + len(row) - shared)])
        ids.append(row[shared:])
        positions.append(np.arange(shared, len(row)))
        count += len(row) - shared
        paths[number], last = path, row
    ends = np.full(count, count)
    for nodes, end in closed:
        ends[nodes] = end
    return Tree(np.concatenate(ids), np.concatenate(positions), ends, paths)


def _shared(one: Ids, other: Ids) -> int:
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


def merge(rows: list[Ids], token_budget: int, processes: int = 1) -> list[TreePlan]:
    """Plan trees of at most `token_budget` tokens that contain all rows, at the least estimated cost: ranges of the
    rows in lexicographic order. A row longer than the budget is in a tree with only its own prefixes. With several
    `processes`, trees are cut smaller if the busiest process then finishes sooner."""
    # by bytes: any order of tokens works if it is the same everywhere
    order = sorted(range(len(rows)), key=lambda number: rows[number].astype(np.int32).tobytes())
    lengths = np.array([len(rows[number]) for number in order])
    shared = np.array([0] + [_shared(rows[one], rows[other]) for one, other in pairwise(order)])
    roots = np.append(np.flatnonzero(shared == 0), len(rows))
    # for the tree of rows start..i: the value at i minus the value at start, plus start's row
    tokens = (lengths - shared).cumsum()
    forked = np.append(False, shared[1:] < lengths[:-1])
    forks = forked.cumsum()
    unforked = (row_work(lengths) - row_work(shared)).cumsum()
    work = unforked + (forked * _fork(lengths - shared)).cumsum()

    def plan(limit: int) -> tuple[list[tuple[int, int]], list[float]]:
        def costs(start: int) -> np.ndarray:
            small = np.searchsorted(tokens, limit + tokens[start] - lengths[start], side="right")
            plain = np.searchsorted(forks, forks[start], side="right")
            root = roots[np.searchsorted(roots, start, side="right")]
            return work[start : min(root, max(small, plain))] - work[start] + row_work(lengths[start : start + 1])

        ranges = _partition(len(rows), costs)
        return ranges, [float(costs(start)[end - start - 1]) for start, end in ranges]

    def busiest(work: list[float]) -> float:
        return max(sum(work[tree] for tree in share) for share in deal(work, processes))

    ranges, planned = plan(token_budget)
    if busiest(planned) > 1.1 * sum(planned) / processes:
        sizes = [tokens[end - 1] - tokens[start] + lengths[start] for start, end in ranges]
        limits = np.geomspace(min(max(sizes), token_budget), min(lengths.max(), token_budget), 8).astype(int)
        ranges, planned = min((plan(limit) for limit in limits), key=lambda found: busiest(found[1]))
    plans = []
    for start, end in ranges:
        size = int(tokens[end - 1] - tokens[start] + lengths[start])
        cost = float(unforked[end - 1] - unforked[start] + row_work(lengths[start]))
        plans.append(TreePlan(tuple(order[start:end]), size, cost, plain=size == lengths[end - 1]))
    return plans


def row_work(lengths: Ids) -> Float[np.ndarray, "rows"]:
    """Return the cost of rows of these lengths, in tokens."""
    return lengths + lengths * (lengths - 1) / 2 / PAIRS_PER_TOKEN


def _fork(lengths: Ids) -> Float[np.ndarray, "rows"]:
    """Return the additional cost, in tokens, of computing branches of these lengths apart from their prefix."""
    return BRANCH_TOKENS + lengths * np.minimum(lengths, RUN_LENGTH) / 2 / PAIRS_PER_TOKEN


def deal(work: Sequence[float], processes: int) -> list[list[int]]:
    """Assign the pieces of `work` to processes: the most expensive first, each to the process with the least work so
    far (Graham, 1969, "Bounds on multiprocessing timing anomalies")."""
    shares: list[list[int]] = [[] for _ in range(processes)]
    loads = [(0.0, rank) for rank in range(processes)]
    for piece in sorted(range(len(work)), key=work.__getitem__, reverse=True):
        load, rank = heapq.heappop(loads)
        shares[rank].append(piece)
        heapq.heappush(loads, (load + work[piece], rank))
    return shares


def fill(trees: list[TreePlan], token_budget: int) -> list[list[TreePlan]]:
    """Distribute trees to lines of at most `token_budget` tokens, the longest first, each to the line where it leaves
    the least room (best fit). A longer tree gets a separate line."""
    lines: list[list[TreePlan]] = []
    free: list[tuple[int, int]] = []
    for tree in sorted(trees, key=lambda tree: tree.tokens, reverse=True):
        length = tree.tokens
        place = bisect_left(free, (length, 0))
        if place == len(free):
            free.append((max(token_budget, length), len(lines)))
            lines.append([])
        room, line = free.pop(place)
        lines[line].append(tree)
        insort(free, (room - length, line))
    return lines


def stack(trees: list[TreePlan], token_budget: int) -> list[list[TreePlan]]:
    """Distribute trees to blocks of one line each, all padded to the longest, of at most `token_budget` tokens, at the
    least estimated cost. A longer tree gets a separate block."""
    ordered = sorted(trees, key=lambda tree: tree.tokens, reverse=True)
    lengths = np.array([tree.tokens for tree in ordered])
    work = row_work(lengths)

    def costs(start: int) -> np.ndarray:
        # the first line of a block is its longest
        most = min(max(1, token_budget // lengths[start]), len(ordered) - start)
        return PASS_TOKENS + work[start] * np.arange(1, most + 1)

    return [ordered[start:end] for start, end in _partition(len(ordered), costs)]


def _partition(count: int, costs: Callable[[int], np.ndarray]) -> list[tuple[int, int]]:
    """Cut 0..count into ranges [start, end) with the least sum of costs, where `costs(start)` are the costs of the
    ranges [start, start + 1), [start, start + 2), ..., as far as they are allowed."""
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
